"""The notes that each `zrt up` leaves for the other commands of this machine: where its cluster is
reached, its process id and its name."""

import os
import socket
from contextlib import suppress
from pathlib import Path

import msgspec

from zrt.runtime.paths import home


class Note(msgspec.Struct):
    """The note of one cluster. `pid` is that of `zrt up`, on `host`: a home directory may be shared
    by many machines."""

    endpoint: str
    pid: int
    host: str
    name: str = ""


def folder() -> Path:
    """Return the folder of notes and logs."""
    return home() / "run"


def write(endpoint: str, name: str) -> None:
    """Write the note of our cluster. OSError: the folder cannot be written."""
    path = _path()
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_bytes(msgspec.json.encode(Note(endpoint, os.getpid(), socket.gethostname(), name)))
    new.replace(path)


def remove() -> None:
    """Remove the note of our cluster."""
    _path().unlink(missing_ok=True)


def notes() -> list[Note]:
    """Return the notes of the clusters that run on this machine, the one started last first; remove
    the notes of those that were killed."""
    found = []
    for path in folder().glob("*.json"):
        try:
            note = msgspec.json.decode(path.read_bytes(), type=Note)
            written = path.stat().st_mtime_ns
        except (OSError, msgspec.DecodeError):
            continue
        if note.host != socket.gethostname():
            continue
        if _runs(note.pid):
            found.append((written, note))
        else:
            with suppress(OSError):
                path.unlink()
    return [note for _, note in sorted(found, key=lambda entry: entry[0], reverse=True)]


def last_endpoint() -> str | None:
    """Return the endpoint of the last cluster started on this machine that still runs."""
    return next((note.endpoint for note in notes()), None)


def parent_of(endpoint: str) -> int | None:
    """Return the process id of the `zrt up` on this machine whose cluster is reached at `endpoint`;
    None if there is none."""
    return next((note.pid for note in notes() if note.endpoint == endpoint), None)


def _path() -> Path:
    return folder() / f"{socket.gethostname()}.{os.getpid()}.json"


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
