"""Notices for a person who waits for an answer: a line for what the answer waits for, and its
figures."""

import asyncio
import os
import sys
from contextlib import suppress
from typing import Final

from zrt.runtime.formatting import counted, escaped
from zrt.runtime.messages.client import Finished, Progress
from zrt.runtime.process.terminal import say

WAITS: Final = frozenset({"tokenising", "queued", "waiting", "preempted", "parked", "replaying"})
"""Phases in which an answer makes no progress."""
SHOWN: Final = {"tokenising": "being tokenised"}
"""Phases that people are shown by other words than their names."""
WAIT_S: Final = 2.0
"""Seconds that a wait lasts until a log has a line for it: an answer that comes without a delay has
none."""


class _WaitLines:
    """Waits of one kind where stderr is no terminal: a line for each wait that lasts, and one when
    it is over after that."""

    def __init__(self) -> None:
        self._what = ""
        self._text = ""
        self._said = ""
        self._timer: asyncio.TimerHandle | None = None

    def wait(self, what: str, text: str) -> None:
        """Say `text` once the wait has lasted WAIT_S; not again when what came between was not
        said."""
        self._text = text
        if what != self._what:
            self.stop()
            self._what = what
            if what != self._said:
                self._timer = asyncio.get_running_loop().call_later(WAIT_S, self._say)

    def over(self, text: str) -> None:
        self.stop()
        if self._said:
            self._said = ""
            say(f"zrt: {text}")

    def stop(self) -> None:
        self._what = ""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _say(self) -> None:
        self._said = self._what
        say(f"zrt: {self._text}")


class Notice:
    """Display of what a generation waits for, in a line on stderr that gives way to its text; where
    stderr is no terminal, in the lines of a log."""

    def __init__(self) -> None:
        self._on_terminal = sys.stderr.isatty()
        self._connection = _WaitLines()
        self._answer = _WaitLines()
        self._shown = ""
        self._in_text = False
        self._broken = False

    def broken(self, endpoint: str, patience: float) -> None:
        """Say on a line of its own that the connection is gone, and is being restored for up to
        `patience` seconds."""
        self._broken = True
        text = f"the connection to {endpoint} broke; reconnecting for {patience:g} s at most"
        if not self._on_terminal:
            self._answer.stop()
            self._connection.wait("broken", text)
            return
        line = f"[{text}]"
        with suppress(OSError):  # stderr is no terminal any more
            if columns := os.get_terminal_size(sys.stderr.fileno()).columns:
                line = line[: columns - 1]  # a line that wraps could not be taken back
        self._write(f"\n{line}" if self._in_text else f"\r\x1b[K{line}")

    def back(self) -> None:
        """Take back the message about the connection."""
        if self._broken:
            self._broken = False
            self._connection.over("the connection is back")
            self._write("\r\x1b[K")

    def progress(self, progress: Progress) -> None:
        """Show every change before the text; within the text, say once that it is held up."""
        self.back()
        line = progress.phase
        stands = escaped(f"{SHOWN.get(line, line)}{_counts(progress)}{_reason(progress)}")
        if not self._on_terminal:
            if line in WAITS:
                self._answer.wait(line, f"the {'prompt' if line == 'tokenising' else 'answer'} is {stands}")
            else:
                self._answer.over("the answer goes on")
        elif self._in_text:
            if line in ("waiting", "parked", "replaying") and line != self._shown:
                self._write(f"\n[{escaped(f'{line}{_reason(progress)}')}]\n")
            self._shown = line
        else:
            self._write(f"\r\x1b[K{stands}")

    def piece(self) -> None:
        """Note that a part of the answer came, whether it is shown or not."""
        self._answer.over("the answer goes on")

    def text(self) -> None:
        """Clear the line for the text, or for whatever else ends the waiting."""
        if not self._on_terminal:
            self._answer.stop()
            self._connection.stop()
            self._broken = False
            return
        self.back()
        self._shown = ""
        if not self._in_text:
            self._in_text = True
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        if self._on_terminal:
            with suppress(OSError):
                sys.stderr.write(text)
                sys.stderr.flush()


def _counts(progress: Progress) -> str:
    """Return the place in the queue, or how many tokens have run of those to run."""
    if not progress.total or progress.phase in ("waiting", "preempted", "parked"):
        return ""
    if progress.phase == "queued":
        return f", place {progress.done + 1} of {progress.total}"
    if progress.phase == "tokenising":
        return f" {progress.done / progress.total:.0%}" if progress.done else ""
    return f" {progress.done}/{progress.total}"


def _reason(progress: Progress) -> str:
    return f" ({progress.message})" if progress.message else ""


def figures(finished: Finished) -> str:
    """Return one generation's speed, and where its time went: each stage's share of compute, and
    the rest in queues and hops."""
    timings = finished.timings
    lines = [
        f"{counted(finished.prompt_tokens, 'prompt token')}, {finished.completion_tokens} generated ({finished.reason}), "
        f"first token after {timings.ttft_ms:.0f} ms, then {timings.decode_tok_s:.1f} tokens/s, seed {finished.seed}"
    ]
    compute = sum(stage.compute_ms for stage in finished.stages)
    for stage in finished.stages:
        own, lent = ((part / compute if compute else 0.0) for part in (stage.compute_ms - stage.lent_ms, stage.lent_ms))
        workers = f", its layer workers {lent:.0%}" if stage.lent_ms else ""
        tokens = max(1, finished.completion_tokens)
        lines.append(
            f"  {stage.name} (blocks {stage.blocks}): {own:.0%} of the compute{workers}, "
            f"a token {stage.compute_ms / tokens:.1f} ms computing, {stage.queue_ms / tokens:.1f} waiting, {stage.encode_ms / tokens:.1f} encoding"
        )
    lines.append(f"  between the stages: {timings.network_ms / max(1, finished.completion_tokens - 1):.1f} ms a token")
    return "\n".join(lines)
