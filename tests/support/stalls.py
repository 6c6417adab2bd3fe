"""Meters of how long an event loop is held up: a timer that notes its own lateness, and the same
timer on an empty loop in a process beside it."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

PERIOD_S = 0.005


class StallMeter:
    """A meter of a running loop: after `with StallMeter() as meter:`, `meter.worst_ms` is the
    longest time the loop was late."""

    def __init__(self) -> None:
        self.worst_ms = 0.0

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._set()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        self._note()

    def _set(self) -> None:
        self._due = time.perf_counter() + PERIOD_S
        self._timer = self._loop.call_later(PERIOD_S, self._fire)

    def _note(self) -> None:
        self.worst_ms = max(self.worst_ms, (time.perf_counter() - self._due) * 1000)

    def _fire(self) -> None:
        self._note()
        self._set()


class EmptyLoop:
    """A process whose loop does nothing but measure itself, so that what the machine does to every
    process can be told apart.

    `async with EmptyLoop() as empty:` runs it for the length of the block; then `empty.worst_ms` is
    its longest lateness.
    """

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, str(Path(__file__)), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        await asyncio.wait_for(self._process.stdout.readline(), 20)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        out, _ = await asyncio.wait_for(self._process.communicate(), 20)
        self.worst_ms = float(out)


async def _measure_until_stdin_ends() -> float:
    with StallMeter() as meter:
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(0, ended.set)
        print("measuring", flush=True)
        await ended.wait()
    return meter.worst_ms


if __name__ == "__main__":
    print(asyncio.run(_measure_until_stdin_ends()))
