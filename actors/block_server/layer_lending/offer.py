"""The offer of a model's layers by a master: files that are put together as they are read, and
their manifest (layer_manifest.py)."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import msgspec

from zrt.runtime.errors import ZrtError
from zrt.runtime.model_files import open_model_file
from zrt.runtime.models.architecture.spec import ModelSpec
from zrt.runtime.models.checkpoint.index import CheckpointIndex
from zrt.runtime.models.checkpoint.layer_manifest import (
    HASHERS,
    PIECE_BYTES,
    READ_BYTES,
    Manifest,
    ManifestFile,
    digest,
)
from zrt.runtime.models.checkpoint.layout import block_name, block_shapes
from zrt.runtime.models.checkpoint.safetensors import TensorEntry

CHUNK_BYTES: Final = 8 * 1024 * 1024
"""Bytes that a master sends at once: few, so that reading, sending, hashing and writing all go on
at the same time and little memory is held."""


@dataclass(frozen=True, slots=True)
class LayerFile:
    """A file that is put together as it is read: a header, then tensors where they lie in the
    model's own files."""

    name: str
    head: bytes
    tensors: tuple[TensorEntry, ...]

    @classmethod
    def of(cls, index: CheckpointIndex, spec: ModelSpec, layer: int) -> "LayerFile":
        """Return a layer's file. ZrtError bad_model unless all tensors of the layer are there."""
        entries: dict[str, TensorEntry] = {}
        for part, shape in block_shapes(spec).items():
            name = block_name(layer, part)
            index.check(name, shape)
            entries[name] = index.entry(name)
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
        """Fill `into` with the bytes from `offset` on. ZrtError bad_model: a file ended early, or
        cannot be read."""
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
        """Return the offset and size of each piece."""
        return [(at, min(PIECE_BYTES, self.size - at)) for at in range(0, self.size, PIECE_BYTES)]

    def chunks(self, held: int) -> Iterator[tuple[int, int]]:
        """Yield the offset and size of each chunk that follows `held` bytes; none goes beyond the
        end of a piece."""
        while held < self.size:
            size = min(CHUNK_BYTES, PIECE_BYTES - held % PIECE_BYTES, self.size - held)
            yield held, size
            held += size

    def hashed(self, offset: int, size: int) -> str:
        """Return the SHA-256 of a piece, in hex."""
        found, buffer = hashlib.sha256(), memoryview(bytearray(min(READ_BYTES, size)))
        for at in range(offset, offset + size, READ_BYTES):
            part = buffer[: offset + size - at]
            self.read(at, part)
            found.update(part)
        return found.hexdigest()


class Offer:
    """Layers of a model, ready to be pushed. None of their bytes are kept in memory. Making an
    offer blocks while it hashes them."""

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
    descriptor = open_model_file(entry.file)
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
