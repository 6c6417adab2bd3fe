"""The blocks a block server is assigned, and what serves them: this process alone, a group of TP
ranks that it leads, or layer workers with it."""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from zrt.actors.block_server.backend import Backend, BackendListener, LocalBackend, Progress, load_assigned
from zrt.actors.block_server.layer_lending.lending import Lending
from zrt.actors.block_server.tensor_parallel.group import RankGroup
from zrt.actors.block_server.tensor_parallel.group_stats import GroupStats
from zrt.runtime.actor.executor import ComputeExecutor
from zrt.runtime.actor.member import Member
from zrt.runtime.compute.engine import Engine
from zrt.runtime.errors import ZrtError
from zrt.runtime.hard_exit import leave
from zrt.runtime.messages.members import Assignment, LoadProgress
from zrt.runtime.messages.stats import LendLoad
from zrt.runtime.models.fetch.resolve import resolve

log = logging.getLogger(__name__)

STUCK_STATUS: Final = 75
"""Exit status of a leader whose executor does not come back from a broken group."""
REBUILDS: Final = 5
"""How many attempts a group of ranks has before its stage fails."""
REBUILD_PAUSE_S: Final = 0.5
PROGRESS_S: Final = 0.1
"""The shortest time between two reports of load progress."""


class AssignedBlocks:
    """The last `assignment` and what `load` made of it, which serves until the next load, or `end`:
    an engine of this process, the `group`, or what `lending` has given out.

    The `listener` hears when the group or what is lent breaks by itself, and when what `progress`
    says has changed. The GEMMs of this process and its ranks use `threads` together.
    """

    def __init__(
        self,
        actor: Member,
        executor: ComputeExecutor,
        *,
        device: str,
        threads: int,
        listener: BackendListener,
    ) -> None:
        self.assignment: Assignment | None = None
        self.group: RankGroup | None = None
        self.group_stats: GroupStats | None = None
        self.lending = Lending(actor, executor, device, listener)
        self._actor = actor
        self._executor = executor
        self._device = device
        self._threads = threads
        self._listener = listener
        self._loaded = self._captured = 0, 0

    def assign(self, assignment: Assignment) -> None:
        """Take an assignment; what is still being loaded of an earlier one breaks off."""
        self.assignment = assignment
        self.group_stats = GroupStats(assignment.tp, os.getpid()) if assignment.tp > 1 else None

    def progress(self) -> LoadProgress | None:
        """Return how far the load is; None: nothing is assigned."""
        if self.assignment is None:
            return None
        return LoadProgress(self.assignment.serial, *self._loaded, self.lent(), *self._captured)

    def lent(self) -> LendLoad | None:
        """Return what the layer workers have, where there may be any."""
        given = self.assignment
        return self.lending.stats() if given is not None and (given.lend or given.helped) else None

    async def load(self, assignment: Assignment) -> Backend:
        """Return the backend of these blocks, once what served before has let go.

        ZrtError: as load_engine, RankGroup.form and load, Lending.load; cancelled: another
        assignment came, or the actor ends.
        """
        self._loop = asyncio.get_running_loop()
        reported = 0.0
        self._loaded = self._captured = 0, 0

        def progress(done: int, total: int) -> None:
            nonlocal reported
            now = time.monotonic()
            self._loaded = done, total
            if done == total or now - reported >= PROGRESS_S:
                reported = now
                self._loop.call_soon_threadsafe(self._listener.progress_changed)

        def cancelled() -> bool:
            return self.assignment is not assignment or self._actor.ended.is_set()

        await self._let_go()
        lends = bool(assignment.lend) or assignment.helped
        if not lends:
            self.lending.forget()
        load = self._load_lent if lends else self._load_here if assignment.tp == 1 else self._load_group
        return await load(assignment, progress, cancelled)

    async def end(self) -> None:
        """End the ranks and what is lent. What is assigned meanwhile keeps what it has found out
        of its workers."""
        given = self.assignment
        await self._let_go()
        if self.assignment is given:
            self.lending.forget()

    async def _let_go(self) -> None:
        await self.lending.end()
        group, self.group = self.group, None
        if group is not None:
            await group.end()

    async def _load_here(self, assignment: Assignment, progress: Progress, cancelled: Callable[[], bool]) -> Backend:
        def load() -> Engine:
            folder = _folder(assignment)
            return load_assigned(
                folder,
                assignment,
                device=self._device,
                progress=progress,
                captured=self._on_captured,
                cancelled=cancelled,
            )

        return LocalBackend(self._executor, await self._executor.run(load))

    async def _load_group(self, assignment: Assignment, progress: Progress, cancelled: Callable[[], bool]) -> Backend:
        """Load as leader of `tp` ranks. A group that breaks meanwhile is built again, a few
        times."""
        folder = await self._executor.run(_folder, assignment)
        stats = self.group_stats
        if stats is None:
            raise ZrtError("internal", "no ranks are assigned", self._actor.name)
        for attempt in range(REBUILDS):
            if attempt:
                await asyncio.sleep(REBUILD_PAUSE_S * attempt)
            group = self.group = RankGroup(
                self._actor,
                self._executor,
                stats,
                device=self._device,
                threads=max(1, self._threads // assignment.tp),
                listener=self,
            )
            try:
                await group.form()
                await group.load(folder, assignment, progress, self._on_captured, cancelled)
                return group
            except ZrtError as error:
                if group.broken is None or cancelled() or attempt == REBUILDS - 1:
                    raise
                log.warning("%s: starts the tensor-parallel group again: %s", self._actor.name, str(error))
                await self._let_go()
                stats.rebuilds += 1
        raise AssertionError("the last attempt returns or raises")

    async def _load_lent(self, assignment: Assignment, progress: Progress, cancelled: Callable[[], bool]) -> Backend:
        folder = await self._executor.run(_folder, assignment)
        return await self.lending.load(folder, assignment, progress, cancelled)

    def _on_captured(self, done: int, total: int) -> None:
        """Take how many graphs of how many are captured, from the executor."""
        self._captured = done, total
        self._loop.call_soon_threadsafe(self._listener.progress_changed)

    def group_broken(self, error: ZrtError) -> None:
        """Tell the listener that the group of ranks broke by itself."""
        self._listener.backend_lost(error)

    def group_stuck(self) -> None:
        """End this process, since the executor waits in an operation that nothing else ends. The
        ranks end with it."""
        leave(STUCK_STATUS)


def _folder(assignment: Assignment) -> Path:
    """Return the folder of the assignment's model. Blocks; ZrtError bad_model."""
    return resolve(assignment.model, weights=assignment.weights == "files", text=False)
