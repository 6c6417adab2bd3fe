"""The layers of a model as files that travel: what a master says of the files it offers, before it
sends any.

There is one safetensors file per layer, with the tensors of that layer as they are stored, and
`manifest.json`, which names all files with their sizes and the SHA-256 of every piece of
PIECE_BYTES. The SHA-256 of the manifest is the offer's `model_hash`, so that it names configuration
and weights. A master puts its files together as they are read (offer.py); a worker keeps them
(store.py). Either side hashes each byte once, as it passes.
"""

import hashlib
import re
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from zrt.runtime.errors import ZrtError

PIECE_BYTES: Final = 64 * 1024 * 1024
READ_BYTES: Final = 1024 * 1024
"""Bytes hashed at once: few enough that they are still in the processor's cache after the read."""
HASHERS: Final = 4
"""Threads that hash the files of one model."""
MANIFEST: Final = "manifest.json"
_FILE: Final = re.compile(r"layer-\d{5}\.safetensors")

Size = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class ManifestFile(Struct, frozen=True):
    """One layer's file. `pieces` are the SHA-256 in hex of every PIECE_BYTES of the file; the last
    piece may be shorter."""

    name: str
    size: Size
    pieces: tuple[str, ...]


class Manifest(Struct, frozen=True):
    """The files of a model's layers. `config` is the SHA-256 in hex of the config.json's text."""

    config: str
    files: list[ManifestFile]


def digest(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def parse_manifest(data: bytes | memoryview) -> Manifest:
    """Return the manifest in a JSON text. ZrtError bad_request: the text is no manifest, or names a
    file that is no layer's."""
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
