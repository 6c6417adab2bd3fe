"""Files that several processes share: written whole or not at all, and locked by one at a time."""

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def write_whole(path: Path, data: bytes | memoryview, *, flushed: bool = False) -> None:
    """Replace a file atomically: whoever reads it meanwhile, or after a crash of this process,
    finds the old bytes or the new ones; after one of the machine too if `flushed`. OSError."""
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".new", delete=False) as file:  # others may write the same
        try:
            file.write(data)
            file.flush()
            if flushed:
                os.fsync(file.fileno())
            os.replace(file.name, path)
        except OSError:
            with suppress(OSError):
                os.unlink(file.name)
            raise


@contextmanager
def locked(
    path: Path, patience_s: float, poll_s: float = 0.01, given_up: Callable[[], bool] = lambda: False
) -> Iterator[bool]:
    """Hold an exclusive flock on `path`, which the kernel drops when its owner dies; yield False
    where another holds it for `patience_s`, or the wait is `given_up`: asked every `poll_s`, while
    another holds it. OSError."""
    give_up = time.monotonic() + patience_s
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < give_up and not given_up():
                    time.sleep(poll_s)
                    continue
                yield False
            else:
                yield True
            return
