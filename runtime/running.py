"""The note that `zrt up` leaves for the other commands of this machine: where the last cluster started here is reached."""

import os
from pathlib import Path

import msgspec

from zrt.runtime.models import home


class Note(msgspec.Struct):
    """`pid` is that of `zrt up`."""

    endpoint: str
    pid: int


def _path() -> Path:
    return home() / "run" / "last.json"


def write(endpoint: str) -> None:
    path = _path()
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(f".{os.getpid()}")
    new.write_bytes(msgspec.json.encode(Note(endpoint, os.getpid())))
    new.replace(path)


def remove() -> None:
    """Take our own note away; another cluster's stays."""
    note = _read()
    if note is not None and note.pid == os.getpid():
        _path().unlink(missing_ok=True)


def last_endpoint() -> str | None:
    note = _read()
    return note.endpoint if note else None


def _read() -> Note | None:
    try:
        return msgspec.json.decode(_path().read_bytes(), type=Note)
    except (OSError, msgspec.DecodeError):
        return None
