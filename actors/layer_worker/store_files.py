"""The single files of a layer store: the part of a file that has come, the pieces that are sound,
and the error for a file that cannot be written or read."""

import errno
import hashlib
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from zrt.runtime.errors import ZrtError
from zrt.runtime.models.checkpoint.layer_manifest import (
    MANIFEST,
    PIECE_BYTES,
    READ_BYTES,
    Manifest,
    ManifestFile,
    digest,
    parse_manifest,
)

GONE: Final = "is gone"
AGAIN: Final = "it is sent again"
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@dataclass(slots=True)
class PartialFile:
    """A file of which a part has come: `held` bytes from its start on. The bytes of the last piece,
    if that is not whole, are not checked yet; `hash` is that piece's."""

    held: int
    hash: "hashlib._Hash"

    def take(self, data: bytes | memoryview) -> None:
        """Count and hash the bytes that follow."""
        self.hash.update(data)
        self.held += len(data)

    def cut(self) -> int:
        """Forget the piece that is being taken; return the bytes that are left."""
        self.held = (self.held - 1) // PIECE_BYTES * PIECE_BYTES if self.held else 0
        self.hash = hashlib.sha256()
        return self.held


def unusable(path: Path, error: OSError) -> ZrtError:
    """Return the error for a `path`, or the path in `error`, that cannot be written or read:
    insufficient_memory, worker_failed or bad_config."""
    what = f"{error.filename2 or error.filename or path}: {error.strerror}"
    if error.errno in _FULL:
        return ZrtError(
            "insufficient_memory", f"no room for layers: {what}; make some, or set the worker's ZRT_HOME elsewhere"
        )
    if isinstance(error, FileNotFoundError):
        return ZrtError("worker_failed", f"{what}: {AGAIN}")
    return ZrtError(
        "bad_config", f"layers cannot be kept: {what}; put that right, or set the worker's ZRT_HOME elsewhere"
    )


def fault_of(path: Path, file: ManifestFile) -> str:
    """Return why a file is not as long as the manifest says, in words that follow its name; empty
    if it is."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return GONE
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if not stat.S_ISREG(found.st_mode):
        return "is not a regular file"
    if found.st_size < file.size:
        return f"is cut off ({found.st_size} of {file.size} bytes)"
    return f"is too long ({found.st_size} bytes, not {file.size})" if found.st_size > file.size else ""


def damage_of(path: Path, file: ManifestFile) -> str:
    """Return why a file's bytes are not those of the manifest, in words that follow its name; empty
    if they are. Reads all of it."""
    try:
        held = sound_bytes(path, file)
    except FileNotFoundError:
        return GONE
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return "" if held == file.size else "is damaged (it holds other bytes than were sent)"


def lost_files(folder: Path, faults: Mapping[str, str]) -> ZrtError:
    """Return the error for files that were held and are not any more; `faults` says of each name
    why."""
    names: dict[str, list[str]] = {}
    for name, why in faults.items():
        names.setdefault(why, []).append(name)
    said = "; ".join(f"{', '.join(those)} in {folder} {why}" for why, those in names.items())
    return ZrtError("worker_failed", f"{said}: {AGAIN}")


def known_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a folder of the cache, None without a sound one: another version of
    zrt may have written it."""
    try:
        data = (folder / MANIFEST).read_bytes()
        return parse_manifest(data) if digest(data) == folder.name else None
    except (OSError, ZrtError):
        return None


def sound_bytes(path: Path, file: ManifestFile) -> int:
    """Return how many bytes of a file, in whole pieces from its start on, match the manifest."""
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
