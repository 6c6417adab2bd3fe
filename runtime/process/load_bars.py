"""Progress bars on stderr: what models, stages and their layer workers load."""

from contextlib import suppress
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from zrt.runtime.formatting import byte_size, counted, escaped
from zrt.runtime.messages.client import Cluster
from zrt.runtime.process.terminal import say

HASHES_SHOWN: Final = 1 << 30
"""Bytes whose hashing takes long enough to be spoken of."""


class _Screen(Console):
    """A console on stderr that leaves the cursor alone: a process that hid it might be killed, or
    not be read any more, before it could show it again."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


class Bars:
    """Progress bars on stderr, one per name; where stderr is no terminal, a line when each begins
    and when it ends."""

    def __init__(self) -> None:
        self._console = _Screen(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TextColumn("{task.fields[pace]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._totals: dict[str, int] = {}
        self._ended: set[str] = set()
        self._states: dict[str, str] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def update(self, done: int, total: int, what: str, sent: int = 0, pace: int = 0) -> None:
        """Show `done` of `total` bytes (or steps) of `what`; a total of 0 is not known yet. `sent`
        of the bytes done came over the network, at `pace` bytes a second; 0: not known."""
        if what not in self._ended:
            self._progress.start()  # `finish` has ended it if others were ready before
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(escape(escaped(what)), total=total or None, pace="")
            if not self._console.is_terminal:
                say(f"{what} …")
        self._totals[what] = total
        rate = f"{pace / 1e6:.0f} MB/s" if pace else ""
        self._progress.update(self._tasks[what], completed=done, total=total or None, pace=rate)
        if total and done >= total and what not in self._ended:
            self._ended.add(what)
            if not self._console.is_terminal:
                say(f"{what}: done" + (f", {sent / 1e6:.1f} MB sent at {rate}" if rate else ""))

    def finish(self, cluster: Cluster) -> None:
        """Show for the last time what the cluster's processes load and have loaded, and draw
        nothing more until `loading` shows that others still load."""
        self.loading(cluster)
        on = [actor.name for actor in cluster.actors if actor.state == "loading"]
        for what, task in self._tasks.items():
            loads_on = any(what.startswith(f"{name} (") or what.endswith(f" of {name})") for name in on)
            if loads_on and what not in self._ended:
                self._progress.update(task, visible=False)
            elif self._totals[what]:
                self.update(self._totals[what], self._totals[what], what)
        self._progress.stop()
        for what, task in self._tasks.items():
            self._progress.update(task, visible=what not in self._ended)

    def loading(self, cluster: Cluster) -> None:
        """Show how stages and their layer workers load, and whom stages wait for."""
        for actor in cluster.actors:
            if actor.stage < 0:
                continue
            if actor.lend is not None:
                self.state(actor.name, f"{actor.name} waits for {actor.lend.waits_for}" if actor.lend.waits_for else "")
                for worker in actor.lend.workers:
                    if worker.total_bytes and worker.state != "asked":
                        what = f"{worker.name} (blocks {worker.layers} of {actor.name})"
                        self.update(worker.held_bytes, worker.total_bytes, what, worker.push_bytes, worker.push_bytes_s)
            if actor.state == "loading" and actor.hashes >= HASHES_SHOWN:
                hashes = f"{actor.name} hashes {byte_size(actor.hashes)} of weights, once on this machine"
                self.state(f"{actor.name} hashes", hashes)
            if actor.total_bytes:
                what = f"{actor.name} (blocks {actor.lend.own if actor.lend is not None else actor.blocks})"
                self.update(actor.done_bytes, actor.total_bytes, what)
                captures = actor.state == "loading" and actor.all_graphs > 0
                self.state(what, f"{what} captures {counted(actor.all_graphs, 'CUDA graph')}" if captures else "")

    def state(self, whose: str, text: str) -> None:
        """Write the line `text` about the process or bar `whose`, unless it is empty or the same as
        the last one."""
        if text != self._states.get(whose, ""):
            self._states[whose] = text
            if text:
                self.say(text)

    def warn(self, text: str) -> None:
        """Write a line about a model that a command goes on with."""
        self.say(f"zrt: {escaped(text)}")

    def say(self, text: str) -> None:
        """Write a line above the bars."""
        if self._console.is_terminal:
            with suppress(OSError):  # the terminal is gone; its SIGHUP is on the way
                self._console.print(escaped(text, breaks=True), highlight=False, markup=False, soft_wrap=True)
        else:
            say(text)
