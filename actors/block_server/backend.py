"""Who runs a block server's turns: its own executor alone, or its executor together with TP ranks
(group.py)."""

from collections.abc import Hashable, Sequence
from typing import Protocol

from zrt.runtime.actor.executor import ComputeExecutor
from zrt.runtime.compute.engine import Engine, Holding
from zrt.runtime.compute.turn import Passing, TurnResult, Work


class Backend(Protocol):
    """`engine` is this process's own part of the blocks. Errors are those of the engine, and
    `rank_failed`."""

    @property
    def engine(self) -> Holding: ...

    async def open(self, key: Hashable, length: int, names: Sequence[int], prompt: int) -> int:
        """As Engine.open."""

    async def close(self, key: Hashable, names: Sequence[int] | None) -> None:
        """As Engine.close."""

    async def turn(self, works: Sequence[Work], threads: int) -> TurnResult:
        """As Engine.turn."""


class LocalBackend:
    """The blocks are in this process."""

    def __init__(self, executor: ComputeExecutor, engine: Engine) -> None:
        self.engine = engine
        self._executor = executor

    async def open(self, key: Hashable, length: int, names: Sequence[int], prompt: int) -> int:
        return await self._executor.run(self.engine.open, key, length, names, prompt)

    async def close(self, key: Hashable, names: Sequence[int] | None) -> None:
        await self._executor.run(self.engine.close, key, names)

    async def turn(self, works: Sequence[Work], threads: int, passing: Passing | None = None) -> TurnResult:
        return await self._executor.run(self.engine.turn, works, threads, passing)
