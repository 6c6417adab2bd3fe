"""The blocks a block server is assigned, and what serves them: this process alone, a group of TP
ranks that it leads, or layer workers with it."""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from functools import partial
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
from zrt.runtime.messages.members import MOST_PARTS, Assignment, Identified, Identify, LoadProgress
from zrt.runtime.messages.stats import LendLoad
from zrt.runtime.models.checkpoint.identity import ModelContent, folder_state, read_content
from zrt.runtime.models.checkpoint.tensor_digests import FileState, TensorDigests
from zrt.runtime.models.fetch.resolve import place_of, resolve

log = logging.getLogger(__name__)

STUCK_STATUS: Final = 75
"""Exit status of a leader whose executor does not come back from a broken group."""
REBUILDS: Final = 5
"""How many attempts a group of ranks has before its stage fails."""
REBUILD_PAUSE_S: Final = 0.5
PROGRESS_S: Final = 0.1
"""The shortest time between two reports of load progress."""
IDENTIFY_S: Final = 1800.0
"""How long the coordinator may take to say which parts are the model's: it may hash them first."""
ASK_AGAIN_S: Final = 0.2
UNSURE_S: Final = 1.0
MOST_UNSURE_S: Final = 30.0
"""The shortest and the longest time until a coordinator that cannot tell yet is asked again."""
UNANSWERED: Final = frozenset({"coordinator_lost", "unknown_session", "deadline", "cancelled"})
"""Errors of a question that says nothing of the model: the coordinator is gone, stops, or has much
to hash. It is asked again."""

_Files = dict[str, FileState | None]


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
        self._hashes = 0
        self._digests = TensorDigests()
        self._content: ModelContent | None = None
        self._confirmed_by = 0  # the incarnation of the coordinator
        self._ref = ""
        self._loaded_of: _Files | None = None  # None: nothing that was there as a whole
        self._last_seen: _Files | None = None

    def assign(self, assignment: Assignment) -> None:
        """Take an assignment; what is still being loaded of an earlier one breaks off."""
        self.assignment = assignment
        self.group_stats = GroupStats(assignment.tp, os.getpid()) if assignment.tp > 1 else None

    def progress(self) -> LoadProgress | None:
        """Return how far the load is; None: nothing is assigned."""
        if self.assignment is None:
            return None
        return LoadProgress(self.assignment.serial, *self._loaded, self.lent(), *self._captured, self._hashes)

    def lent(self) -> LendLoad | None:
        """Return what the layer workers have, where there may be any."""
        given = self.assignment
        return self.lending.stats() if given is not None and (given.lend or given.helped) else None

    async def load(self, assignment: Assignment) -> Backend:
        """Return the backend of these blocks, once what served before has let go.

        ZrtError: as resolve, load_engine, RankGroup.form and load, Lending.load, read_content;
        bad_model: it is not the model that the cluster serves; cancelled: another assignment came,
        or the actor ends.
        """
        try:
            return await self._load(assignment)
        except ZrtError as error:
            # what went away while it was read may come back as it was
            if error.kind == "bad_model" and await self.saved_anew():
                self._loaded_of = None
            raise

    async def _load(self, assignment: Assignment) -> Backend:
        self._loop = asyncio.get_running_loop()
        reported = 0.0
        self._loaded = self._captured = 0, 0
        self._hashes = 0

        def progress(done: int, total: int) -> None:
            nonlocal reported
            now = time.monotonic()
            self._loaded = done, total
            if done == total or now - reported >= PROGRESS_S:
                reported = now
                self._loop.call_soon_threadsafe(self._listener.progress_changed)

        cancelled = partial(self._cancelled, assignment)
        await self._let_go()
        lends = bool(assignment.lend) or assignment.helped
        if not lends:
            self.lending.forget()
        load = self._load_lent if lends else self._load_here if assignment.tp == 1 else self._load_group
        content = await self._read_content(assignment)
        await self.confirm(assignment)
        for attempt in range(REBUILDS):
            if attempt:
                await asyncio.sleep(REBUILD_PAUSE_S * attempt)
                self._check_wanted(assignment)
            backend = await load(content.folder, assignment, progress, cancelled)
            try:
                await self._executor.run(content.check_unchanged)
                await self.confirm(assignment)  # another coordinator may have come
            except ZrtError:
                if not cancelled():
                    await self.end()
                raise
            if backend.broken is None:
                return backend
            # it broke while nobody served with it, so that nobody else builds it again
            if cancelled() or attempt == REBUILDS - 1:
                raise backend.broken.anew()
            log.warning("%s: loads again: %s", self._actor.name, backend.broken)
            await self._let_go()
            if self.group_stats is not None:
                self.group_stats.rebuilds += 1
        raise AssertionError("the last attempt returns or raises")

    async def _read_content(self, assignment: Assignment) -> ModelContent:
        """Find out what the model's folder holds of the assigned blocks, for `confirm`. ZrtError:
        as resolve and read_content."""
        self._ref, self._content, self._confirmed_by = assignment.model, None, 0
        self._loaded_of = await self._files()  # before anything may fail: whatever it is, it may be mended
        weights = assignment.weights == "files"
        folder = await self._executor.run(resolve, assignment.model, weights=weights, text=False)
        self._content = await self._executor.run(
            read_content,
            folder,
            (assignment.first, assignment.last),
            random=assignment.weights == "random",
            digests=self._digests,
            cancelled=partial(self._cancelled, assignment),
            hashes=self._on_hashing,
        )
        self._hashes = 0
        return self._content

    async def confirm(self, assignment: Assignment) -> None:
        """Have the present coordinator confirm that these blocks are of the model it serves, unless
        it has; wait for one where there is none.

        ZrtError bad_model: they are not, and have to be let go of; cancelled: as load.
        """
        member, pause = self._actor, UNSURE_S
        while (content := self._content) is not None and self._confirmed_by != member.coordinator.incarnation:
            self._check_wanted(assignment)
            asked = member.coordinator.incarnation
            try:
                found = await self._identified(content)
            except ZrtError as error:
                if error.kind not in UNANSWERED:
                    raise
                await asyncio.sleep(ASK_AGAIN_S)  # it joins the next one meanwhile
                continue
            if self._content is not content:
                continue  # loaded anew meanwhile: this answer is not about what there is now
            if found.unsure:
                text = "%s: the coordinator cannot tell which model it serves, and is asked again in %g s: %s"
                log.warning(text, member.name, pause, found.unsure)
                await asyncio.sleep(pause)
                pause = min(2 * pause, MOST_UNSURE_S)
                continue
            if found.differing:
                raise content.unlike(found.differing)
            self._confirmed_by = asked

    async def _identified(self, content: ModelContent) -> Identified:
        """Return the coordinator's answer on all parts."""
        found = Identified([])
        parts = list(content.parts.items())
        for begin in range(0, len(parts), MOST_PARTS):
            question = Identify(dict(parts[begin : begin + MOST_PARTS]))
            answer = (await self._actor.ask_coordinator(question, timeout=IDENTIFY_S)).body
            if not isinstance(answer, Identified):
                raise ZrtError("internal", f"the answer to Identify is a {type(answer).__name__}", self._actor.name)
            if answer.unsure:
                return answer
            found.differing += answer.differing
        return found

    async def saved_anew(self) -> bool:
        """Return whether the model's files are others than when they were last read."""
        return await self._files() != self._loaded_of

    async def files_changed(self) -> bool:
        """Return whether the model's files are others than when they were last read, and are as
        they were at the last call: nobody writes them any more."""
        now = await self._files()
        settled, self._last_seen = now == self._last_seen, now
        return settled and now != self._loaded_of

    async def _files(self) -> _Files:
        return await self._executor.run(_model_files, self._ref)

    def _check_wanted(self, assignment: Assignment) -> None:
        """Raise ZrtError cancelled if the assignment is not to be loaded any more."""
        if self._cancelled(assignment):
            raise ZrtError("cancelled", "another assignment came", self._actor.name)

    def _cancelled(self, assignment: Assignment) -> bool:
        return self.assignment is not assignment or self._actor.ended.is_set()

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

    async def _load_here(
        self, folder: Path, assignment: Assignment, progress: Progress, cancelled: Callable[[], bool]
    ) -> Backend:
        def load() -> Engine:
            return load_assigned(
                folder,
                assignment,
                device=self._device,
                progress=progress,
                captured=self._on_captured,
                cancelled=cancelled,
            )

        return LocalBackend(self._executor, await self._executor.run(load))

    async def _load_group(
        self, folder: Path, assignment: Assignment, progress: Progress, cancelled: Callable[[], bool]
    ) -> Backend:
        """Load as leader of `tp` ranks. A group that breaks meanwhile is built again, a few
        times."""
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

    async def _load_lent(
        self, folder: Path, assignment: Assignment, progress: Progress, cancelled: Callable[[], bool]
    ) -> Backend:
        return await self.lending.load(folder, assignment, progress, cancelled)

    def _on_hashing(self, nbytes: int) -> None:
        """Take how many bytes are being hashed, from the executor."""
        self._hashes = nbytes
        self._loop.call_soon_threadsafe(self._listener.progress_changed)

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


def _model_files(ref: str) -> _Files:
    """Return the states of the files of the model that `ref` names; of none where it has no
    place."""
    try:
        folder = place_of(ref)
    except ZrtError:
        return {}
    return {} if folder is None else folder_state(folder)
