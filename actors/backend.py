"""Who runs a block server's turns: its own lane alone, or its lane together with TP ranks (rank_group.py)."""

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Final, Protocol

import torch

from zrt.runtime.compute.engine import Engine, Holding
from zrt.runtime.compute.turn import Passing, TurnResult, Work
from zrt.runtime.errors import ZrtError
from zrt.runtime.lane import Lane
from zrt.runtime.process import leave

log = logging.getLogger(__name__)

LOST_DEVICE_STATUS: Final = 76


class Backend(Protocol):
    """`engine` is this process's own part of the blocks. Errors are those of the engine, and `rank_failed`."""

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

    def __init__(self, lane: Lane, engine: Engine) -> None:
        self.engine = engine
        self._lane = lane

    async def open(self, key: Hashable, length: int, names: Sequence[int], prompt: int) -> int:
        return await self._lane.run(self.engine.open, key, length, names, prompt)

    async def close(self, key: Hashable, names: Sequence[int] | None) -> None:
        await self._lane.run(self.engine.close, key, names)

    async def turn(self, works: Sequence[Work], threads: int, passing: Passing | None = None) -> TurnResult:
        try:
            return await self._lane.run(self.engine.turn, works, threads, passing)
        except ZrtError:
            raise
        except Exception:
            await leave_if_lost(self._lane, self.engine.shard.device, self.engine.device_lives)
            raise


async def leave_if_lost(lane: Lane, device: torch.device, lives: Callable[[], bool]) -> None:
    """After something failed that nobody foresaw: end this process where its device does nothing any more. Others may wait for it."""
    if not await lane.run(lives):
        log.critical("the device %s does nothing any more: only a new process helps", device)
        leave(LOST_DEVICE_STATUS)
