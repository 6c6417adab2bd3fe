"""A `zrt` command at a keyboard and a screen: on a pseudo-terminal of its own."""

import os
import pty
import select
import sys
import time
from pathlib import Path

from support.running import environment

CTRL_C = "\x03"
CTRL_D = "\x04"
PATIENCE_S = 60.0


class Terminal:
    """A command on a pseudo-terminal. `screen` is all that was shown so far, control characters
    included. Use it as a context manager: a command that still runs is killed."""

    def __init__(self, *words: str, home: Path) -> None:
        self.screen = ""
        self._read = 0
        program = [sys.executable, "-m", "zrt.runtime.cli.main", *words]
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.execve(program[0], program, environment(home) | {"TERM": "xterm"})
        self._pidfd = os.pidfd_open(self.pid)

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pidfd >= 0:
            os.kill(self.pid, 9)
            self.wait()
        self.hang_up()

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def until(self, text: str) -> str:
        """Wait until `text` is shown after what was waited for last; return what was shown up to
        the end of `text`."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.screen[self._read :]:
            if not select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise AssertionError(f"{text!r} did not come: {self.screen!r}")
            try:
                self.screen += os.read(self._fd, 65536).decode(errors="replace")
            except OSError:  # EIO: nobody holds the other end any more
                raise AssertionError(f"it ended before {text!r} came: {self.screen!r}") from None
        start, self._read = self._read, self.screen.index(text, self._read) + len(text)
        return self.screen[start : self._read]

    def wait(self, typing: str = "") -> int:
        """Return the command's exit status (negative: the signal) once it has ended. What it shows
        meanwhile is read, so that it can end.

        `typing` is typed now, and every second until a line ends in answer to it. (Python does not
        see a Ctrl-C in the moment between input()'s prompt and its read until the next key; once
        seen, another one would interrupt the leaving.)
        """
        deadline = time.monotonic() + PATIENCE_S
        fds = [fd for fd in (self._pidfd, self._fd) if fd >= 0]
        if typing:
            self.type(typing)
        while self._pidfd not in (ready := select.select(fds, [], [], 1.0)[0]):
            if not ready:
                assert time.monotonic() < deadline, f"it did not end: {self.screen!r}"
                if typing and "\n" not in self.screen[self._read :]:
                    self.type(typing)
                continue
            try:
                self.screen += os.read(self._fd, 65536).decode(errors="replace")
            except OSError:
                fds.remove(self._fd)
        os.close(self._pidfd)
        self._pidfd = -1
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def hang_up(self) -> None:
        """Close the terminal's window."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
