"""A model's layers as files that travel: what a master offers, and what a worker keeps of it.

One safetensors file a layer, with the tensors of that layer as they are stored, and `manifest.json`, which names all files with their sizes and
the SHA-256 of every piece of PIECE_BYTES. The SHA-256 of the manifest is the offer's `model_hash`, so that it names configuration and weights.
A worker takes a file piece by piece, each checked before it is written, under a temporary name until the file is whole.
"""

import hashlib
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from zrt.runtime.compute.headers import TensorEntry, open_file
from zrt.runtime.compute.inventory import Inventory
from zrt.runtime.compute.layout import block_name, block_shapes
from zrt.runtime.compute.spec import ModelSpec
from zrt.runtime.errors import ZrtError

PIECE_BYTES: Final = 64 * 1024 * 1024
MANIFEST: Final = "manifest.json"
_HASH: Final = re.compile(r"[0-9a-f]{64}")
_FILE: Final = re.compile(r"layer-\d{5}\.safetensors")

Size = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class ManifestFile(Struct, frozen=True):
    """`pieces`: SHA-256 in hex of every PIECE_BYTES of the file; the last piece may be shorter."""

    name: str
    size: Size
    pieces: tuple[str, ...]


class Manifest(Struct, frozen=True):
    """`config` is the SHA-256 in hex of the config.json's text."""

    config: str
    files: list[ManifestFile]


def digest(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


# ---- the master's side ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LayerFile:
    """A file that is put together as it is read: a header, then tensors where they lie in the model's own files."""

    name: str
    head: bytes
    tensors: tuple[TensorEntry, ...]

    @classmethod
    def of(cls, inventory: Inventory, spec: ModelSpec, layer: int) -> "LayerFile":
        """ZrtError bad_model unless all tensors of the layer are there."""
        entries: dict[str, TensorEntry] = {}
        for part, shape in block_shapes(spec).items():
            name = block_name(layer, part)
            inventory.check(name, shape)
            entries[name] = inventory.entry(name)
        table, end = {}, 0
        for name, entry in entries.items():
            table[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [end, end + entry.nbytes]}
            end += entry.nbytes
        text = msgspec.json.encode(table)
        text += b" " * (-len(text) % 8)
        return cls(f"layer-{layer:05d}.safetensors", len(text).to_bytes(8, "little") + text, tuple(entries.values()))

    @property
    def size(self) -> int:
        return len(self.head) + sum(entry.nbytes for entry in self.tensors)

    def read(self, offset: int, size: int) -> bytes:
        """Bytes from `offset` on, `size` of them or what there is. ZrtError bad_model: a file ended early."""
        parts = [self.head[offset : offset + size]]
        begin, end = len(self.head), offset + size
        for entry in self.tensors:
            first, last = max(offset, begin), min(end, begin + entry.nbytes)
            if first < last:
                parts.append(_read(entry, first - begin, last - first))
            begin += entry.nbytes
        return b"".join(parts)


class Offer:
    """Layers of a model, ready to be pushed. Nothing of them is kept in memory."""

    def __init__(self, files: Sequence[LayerFile], config_json: str) -> None:
        self.files = list(files)
        listed = [
            ManifestFile(
                file.name,
                file.size,
                tuple(digest(file.read(at, PIECE_BYTES)) for at in range(0, file.size, PIECE_BYTES)),
            )
            for file in self.files
        ]
        self.manifest = msgspec.json.encode(Manifest(digest(config_json.encode()), listed))
        self.model_hash = digest(self.manifest)


def _read(entry: TensorEntry, offset: int, size: int) -> bytes:
    descriptor = open_file(entry.file)
    try:
        parts, done = [], 0
        while done < size:
            part = os.pread(descriptor, size - done, entry.begin + offset + done)
            if not part:
                raise ZrtError("bad_model", f"{entry.file} ends early", str(entry.file))
            parts.append(part)
            done += len(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)


# ---- the worker's side ----------------------------------------------------------------------------------------------


class LayerStore:
    """The files of one `model_hash`, in a folder of their own under `root`. ZrtError bad_request for a hash that is none."""

    def __init__(self, root: Path, model_hash: str) -> None:
        if not _HASH.fullmatch(model_hash):
            raise ZrtError("bad_request", f"model_hash: expected 64 hex digits, got {model_hash[:80]!r}")
        self.model_hash = model_hash
        self._folder = root / model_hash
        self.manifest = self._known()
        self._checked: dict[str, int] = {}

    @property
    def complete(self) -> bool:
        return self.manifest is not None and all(self._whole(file) for file in self.manifest.files)

    def files(self) -> list[Path]:
        """ZrtError bad_request while some are not complete."""
        if self.manifest is None or not self.complete:
            raise ZrtError("bad_request", f"the files of {self.model_hash[:12]} are not complete")
        return [self._folder / file.name for file in self.manifest.files]

    def take(self, name: str, offset: int, total: int, data: bytes | memoryview) -> int:
        """Write a piece; how many bytes of the file are then held, from its start on. An empty one asks that alone.

        ZrtError bad_request: no such file, a wrong total, another offset than the bytes held, or bytes that are not the manifest's;
        insufficient_memory: the disk is full. What was held stays held.
        """
        try:
            if name == MANIFEST:
                return self._take_manifest(offset, total, data)
            return self._take_piece(self._listed(name, total), offset, data)
        except OSError as error:
            raise ZrtError("insufficient_memory", f"{name} cannot be written: {error.strerror}") from None

    def _take_manifest(self, offset: int, total: int, data: bytes | memoryview) -> int:
        if len(data) == 0:
            return total if self.manifest is not None else 0
        if offset != 0 or len(data) != total:
            raise ZrtError(
                "bad_request", f"{MANIFEST}: expected it in one piece, got {len(data)} of {total} at {offset}"
            )
        if digest(data) != self.model_hash:
            raise ZrtError("bad_request", f"{MANIFEST}: its hash is not {self.model_hash}")
        manifest = _manifest(data)
        self._folder.mkdir(parents=True, exist_ok=True)
        _write_whole(self._folder / MANIFEST, data)
        self.manifest = manifest
        self._adopt(manifest)
        return total

    def _adopt(self, manifest: Manifest) -> None:
        """Take over files that other offers brought: layers are given out anew when a worker is lost, and what was sent is not sent again.

        A whole file becomes a link, half a one is moved: what it holds is checked as ever.
        """
        wanted = {file for file in manifest.files if not self._whole(file)}
        for folder in self._folder.parent.iterdir():
            if not wanted or folder == self._folder or not _HASH.fullmatch(folder.name):
                continue
            known = LayerStore(self._folder.parent, folder.name).manifest
            for file in wanted.intersection(known.files if known is not None else ()):
                for there, here, take in (
                    (folder / file.name, self._folder / file.name, os.link),
                    (folder / f"{file.name}.part", self._partial(file), os.replace),
                ):
                    with suppress(OSError):  # it is not there, or is being taken by another worker of this machine
                        take(there, here)
            wanted = {file for file in wanted if not self._whole(file)}

    def _listed(self, name: str, total: int) -> ManifestFile:
        if self.manifest is None:
            raise ZrtError("bad_request", f"{MANIFEST} comes before {name[:80]!r}")
        file = next((file for file in self.manifest.files if file.name == name), None)
        if file is None:
            raise ZrtError("bad_request", f"{name[:80]!r} is no file of the manifest")
        if total != file.size:
            raise ZrtError("bad_request", f"{name}: {total} bytes in all, the manifest says {file.size}")
        return file

    def _take_piece(self, file: ManifestFile, offset: int, data: bytes | memoryview) -> int:
        if not offset or file.name not in self._checked:
            self._checked[file.name] = self._held(file)
        held = self._checked[file.name]
        if len(data) == 0:
            return held
        size = min(PIECE_BYTES, file.size - held)
        if offset != held or len(data) != size:
            raise ZrtError("bad_request", f"{file.name}: expected {size} bytes at {held}, got {len(data)} at {offset}")
        if digest(data) != file.pieces[held // PIECE_BYTES]:
            raise ZrtError("bad_request", f"{file.name}: the {size} bytes at {held} are not those of the manifest")
        with self._partial(file).open("r+b" if held else "wb") as partial:
            partial.truncate(held)
            partial.seek(held)
            partial.write(data)
            partial.flush()
            os.fsync(partial.fileno())
        if held + size == file.size:
            self._partial(file).replace(self._folder / file.name)
        self._checked[file.name] = held + size
        return held + size

    def _held(self, file: ManifestFile) -> int:
        """Whole pieces, as they were checked before they were written; one that the disk lost half of is not held."""
        if self._whole(file):
            return file.size
        try:
            with self._partial(file).open("rb") as partial:
                held = 0
                for piece in file.pieces:
                    data = partial.read(min(PIECE_BYTES, file.size - held))
                    if digest(data) != piece:
                        break
                    held += len(data)
        except FileNotFoundError:
            return 0
        if held == file.size:
            self._partial(file).replace(self._folder / file.name)
        return held

    def _whole(self, file: ManifestFile) -> bool:
        try:
            return (self._folder / file.name).stat().st_size == file.size
        except FileNotFoundError:
            return False

    def _partial(self, file: ManifestFile) -> Path:
        return self._folder / f"{file.name}.part"

    def _known(self) -> Manifest | None:
        try:
            data = (self._folder / MANIFEST).read_bytes()
        except FileNotFoundError:
            return None
        return _manifest(data) if digest(data) == self.model_hash else None


def _manifest(data: bytes | memoryview) -> Manifest:
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (ValueError, RecursionError) as error:
        raise ZrtError("bad_request", f"{MANIFEST}: {error}") from None
    for file in manifest.files:
        if not _FILE.fullmatch(file.name):
            raise ZrtError("bad_request", f"{MANIFEST}: {file.name[:80]!r} is no name of a layer's file")
        if len(file.pieces) != -(-file.size // PIECE_BYTES) or not file.size:
            raise ZrtError("bad_request", f"{MANIFEST}: {file.name} has {len(file.pieces)} pieces of {file.size} bytes")
    if len({file.name for file in manifest.files}) != len(manifest.files):
        raise ZrtError("bad_request", f"{MANIFEST}: a file is named twice")
    return manifest


def _write_whole(path: Path, data: bytes | memoryview) -> None:
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
