"""A group of TP ranks that is formed, checked and ended again: what `zrt check MODEL --tp N`
runs."""

import asyncio
import os

from zrt.actors.block_server.tensor_parallel.group import RankGroup
from zrt.actors.block_server.tensor_parallel.group_stats import GroupStats
from zrt.runtime.actor.actor import Actor
from zrt.runtime.actor.executor import ComputeExecutor
from zrt.runtime.errors import ZrtError


def try_group(world: int, device: str) -> ZrtError | None:
    """Start `world` - 1 ranks beside this process, join them, and let them sum; return what went
    wrong, or None. Leaves nothing behind."""
    return asyncio.run(_try(world, device))


async def _try(world: int, device: str) -> ZrtError | None:
    actor, executor = Actor("check"), ComputeExecutor("check")
    await actor.start()
    stats = GroupStats(world, os.getpid())
    group = RankGroup(actor, executor, stats, device=device, threads=1, listener=_Listener(executor))
    try:
        await group.form()
    except ZrtError as error:
        return ZrtError(error.kind, f"{world} ranks did not {group.doing}: {error.message}", error.where)
    finally:
        await group.end()
        executor.close()
        await actor.stop()
    return None


class _Listener:
    """A listener that `form` tells by what it raises."""

    def __init__(self, executor: ComputeExecutor) -> None:
        self._executor = executor

    def group_broken(self, error: ZrtError) -> None:
        pass

    def group_stuck(self) -> None:
        self._executor.close()
