"""What runs a block server's turns: its own executor alone, or its executor together with TP ranks
(group.py) or with layer workers (lending_backend.py)."""

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

from zrt.runtime.actor.executor import ComputeExecutor
from zrt.runtime.compute.engine import Engine, Holding
from zrt.runtime.compute.turn import Passing, TurnResult, Work
from zrt.runtime.errors import ZrtError

Progress = Callable[[int, int], None]
"""Told how many bytes of how many are loaded."""


class BackendListener(Protocol):
    """Whoever is told what becomes of a backend: the block server that it serves."""

    def backend_lost(self, error: ZrtError) -> None:
        """Hear that the ranks or workers broke by themselves; all their KV is gone."""

    def progress_changed(self) -> None:
        """Hear that loading has got on, or what it waits for has changed."""


class Backend(Protocol):
    """The blocks at work. `engine` is this process's own part of them. Errors are those of the
    engine, `rank_failed` and `worker_failed`."""

    @property
    def engine(self) -> Holding: ...

    async def open(self, key: Hashable, length: int, names: Sequence[int], prompt: int) -> int:
        """Open a session, as Engine.open."""

    async def close(self, key: Hashable, names: Sequence[int] | None) -> None:
        """Close a session, as Engine.close."""

    async def turn(self, works: Sequence[Work], threads: int) -> TurnResult:
        """Run a turn, as Engine.turn."""


class LocalBackend:
    """A backend whose blocks are all in this process."""

    def __init__(self, executor: ComputeExecutor, engine: Engine) -> None:
        self.engine = engine
        self._executor = executor

    async def open(self, key: Hashable, length: int, names: Sequence[int], prompt: int) -> int:
        return await self._executor.run(self.engine.open, key, length, names, prompt)

    async def close(self, key: Hashable, names: Sequence[int] | None) -> None:
        await self._executor.run(self.engine.close, key, names)

    async def turn(self, works: Sequence[Work], threads: int, passing: Passing | None = None) -> TurnResult:
        return await self._executor.run(self.engine.turn, works, threads, passing)
