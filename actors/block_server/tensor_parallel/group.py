"""A tensor-parallel group as its leader has it: formed, loaded, at work as a block server's
backend, ended.

A group that has lost step is broken: a rank died, was silent, did not answer in time, or said
something else than the leader. All its ranks are killed and its communicator is aborted, which ends
the operation that others wait in, and a new group takes its place. If the leader's own executor
does not come back even so, the group is stuck: only the end of this process helps then.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Final

import torch

from zrt.actors.block_server.backend import load_assigned
from zrt.actors.block_server.tensor_parallel.group_stats import GroupStats
from zrt.actors.block_server.tensor_parallel.operations import ABORT_S, GroupListener, RankOperations
from zrt.actors.block_server.tensor_parallel.rank_processes import RankProcesses
from zrt.actors.tp_rank.rank import step_response
from zrt.runtime.actor.actor import Actor
from zrt.runtime.actor.executor import ComputeExecutor
from zrt.runtime.compute.collectives.communicator import Communicator, Rendezvous
from zrt.runtime.compute.engine import Engine
from zrt.runtime.compute.tensors import to_bytes
from zrt.runtime.compute.turn import TurnResult, Work
from zrt.runtime.compute.weight_sources import open_checkpoint
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.members import Assignment
from zrt.runtime.messages.ranks import (
    AssignStage,
    CloseSession,
    Init,
    InitOk,
    LoadDenseShard,
    LoadDenseShardOk,
    NcclSanityCheck,
    NcclSanityResult,
    OpenSession,
    RankStep,
    SessionClosed,
    SessionOpened,
    StageAssigned,
    StepBatch,
    StepBatchOk,
)
from zrt.runtime.models.architecture.config_json import config_text
from zrt.runtime.models.architecture.spec import read_spec
from zrt.runtime.models.checkpoint.layout import shard_shapes
from zrt.runtime.models.checkpoint.split import check_split

log = logging.getLogger(__name__)

INIT_S: Final = 40.0
LOAD_S: Final = 1800.0
STEP_S: Final = 120.0


class RankGroup:
    """A group of ranks at work. Made by `form` and `load`; after `broken` is set, or `end`, a new
    one is needed. `stats` outlives the group.

    The `listener` hears once when the group breaks by itself, and when it is stuck.
    """

    def __init__(
        self,
        actor: Actor,
        executor: ComputeExecutor,
        stats: GroupStats,
        *,
        device: str,
        threads: int,
        listener: GroupListener,
    ) -> None:
        self.stats = stats
        self.doing = "start"
        """What the ranks do, or did not come to do, while the group is formed."""
        self._name = actor.name
        self._device = torch.device("cuda", 0) if device == "cuda" else torch.device(device)
        self._executor = executor
        self._listener = listener
        self._threads = threads
        self.processes = RankProcesses(actor, stats, self._device, threads, failed=self._fail)
        self.operations = RankOperations(actor.name, executor, self.processes, stats, self)
        self._communicator: Communicator | None = None
        self._rendezvous: Rendezvous | None = None
        self._abort: threading.Thread | None = None
        self._engine: Engine | None = None
        self._ending = False
        self._numbers: dict[Hashable, int] = {}
        self._number = 0

    @property
    def broken(self) -> ZrtError | None:
        return self.operations.broken

    @property
    def world(self) -> int:
        return self.processes.world

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise ZrtError("model_not_loaded", "the group of ranks has loaded nothing", self._name)
        return self._engine

    # ---- life ------------------------------------------------------------------------------------

    async def form(self) -> None:
        """Start the ranks, see who they are, join them, and check that they can sum. ZrtError: why
        they cannot."""
        self.stats.begin()
        self._check_devices()
        await self.processes.start()
        self.doing = "join each other"
        self.stats.all_are("joining")
        rendezvous = self._rendezvous = await asyncio.to_thread(Rendezvous, self._device)

        def joined() -> Communicator:
            if self.broken is not None:
                raise self.broken.anew()
            self._communicator = rendezvous.join(self.world)
            return self._communicator

        communicator, _ = await self.operations.together(Init(rendezvous.comm_id), joined, InitOk, INIT_S)
        self.doing = "sum"
        total, results = await self.operations.together(
            NcclSanityCheck(), communicator.sum_of_ones, NcclSanityResult, INIT_S
        )
        sums = [total, *(result.observed_sum for result in results)]
        if any(one != self.world for one in sums):
            raise ZrtError(
                "nccl_init_failed", f"the sum of 1 over {self.world} ranks is {sums} on ranks 0 to {self.world - 1}"
            )
        self.stats.formed(rendezvous.comm_id)

    def _check_devices(self) -> None:
        first, there = self._device.index or 0, torch.cuda.device_count()
        if self._device.type == "cuda" and first + self.world > there:
            wanted = f"{self._device} to cuda:{first + self.world - 1}"
            raise ZrtError("unsupported", f"{self.world} ranks need the devices {wanted}; there are {there} here")

    async def load(
        self,
        folder: Path,
        assignment: Assignment,
        progress: Callable[[int, int], None],
        captured: Callable[[int, int], None],
        cancelled: Callable[[], bool],
    ) -> None:
        """Read every rank's part of the weights. ZrtError: as load_engine."""
        self.stats.all_are("loading")
        spec = read_spec(folder)
        check_split(spec, self.world)
        random = assignment.weights == "random"
        stage = AssignStage(
            assignment.first,
            assignment.last,
            assignment.dtype,
            assignment.kv_bytes // self.world,
            assignment.context,
            assignment.sessions,
            random,
            assignment.gpu_memory,
        )
        await self.operations.together(stage, _nothing, StageAssigned, INIT_S)
        files = [] if random else await asyncio.to_thread(_files, folder, assignment)
        text = config_text(folder)

        def own() -> Engine:
            return load_assigned(
                folder,
                assignment,
                device=str(self._device),
                group=self._communicator,
                progress=progress,
                captured=captured,
                cancelled=lambda: self.broken is not None or cancelled(),
            )

        request = LoadDenseShard(assignment.model, text, files)
        self._engine, _ = await self.operations.together(request, own, LoadDenseShardOk, LOAD_S, spread=LOAD_S)
        self.stats.all_are("ready")

    async def end(self) -> None:
        """Let go of everything: unload, shut the ranks down, reap them. Ranks that do not end in
        time are killed."""
        self._ending = True
        await self.processes.end(asked=self.broken is None)
        self._fail(ZrtError("cancelled", "the group of ranks was ended", self._name))  # whoever still waits for it
        await self.operations.over()
        await self._let_go()

    async def _let_go(self) -> None:
        """End the leader's own part: its graphs first, since no communicator ends before them."""
        if self._engine is not None:
            try:
                async with asyncio.timeout(ABORT_S):
                    await self._executor.run(self._engine.end)
            except TimeoutError:
                self.group_stuck()
        self._engine = None
        self._rendezvous = self._communicator = None
        if self._abort is not None:
            await asyncio.to_thread(self._abort.join, ABORT_S)
            if self._abort.is_alive():
                self.group_stuck()

    def _fail(self, error: ZrtError) -> None:
        self.operations.fail(error)

    def group_broken(self, error: ZrtError) -> None:
        """End whatever the ranks wait in, and tell the listener unless the group is being ended."""
        self.processes.kill()
        if self._rendezvous is not None:
            self._rendezvous.close()
        communicator = self._communicator
        if communicator is not None:  # it may wait for the operation it ends
            self._abort = threading.Thread(target=communicator.abort, name="abort", daemon=True)
            self._abort.start()
        self.stats.ended(None if self._ending else error)
        if not self._ending:
            log.warning("%s: the tensor-parallel group of %d ranks failed: %s", self._name, self.world, error)
            self._listener.group_broken(error)

    def group_stuck(self) -> None:
        """Tell the listener that the executor does not come back."""
        self._listener.group_stuck()

    # ---- the backend -----------------------------------------------------------------------------

    async def open(self, key: Hashable, length: int, names: Sequence[int], prompt: int) -> int:
        """Open a session on every rank, as Engine.open."""
        request = OpenSession(self._numbered(key), length, prompt, list(names))
        have, replies = await self.operations.together(
            request, lambda: self.engine.open(key, length, names, prompt), SessionOpened, STEP_S
        )
        self.operations.agree(SessionOpened(have), replies)
        return have

    async def close(self, key: Hashable, names: Sequence[int] | None) -> None:
        """Close a session on every rank, as Engine.close."""
        number = self._numbers.pop(key, None)
        if number is None or self.broken is not None or self._ending:
            return
        request = CloseSession(number, None if names is None else list(names))
        try:
            await self.operations.together(request, lambda: self.engine.close(key, names), SessionClosed, STEP_S)
        except ZrtError:
            if self.broken is None:  # else all is closed
                raise

    async def turn(self, works: Sequence[Work], threads: int) -> TurnResult:
        """Run a turn on every rank, as Engine.turn; each uses the threads it was started with."""
        steps = [
            RankStep(
                self._numbered(work.key), work.seq_pos, work.n, work.sampler is not None or work.logits, work.opens
            )
            for work in works
        ]
        rows = works[0].held if len(works) == 1 else torch.cat([work.held for work in works])
        if self.engine.shard.is_first:
            request = StepBatch(steps, rows.tolist(), best=all(work.takes_best for work in works))
        else:
            request = StepBatch(steps, shape=list(rows.shape), data=to_bytes(rows, self.engine.dtype))
        result, replies = await self.operations.together(
            request, lambda: self.engine.turn(works, self._threads), StepBatchOk, STEP_S
        )
        for reply in replies:
            reply.forward_us = 0
        self.operations.agree(step_response(result, 0), replies)
        return result

    def _numbered(self, key: Hashable) -> int:
        """Return the number by which the ranks know a session."""
        if key not in self._numbers:
            self._number += 1
            self._numbers[key] = self._number
        return self._numbers[key]


def _files(folder: Path, assignment: Assignment) -> list[str]:
    """Return the paths of the files that hold the stage's tensors."""
    source, spec = open_checkpoint(folder).matched(read_spec(folder))
    names = shard_shapes(spec, assignment.first, assignment.last)
    return sorted({str(source.entry(name).file) for name in names})


def _nothing() -> None:
    """Do the leader's part, which is none, of what only the ranks need to be told."""
