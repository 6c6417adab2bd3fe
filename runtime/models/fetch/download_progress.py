"""Parts that every way to fetch a model shares: reports of progress, texts, and a watch over bytes
that arrive."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

Progress = Callable[[int, int, str], None]
"""Callback with (done, total, what); `what` stays the same while one thing goes on: bytes for a
download, else steps."""

Say = Callable[[str], None]
"""Callback with a text for whoever asked for the model."""

POLL_S: Final = 0.2
"""Seconds between two looks at the work of another process or library."""
STALL_S: Final = 300.0
"""Seconds that a download may pass without a new byte; the time-outs and retries of the downloading
library come first."""


def ignore(done: int, total: int, what: str) -> None:
    """Ignore a report of progress."""


def say_nothing(text: str) -> None:
    """Ignore a text."""


class Growth:
    """Bytes below a folder that another process or library writes, and whether more still
    arrive."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._size = 0
        self._grew = time.monotonic()

    def look(self) -> int:
        """Return the bytes that are there now."""
        size = 0
        for parent, _, names in os.walk(self._folder):
            for name in names:
                with suppress(FileNotFoundError):
                    size += os.lstat(os.path.join(parent, name)).st_size
        if size != self._size:
            self._size, self._grew = size, time.monotonic()
        return size

    @property
    def stalled(self) -> bool:
        return time.monotonic() - self._grew > STALL_S
