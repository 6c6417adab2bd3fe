"""A model's layers as files that travel: what a master offers, and what a worker keeps of it.

One safetensors file a layer, with the tensors of that layer as they are stored, and `manifest.json`, which names all files with their sizes and
the SHA-256 of every piece of PIECE_BYTES. The SHA-256 of the manifest is the offer's `model_hash`, so that it names configuration and weights.
A worker takes a file chunk by chunk, under a temporary name until all its pieces are checked and on disk. Either side hashes each byte once, while
it passes; what a worker finds of an earlier push is hashed again, whole files before they are read the first time. A file that is not what
the manifest says is taken away, to be sent again. Workers of one machine may have one cache, and be sent the same at once.
"""

import hashlib
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
CHUNK_BYTES: Final = 8 * 1024 * 1024
"""Bytes that a master sends at once: few, so that reading, sending, hashing and writing all go on at the same time and little memory is held."""
READ_BYTES: Final = 1024 * 1024
"""Bytes hashed at once: what was read is then still in the processor's cache."""
HASHERS: Final = 4
"""Threads that hash an offer."""
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

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `offset` on. ZrtError bad_model: a file ended early, or cannot be read."""
        end = offset + len(into)
        head = self.head[offset:end]
        into[: len(head)] = head
        begin = len(self.head)
        for entry in self.tensors:
            first, last = max(offset, begin), min(end, begin + entry.nbytes)
            if first < last:
                _read(entry, first - begin, into[first - offset : last - offset])
            begin += entry.nbytes

    def pieces(self) -> list[tuple[int, int]]:
        """Offset and size of each."""
        return [(at, min(PIECE_BYTES, self.size - at)) for at in range(0, self.size, PIECE_BYTES)]

    def chunks(self, held: int) -> Iterator[tuple[int, int]]:
        """Offset and size of each that follows `held` bytes; none goes beyond the end of a piece."""
        while held < self.size:
            size = min(CHUNK_BYTES, PIECE_BYTES - held % PIECE_BYTES, self.size - held)
            yield held, size
            held += size

    def hashed(self, offset: int, size: int) -> str:
        """The SHA-256 in hex of a piece."""
        found, buffer = hashlib.sha256(), memoryview(bytearray(min(READ_BYTES, size)))
        for at in range(offset, offset + size, READ_BYTES):
            part = buffer[: offset + size - at]
            self.read(at, part)
            found.update(part)
        return found.hexdigest()


class Offer:
    """Layers of a model, ready to be pushed. Nothing of them is kept in memory. Blocks while it hashes them."""

    def __init__(self, files: Sequence[LayerFile], config_json: str) -> None:
        self.files = list(files)
        with ThreadPoolExecutor(HASHERS, "hash") as pool:
            hashes = [[pool.submit(file.hashed, *piece) for piece in file.pieces()] for file in self.files]
            listed = [
                ManifestFile(file.name, file.size, tuple(piece.result() for piece in pieces))
                for file, pieces in zip(self.files, hashes, strict=True)
            ]
        self.manifest = msgspec.json.encode(Manifest(digest(config_json.encode()), listed))
        self.model_hash = digest(self.manifest)


def _read(entry: TensorEntry, offset: int, into: memoryview) -> None:
    descriptor = open_file(entry.file)
    try:
        done = 0
        while done < len(into):
            count = os.preadv(descriptor, [into[done:]], entry.begin + offset + done)
            if not count:
                raise ZrtError("bad_model", f"{entry.file} ends early", str(entry.file))
            done += count
    except OSError as error:
        raise ZrtError("bad_model", f"{entry.file} cannot be read: {error.strerror}", str(entry.file)) from None
    finally:
        os.close(descriptor)


# ---- the worker's side ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Part:
    """What has come of a file: `held` bytes from its start on, of which those of the piece it is in are not checked yet; `hash` is that piece's."""

    held: int
    hash: "hashlib._Hash"

    def take(self, data: bytes | memoryview) -> None:
        self.hash.update(data)
        self.held += len(data)

    def cut(self) -> int:
        """Forget the piece it is in; what is left."""
        self.held = (self.held - 1) // PIECE_BYTES * PIECE_BYTES if self.held else 0
        self.hash = hashlib.sha256()
        return self.held


class LayerStore:
    """The files of one `model_hash`, in a folder of their own under `root`. ZrtError bad_request for a hash that is none.

    One thread uses it, and closes it. Two of its own write: one the chunk that is being hashed, one brings files that are whole to disk.
    """

    def __init__(self, root: Path, model_hash: str) -> None:
        if not _HASH.fullmatch(model_hash):
            raise ZrtError("bad_request", f"model_hash: expected 64 hex digits, got {model_hash[:80]!r}")
        self.model_hash = model_hash
        self._folder = root / model_hash
        self.manifest = _known(self._folder)
        self._parts: dict[str, Part] = {}
        self._sound: set[str] = set()  # whole files whose bytes this process has checked
        self._disk = ThreadPoolExecutor(2, "disk")
        self._finishing: list[Future[None]] = []

    def close(self) -> None:
        """Take nothing more. What is being written is finished."""
        self._disk.shutdown(wait=False)

    @property
    def complete(self) -> bool:
        """Whether all files are whole and on disk. ZrtError insufficient_memory: the disk is full."""
        self._settle()
        return self.manifest is not None and all(self._whole(file) for file in self.manifest.files)

    def files(self) -> list[Path]:
        """Each is what the manifest says. ZrtError bad_request while some are not complete; insufficient_memory: the disk is full;
        worker_failed: some were not, and have to be sent again."""
        if not self.complete or self.manifest is None:
            raise ZrtError("bad_request", f"the files of {self.model_hash[:12]} are not complete")
        unknown = [file for file in self.manifest.files if file.name not in self._sound]
        with ThreadPoolExecutor(HASHERS, "hash") as pool:
            damaged = [file for file, sound in zip(unknown, pool.map(self._matches, unknown), strict=True) if not sound]
        for file in damaged:
            self._discard(file)
        if damaged:
            names = ", ".join(file.name for file in damaged)
            raise ZrtError(
                "worker_failed", f"the cache held other bytes than were sent, as {names}: they are sent again"
            )
        self._sound.update(file.name for file in unknown)
        return [self._folder / file.name for file in self.manifest.files]

    def _settle(self) -> None:
        """Wait for what is being brought to disk."""
        finishing, self._finishing = self._finishing, []
        try:
            for file in finishing:
                file.result()
        except OSError as error:
            raise ZrtError("insufficient_memory", f"the layers cannot be written: {error.strerror}") from None

    def take(self, name: str, offset: int, total: int, data: bytes | memoryview) -> int:
        """Write a chunk, which ends where a piece ends or before; how many bytes of the file are then held, from its start on. An empty one
        asks that alone.

        ZrtError bad_request: no such file, a wrong total, another offset than the bytes held, more than the piece, or a piece whose bytes are
        not the manifest's; insufficient_memory: the disk is full. Of what was held, the pieces that are whole stay held.
        """
        try:
            if name == MANIFEST:
                return self._take_manifest(offset, total, data)
            return self._take_chunk(self._listed(name, total), offset, data)
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

        A file becomes a link, half a one where there is none yet, and what it holds is checked as ever. Whoever is being sent the same writes
        the same there.
        """
        wanted = {file for file in manifest.files if not self._whole(file)}
        for folder in self._folder.parent.iterdir():
            if not wanted or folder == self._folder or not _HASH.fullmatch(folder.name):
                continue
            known = _known(folder)
            for file in wanted.intersection(known.files if known is not None else ()):
                partial = self._partial(file)
                for name in (file.name, partial.name):
                    with suppress(OSError):  # it is not there, or is here
                        os.link(folder / name, self._folder / name)
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

    def _take_chunk(self, file: ManifestFile, offset: int, data: bytes | memoryview) -> int:
        if len(data) == 0:
            return self._found(file).held
        part = self._parts.get(file.name) or self._found(file)
        room = min(PIECE_BYTES - part.held % PIECE_BYTES, file.size - part.held)
        if offset != part.held or len(data) > room:
            text = f"{file.name}: expected at most {room} bytes at {part.held}, got {len(data)} at {offset}"
            raise ZrtError("bad_request", text)
        piece, number = len(data) == room, part.held // PIECE_BYTES
        written = self._disk.submit(self._write, file, offset, data)
        part.take(data)
        try:
            written.result()
            if piece and part.hash.hexdigest() != file.pieces[number]:
                text = (
                    f"{file.name}: the bytes from {number * PIECE_BYTES} to {part.held} are not those of the manifest"
                )
                raise ZrtError("bad_request", text)
        except FileNotFoundError:
            del self._parts[file.name]
            text = f"{file.name}: what was held is gone, or another worker was sent it as well: ask anew what is held"
            raise ZrtError("worker_failed", text) from None
        except BaseException:
            part.cut()
            raise
        if piece:
            part.hash = hashlib.sha256()
        if part.held == file.size:
            self._finishing.append(self._disk.submit(self._finish, file))
        return part.held

    def _write(self, file: ManifestFile, offset: int, data: bytes | memoryview) -> None:
        begins = 0 if offset else os.O_CREAT  # what was taken before is there, or else there would be a hole
        descriptor = os.open(self._partial(file), os.O_WRONLY | os.O_CLOEXEC | begins, 0o666)
        try:
            view, done = memoryview(data), 0
            while done < len(view):
                done += os.pwrite(descriptor, view[done:], offset + done)
        finally:
            os.close(descriptor)

    def _finish(self, file: ManifestFile) -> None:
        """All of it is there and checked: on disk, and under its own name."""
        partial = self._partial(file)
        try:
            descriptor = os.open(partial, os.O_RDWR | os.O_CLOEXEC)
            try:
                os.ftruncate(descriptor, file.size)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            partial.replace(self._folder / file.name)
        except FileNotFoundError:
            return  # another worker was sent the same, and was faster; or it is gone, and does not count as held
        if file.name in self._parts:
            self._sound.add(file.name)

    def _found(self, file: ManifestFile) -> Part:
        """What is held, looked up: what this process took itself, as long as it is there; else the whole pieces that were taken before."""
        part = self._parts.get(file.name)
        if part is None or self._there(file) < part.held:
            part = self._parts[file.name] = Part(self._checked(file), hashlib.sha256())
        return part

    def _there(self, file: ManifestFile) -> int:
        """Bytes on disk, checked or not."""
        if self._whole(file):
            return file.size
        try:
            return self._partial(file).stat().st_size
        except FileNotFoundError:
            return 0

    def _checked(self, file: ManifestFile) -> int:
        """Whole pieces of a file that was begun; one that the disk lost half of is not held."""
        if self._whole(file):
            return file.size
        try:
            held = _sound_bytes(self._partial(file), file)
        except FileNotFoundError:
            return 0
        if held == file.size:
            self._finish(file)
        return held

    def _whole(self, file: ManifestFile) -> bool:
        """Whether it is there, and as long as it should be."""
        try:
            found = (self._folder / file.name).stat()
        except OSError:
            return False
        return stat.S_ISREG(found.st_mode) and found.st_size == file.size

    def _matches(self, file: ManifestFile) -> bool:
        try:
            return _sound_bytes(self._folder / file.name, file) == file.size
        except OSError:
            return False

    def _discard(self, file: ManifestFile) -> None:
        self._parts.pop(file.name, None)
        try:
            (self._folder / file.name).unlink(missing_ok=True)
        except OSError as error:
            raise ZrtError("insufficient_memory", f"{file.name} cannot be replaced: {error.strerror}") from None

    def _partial(self, file: ManifestFile) -> Path:
        return self._folder / f"{file.name}.part"


def _known(folder: Path) -> Manifest | None:
    """What a folder of the cache holds the files of, if that can be told: zrt of another version may have written it."""
    try:
        data = (folder / MANIFEST).read_bytes()
        return _manifest(data) if digest(data) == folder.name else None
    except (OSError, ZrtError):
        return None


def _sound_bytes(path: Path, file: ManifestFile) -> int:
    """How many bytes, in whole pieces from the start on, are the manifest's."""
    held, buffer = 0, memoryview(bytearray(READ_BYTES))
    with path.open("rb", buffering=0) as opened:
        for piece in file.pieces:
            end, found = min(held + PIECE_BYTES, file.size), hashlib.sha256()
            for at in range(held, end, READ_BYTES):
                found.update(buffer[: opened.readinto(buffer[: end - at])])
            if found.hexdigest() != piece:
                break
            held = end
    return held


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
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".new", delete=False) as file:  # others may write the same
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except OSError:
            os.unlink(file.name)
            raise
