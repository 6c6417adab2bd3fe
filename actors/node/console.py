"""What `zrt up` says on stderr: its own lines, and those of its processes."""

import sys
from typing import Literal

from zrt.runtime.formatting import counted
from zrt.runtime.process.load_bars import Bars
from zrt.runtime.process.logs import STAMP
from zrt.runtime.process.terminal import listens, say


class Console:
    """The lines of `zrt up` on stderr, above the progress bars while `bars` shows some. Whoever
    looks after processes must not wait for a reader: lines that nobody reads are dropped and
    counted.

    `form` is the format of the processes' logs.
    """

    def __init__(self, form: Literal["text", "json"]) -> None:
        self.bars: Bars | None = None
        self._form = form
        self._dropped = 0

    def say(self, text: str) -> None:
        """Write lines, or drop them where nobody reads."""
        if not listens(sys.stderr):
            self._dropped += 1
            return
        if self._dropped:
            lost = f"zrt: {counted(self._dropped, 'log line')} dropped: the terminal was not reading"
            text, self._dropped = f"{lost}\n{text}", 0
        (self.bars.say if self.bars is not None else say)(text)

    def flush(self) -> None:
        """Write the rest of a line that a reader had begun to take when it paused."""
        sys.stderr.flush()

    def on_line(self, name: str, line: str) -> None:
        """Pass on a line of the process called `name`, which says its name itself if it logs."""
        logged = line.startswith("{") if self._form == "json" else STAMP.match(line)
        self.say(line if logged else f"{name}: {line}")
