"""A tensor-parallel group as its leader sees it: the processes it started, and the operations all ranks do together.

An operation is sent to every rank, the leader does its own part in the lane, and every rank's reply is read, whatever happened: also when a
send failed, a rank answered an error, or whoever asked has gone. One operation at a time, so that all ranks do the same in the same order.

A group that has lost step is broken: a rank died, was silent, did not answer in time, or said something else than the leader. All its ranks are
killed, which ends the operation that others wait in (gloo: their sockets close; NCCL: the communicator is aborted), and a new group takes its
place. If the leader's own lane does not come back even so, `stuck` is called: only the end of this process helps then.
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from zrt.runtime.actor import Actor
from zrt.runtime.compute.communicator import Communicator, Rendezvous
from zrt.runtime.compute.engine import Engine, TurnResult, Work
from zrt.runtime.compute.layout import shard_shapes
from zrt.runtime.compute.rank import step_response
from zrt.runtime.compute.spec import read_spec
from zrt.runtime.compute.split import check_split
from zrt.runtime.compute.threads import thread_environment
from zrt.runtime.compute.weights import open_checkpoint
from zrt.runtime.errors import ZrtError
from zrt.runtime.lane import Lane
from zrt.runtime.messages.control import Address, Assignment, GroupLoad, RankLoad
from zrt.runtime.messages.ranks import (
    AssignStage,
    Bye,
    CloseSession,
    Error,
    Init,
    InitOk,
    LoadDenseShard,
    LoadDenseShardOk,
    NcclSanityCheck,
    NcclSanityResult,
    OpenSession,
    Ping,
    Pong,
    QueryVram,
    RankMessage,
    RankStep,
    SessionClosed,
    SessionOpened,
    Shutdown,
    StageAssigned,
    StepBatch,
    StepBatchOk,
    Unloaded,
    UnloadModel,
    VramInfo,
    WorkerRequest,
)
from zrt.runtime.spawn import command
from zrt.runtime.supervise import Child, Death, Supervisor
from zrt.runtime.tensors import to_bytes

log = logging.getLogger(__name__)

READY_S: Final = 30.0
"""How long a rank may take until its sockets are bound: to start and import, not to load."""
PING_S: Final = 0.5
SILENCE_S: Final = 3.0
"""How long a rank may leave a ping unanswered before it is taken for hung, beyond what our own loop is late."""
INIT_S: Final = 40.0
LOAD_S: Final = 1800.0
STEP_S: Final = 120.0
END_S: Final = 2.0
"""How long a rank may take to end in good order."""
GRACE_S: Final = 1.0
"""How long the others may take to fail as well, once one rank has answered an error."""
ABORT_S: Final = 6.0
"""How long the leader's own part may take to end once the group is broken."""

_T = TypeVar("_T")
_Response = TypeVar("_Response", bound=RankMessage)


class RankProcess:
    """Rank `rank`, a process of ours."""

    def __init__(self, rank: int, child: Child) -> None:
        self.rank = rank
        self.child = child
        self.address = Address(child.name, 0, "")
        self.load = RankLoad(rank)


class RankGroup:
    """Made by `form`; after `broken` is set, or `end`, a new one is needed.

    `lost(error)` is called once, when the group breaks of itself; `stuck()` as the module says.
    """

    def __init__(
        self,
        actor: Actor,
        lane: Lane,
        *,
        world: int,
        device: str,
        threads: int,
        lost: Callable[[ZrtError], None],
        stuck: Callable[[], None],
    ) -> None:
        self.broken: ZrtError | None = None
        self.world = world
        self._actor = actor
        self._lane = lane
        self._device = torch.device("cuda", 0) if device == "cuda" else torch.device(device)
        self._threads = threads
        self._lost = lost
        self._stuck = stuck
        self._supervisor = Supervisor(self._on_death)
        self._members: list[RankProcess] = []
        self._communicator: Communicator | None = None
        self._rendezvous: Rendezvous | None = None
        self._abort: threading.Thread | None = None
        self._engine: Engine | None = None
        self._formed = 0.0
        self._ending = False
        self._turns = asyncio.Lock()
        self._break = asyncio.Event()
        self._pings: list[asyncio.Task[None]] = []
        self._numbers: dict[Hashable, int] = {}
        self._number = 0
        self._steps = self._fan_out_us = 0
        self._own = RankLoad(0, os.getpid())

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise ZrtError("model_not_loaded", "the group of ranks has loaded nothing", self._actor.name)
        return self._engine

    # ---- life -------------------------------------------------------------------------------------------------------

    async def form(self) -> None:
        """Start the ranks, see who they are, join them, and check that they can sum. ZrtError: what keeps them from it."""
        for rank in range(1, self.world):
            self._members.append(RankProcess(rank, self._spawn(rank)))
        for member in self._members:
            ready = await member.child.ready()
            member.address = Address(member.child.name, ready.incarnation, ready.endpoint)
            member.load.pid = member.child.pid
        await self._identify()
        self._pings = [self._actor.spawn(self._watch(member), f"watch {member.child.name}") for member in self._members]
        rendezvous = self._rendezvous = await asyncio.to_thread(Rendezvous, self._device)

        def joined() -> Communicator:
            self._communicator = rendezvous.join(self.world)
            return self._communicator

        communicator, _ = await self._together(Init(rendezvous.comm_id), joined, InitOk, INIT_S)
        total, results = await self._together(NcclSanityCheck(), communicator.sum_of_ones, NcclSanityResult, INIT_S)
        sums = [total, *(result.observed_sum for result in results)]
        if any(one != self.world for one in sums):
            raise ZrtError(
                "nccl_init_failed", f"the sum of 1 over {self.world} ranks is {sums} on ranks 0 to {self.world - 1}"
            )
        self._formed = time.monotonic()

    async def load(
        self,
        folder: Path,
        assignment: Assignment,
        progress: Callable[[int, int], None],
        cancelled: Callable[[], bool],
    ) -> None:
        """Read every rank's part. ZrtError as Engine.load."""
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
        )
        await self._together(stage, _nothing, StageAssigned, INIT_S)
        files = [] if random else await asyncio.to_thread(_files, folder, assignment)
        text = (folder / "config.json").read_text()

        def own() -> Engine:
            return Engine.load(
                folder,
                assignment,
                device=str(self._device),
                group=self._communicator,
                progress=progress,
                cancelled=cancelled,
            )

        request = LoadDenseShard(assignment.model, text, files)
        self._engine, _ = await self._together(request, own, LoadDenseShardOk, LOAD_S)

    async def end(self) -> None:
        """Let go of everything: unload, shut the ranks down, reap them. What does not end in time is killed."""
        self._ending = True
        for ping in self._pings:
            ping.cancel()
        if self.broken is None:
            for request, reply in ((UnloadModel(""), Unloaded), (Shutdown(), Bye)):
                asked = (
                    self._ask(member, request, reply, END_S) for member in self._members if member.address.endpoint
                )
                for answer in await asyncio.gather(*asked, return_exceptions=True):
                    if isinstance(answer, BaseException):
                        log.info("a rank was not told %s: %s", type(request).__name__, answer)
        await self._supervisor.stop(END_S)
        self._fail(
            ZrtError("cancelled", "the group of ranks was ended", self._actor.name)
        )  # whoever still waits for it
        for member in self._members:
            self._actor.forget(member.address)
        await self._let_go()

    async def _let_go(self) -> None:
        """The leader's own part ends: its graphs first, since no communicator ends before them."""
        if self._engine is not None:
            try:
                async with asyncio.timeout(ABORT_S):
                    await self._lane.run(self._engine.end)
            except TimeoutError:
                self._stuck()
        self._engine = None
        self._rendezvous = self._communicator = None
        if self._abort is not None:
            await asyncio.to_thread(self._abort.join, ABORT_S)
            if self._abort.is_alive():
                self._stuck()

    def kill(self) -> None:
        """SIGKILL all ranks; nobody is told."""
        self._ending = True
        self._supervisor.kill()

    def _spawn(self, rank: int) -> Child:
        device = str(self._device) if self._device.index is None else f"cuda:{self._device.index + rank}"
        words = ["--name", f"{self._actor.name}.rank{rank}", "--rank", str(rank), "--world", str(self.world)]
        words += ["--device", device, "--threads", str(self._threads)]
        argv = command("actor", "tp-rank", *words)
        return self._supervisor.spawn(words[1], argv, env=thread_environment(self._threads), ready_s=READY_S)

    async def _identify(self) -> None:
        for member in self._members:
            pong = await self._ask(member, Ping(), Pong, INIT_S)
            if (pong.rank, pong.world_size) != (member.rank, self.world):
                said = f"rank {pong.rank} of {pong.world_size}"
                raise ZrtError(
                    "rank_failed", f"{member.child.name} says it is {said}, not {member.rank} of {self.world}"
                )

    # ---- what goes wrong --------------------------------------------------------------------------------------------

    def _on_death(self, death: Death) -> None:
        if not self._ending:
            self._fail(ZrtError("rank_failed", str(death), self._actor.name))

    async def _watch(self, member: RankProcess) -> None:
        """Ping a rank for as long as it lives; one that is silent is hung. Its memory is asked for now and then."""
        count = 0
        while True:
            patience = SILENCE_S + self._actor.lag_ms / 1000
            try:
                await self._ask(member, Ping(), Pong, patience)
                if count % 10 == 0:
                    memory = await self._ask(member, QueryVram(), VramInfo, patience)
                    member.load.free_mb, member.load.total_mb = memory.free_mb, memory.total_mb
            except ZrtError as error:
                self._fail(ZrtError("rank_failed", f"{member.child.name} is silent: {error}", self._actor.name))
                return
            count += 1
            await asyncio.sleep(PING_S)

    def _fail(self, error: ZrtError) -> None:
        """The group is broken: end whatever its ranks are in."""
        if self.broken is not None:
            return
        self.broken = error
        self._break.set()
        self._supervisor.kill()
        communicator = self._communicator
        if communicator is not None:  # it may wait for the operation it ends
            self._abort = threading.Thread(target=communicator.abort, name="abort", daemon=True)
            self._abort.start()
        if not self._ending:
            log.warning("%s: the group of %d ranks is broken: %s", self._actor.name, self.world, error)
            self._lost(error)

    # ---- operations -------------------------------------------------------------------------------------------------

    async def open(self, key: Hashable, length: int, names: Sequence[int], prompt: int) -> int:
        """As Engine.open, on every rank."""
        request = OpenSession(self._numbered(key), length, prompt, list(names))
        have, replies = await self._together(
            request, lambda: self.engine.open(key, length, names, prompt), SessionOpened, STEP_S
        )
        self._agree(SessionOpened(have), replies)
        return have

    async def close(self, key: Hashable, names: Sequence[int] | None) -> None:
        """As Engine.close, on every rank."""
        number = self._numbers.pop(key, None)
        if number is None or self.broken is not None:
            return
        request = CloseSession(number, None if names is None else list(names))
        await self._together(request, lambda: self.engine.close(key, names), SessionClosed, STEP_S)

    async def turn(self, works: Sequence[Work], threads: int) -> TurnResult:
        """As Engine.turn, on every rank; each uses the threads it was started with."""
        steps = [
            RankStep(
                self._numbered(work.key), work.seq_pos, work.n, work.sampler is not None or work.logits, work.opens
            )
            for work in works
        ]
        rows = works[0].rows if len(works) == 1 else torch.cat([work.rows for work in works])
        if self.engine.shard.is_first:
            request = StepBatch(steps, rows.tolist(), best=all(work.takes_best for work in works))
        else:
            request = StepBatch(steps, shape=list(rows.shape), data=to_bytes(rows, self.engine.dtype))

        def own() -> TurnResult:
            started = time.perf_counter_ns()
            result = self.engine.turn(works, self._threads)
            self._own.forward_us += (time.perf_counter_ns() - started) // 1000
            return result

        result, replies = await self._together(request, own, StepBatchOk, STEP_S)
        self._steps += 1
        self._own.steps += 1
        for member, reply in zip(self._members, replies, strict=True):
            member.load.steps += 1
            member.load.forward_us += reply.forward_us
            reply.forward_us = 0
        self._agree(step_response(result, 0), replies)
        return result

    def stats(self) -> GroupLoad:
        """For the monitor."""
        state = "broken" if self.broken is not None else "ready" if self._formed else "forming"
        return GroupLoad(
            state=state,
            world=self.world,
            comm_age_s=round(time.monotonic() - self._formed, 1) if self._formed else 0.0,
            steps=self._steps,
            fan_out_us=self._fan_out_us,
            ranks=[self._own, *(member.load for member in self._members)],
        )

    def _numbered(self, key: Hashable) -> int:
        """What the ranks call a session."""
        if key not in self._numbers:
            self._number += 1
            self._numbers[key] = self._number
        return self._numbers[key]

    def _agree(self, own: RankMessage, replies: Sequence[RankMessage]) -> None:
        for member, reply in zip(self._members, replies, strict=True):
            if reply != own:
                error = ZrtError(
                    "rank_failed", f"{member.child.name} is out of step: it says {reply}, the leader {own}"
                )
                self._fail(error)
                raise error

    async def _together(
        self, request: WorkerRequest, own: Callable[[], _T], reply: type[_Response], timeout: float
    ) -> tuple[_T, list[_Response]]:
        """The leader's result and every rank's reply, in order of ranks. What was begun is finished, also when the caller is cancelled.

        ZrtError: the leader's, with those of the ranks; `rank_failed` when the leader succeeded and a rank did not, or the group is broken.
        """
        task = asyncio.ensure_future(self._operation(request, own, reply, timeout))
        return await asyncio.shield(task)

    async def _operation(
        self, request: WorkerRequest, own: Callable[[], _T], reply: type[_Response], timeout: float
    ) -> tuple[_T, list[_Response]]:
        async with self._turns:
            if self.broken is not None:
                raise self.broken
            started = time.perf_counter_ns()
            asked = [
                asyncio.ensure_future(self._timed(member, self._ask(member, request, reply, timeout)))
                for member in self._members
            ]
            await asyncio.sleep(0)  # they send now
            self._fan_out_us += (time.perf_counter_ns() - started) // 1000
            leader = asyncio.ensure_future(self._lane.run(own))
            parts: list[asyncio.Future[Any]] = [leader, *asked]
            await self._drain(parts)
            return self._combine(str(type(request).__struct_config__.tag), leader, asked)

    async def _drain(self, parts: Sequence["asyncio.Future[Any]"]) -> None:
        """Wait until all have ended, each in whatever way. Once one has failed, the others have a little time to fail as well."""
        breaks = asyncio.ensure_future(self._break.wait())
        pending = set(parts)
        failed: ZrtError | None = None
        while pending and self.broken is None:
            wait = GRACE_S if failed is not None else None
            done, _ = await asyncio.wait({*pending, breaks}, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
            pending -= done
            for part in done - {breaks}:
                if (error := part.exception()) is not None and failed is None:
                    failed = error if isinstance(error, ZrtError) else ZrtError("internal", repr(error))
            if not done and failed is not None:
                self._fail(
                    ZrtError("rank_failed", f"one part failed while others waited for it: {failed}", self._actor.name)
                )
        breaks.cancel()
        if pending:
            await asyncio.wait(pending, timeout=ABORT_S)
        if not parts[0].done():
            log.error("%s: the lane does not come back from a broken group", self._actor.name)
            self._stuck()
        for part in parts:
            part.cancel()
        await asyncio.wait(parts)

    def _combine(
        self, op: str, leader: "asyncio.Future[_T]", asked: Sequence["asyncio.Future[_Response]"]
    ) -> tuple[_T, list[_Response]]:
        faults = []
        for member, answer in zip(self._members, asked, strict=True):
            if (error := _error(answer)) is not None:
                member.load.errors += 1
                faults.append((member.rank, error))
        own = _error(leader)
        words = "; ".join(f"rank {rank} {error.kind}: {error.message}" for rank, error in faults)
        if own is None and not faults:
            return leader.result(), [answer.result() for answer in asked]
        if own is not None:
            self._own.errors += 1
        if self.broken is not None:
            raise ZrtError(
                "rank_failed", f"{op}: {self.broken.message}{f'; {words}' if words else ''}", self._actor.name
            )
        if own is None:
            error = ZrtError("rank_failed", f"{op}: leader succeeded but workers failed: {words}", self._actor.name)
            self._fail(error)
            raise error
        # Refused by all of them alike, it was the input's fault. Anything else, a collective that broke off for one, left them out of step: the
        # news that a rank has died may come last.
        kinds = [error.kind for _, error in faults]
        if not isinstance(leader.exception(), ZrtError) or kinds != [own.kind] * len(self._members):
            said = f"{own.message}{f'; {words}' if words else '; the ranks did not fail'}"
            error = ZrtError("rank_failed", f"{op}: {said}", self._actor.name)
            self._fail(error)
            raise error
        raise ZrtError(own.kind, f"{own.message}; {words}", own.where)

    async def _timed(self, member: RankProcess, answer: Awaitable[_Response]) -> _Response:
        started = time.perf_counter_ns()
        try:
            return await answer
        finally:
            member.load.drain_us += (time.perf_counter_ns() - started) // 1000

    async def _ask(
        self, member: RankProcess, request: WorkerRequest, reply: type[_Response], timeout: float
    ) -> _Response:
        """ZrtError: the rank's own; rank_failed: another reply than this, or none."""
        try:
            answer = (await self._actor.ask(member.address, request, timeout=timeout)).body
        except ZrtError as error:
            raise ZrtError("rank_failed", f"{member.child.name}: {error.message}", member.child.name) from None
        if isinstance(answer, Error):
            raise ZrtError.of(answer.kind, answer.message, member.child.name)
        if not isinstance(answer, reply):
            raise ZrtError("rank_failed", f"{member.child.name} answered {type(answer).__name__}", member.child.name)
        return answer


def _error(part: "asyncio.Future[Any]") -> ZrtError | None:
    if part.cancelled():
        return ZrtError("rank_failed", "it did not end")
    error = part.exception()
    if error is None or isinstance(error, ZrtError):
        return error
    return ZrtError("internal", f"{type(error).__name__}: {error}")


def _files(folder: Path, assignment: Assignment) -> list[str]:
    """The files that hold the stage's tensors."""
    source, spec = open_checkpoint(folder).matched(read_spec(folder))
    names = shard_shapes(spec, assignment.first, assignment.last)
    return sorted({str(source.entry(name).file) for name in names})


def _nothing() -> None:
    """The leader's part of what only the ranks need to be told."""
