"""stderr of a command that looks after processes: what its reader does not take now is dropped, and
no write waits.

A terminal is held with Ctrl-S, a pager pauses, a connection to a terminal hangs: a writer would
then be held up until somebody reads on.
"""

import io
import os
import select
import stat
import sys
from contextlib import suppress
from typing import Any, Final

from zrt.runtime.process.terminal import FULL

TERMINAL_BYTES: Final = 128
"""The bytes that a terminal takes at once when it is ready for some: its buffer grows by 256 bytes,
and an end of line may become two."""


class NonBlockingStderr(io.RawIOBase):
    """A stream to a terminal, pipe or socket. A write that does not fit is dropped as a whole; the
    rest of one that has begun is kept until it fits.

    The stream never raises: a reader that is gone counts as one that does not read any more.
    """

    def __init__(self, fd: int) -> None:
        """Open what `fd` is open for, through a file description of its own where possible: to make
        the caller's non-blocking would make it so for every process that shares it."""
        mode = os.fstat(fd).st_mode
        self._fd = -1
        if os.isatty(fd) or stat.S_ISFIFO(mode):
            with suppress(OSError):  # another user's: to poll before each write is nearly as good
                self._fd = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        if self._fd < 0:
            self._fd = os.dup(fd)
        self._at_once = TERMINAL_BYTES if os.isatty(fd) else select.PIPE_BUF
        self._ready = select.poll()
        self._ready.register(self._fd, select.POLLOUT)
        self._rest = b""
        self._gone = False

    def write(self, data: Any, /) -> int:
        """Write `data`, or drop it; return its whole length in either case."""
        whole = bytes(data)
        self._rest = self._written(self._rest)
        if not self._rest:
            rest = self._written(whole)
            self._rest = rest if len(rest) < len(whole) else b""
        return len(whole)

    def flush(self) -> None:
        if not self.closed:
            self._rest = self._written(self._rest)

    def _written(self, data: bytes) -> bytes:
        """Write what fits now, and return the rest."""
        while data and not self._gone and self._ready.poll(0):
            try:
                data = data[os.write(self._fd, data[: self._at_once]) :]
            except BlockingIOError:
                break
            except OSError as error:
                self._gone = error.errno not in FULL
                return b""
        return b"" if self._gone else data

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._fd)


def wait_for_no_reader() -> None:
    """Make writes to stderr never wait for its reader, from now on. A stderr that is a file takes
    everything, and stays as it is."""
    if isinstance(sys.stderr, io.TextIOWrapper) and not stat.S_ISREG(os.fstat(sys.stderr.fileno()).st_mode):
        sys.stderr = io.TextIOWrapper(
            NonBlockingStderr(sys.stderr.fileno()),  # type: ignore[type-var]
            encoding=sys.stderr.encoding,
            errors="replace",
            line_buffering=True,
        )
