"""The operations of a group of ranks: each is sent to all of them, the leader does its part, and
every reply is read.

Every reply is read whatever happened: also when a send failed, a rank answered an error, or whoever
asked has gone. One operation at a time, so that all ranks do the same in the same order.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from traceback import format_exception
from typing import Any, Final, Protocol, TypeVar

from zrt.actors.block_server.tensor_parallel.group_stats import GroupStats
from zrt.actors.block_server.tensor_parallel.rank_processes import RankProcess, RankProcesses, Response
from zrt.runtime.actor.executor import ComputeExecutor
from zrt.runtime.compute.devices import out_of_memory
from zrt.runtime.errors import MEMORY, Kind, ZrtError
from zrt.runtime.messages.ranks import RankMessage, StepBatch, StepBatchOk, WorkerRequest

log = logging.getLogger(__name__)

GRACE_S: Final = 1.0
"""How long the others may take to fail as well, once one rank has answered an error."""
SPREAD_S: Final = 5.0
"""How long the others may go on once one part has ended: whoever waits longer waits for somebody
who has not joined in."""
ABORT_S: Final = 6.0
"""How long the leader's own part may take to end once the group is broken."""

_T = TypeVar("_T")


class GroupListener(Protocol):
    """Whoever is told how a group of ranks fares."""

    def group_broken(self, error: ZrtError) -> None:
        """Hear, once, that the group has lost step."""

    def group_stuck(self) -> None:
        """Hear that the leader's own executor does not come back from a broken group: only the end
        of the process helps."""


class RankOperations:
    """The operations of the group whose leader is the actor `name`, with its part in `executor`.

    `fail` breaks the group: then the `listener` has to end what the ranks wait in.
    """

    def __init__(
        self,
        name: str,
        executor: ComputeExecutor,
        processes: RankProcesses,
        stats: GroupStats,
        listener: GroupListener,
    ) -> None:
        self.broken: ZrtError | None = None
        self._name = name
        self._executor = executor
        self._processes = processes
        self._stats = stats
        self._listener = listener
        self._one_at_a_time = asyncio.Lock()
        self._break = asyncio.Event()

    def fail(self, error: ZrtError) -> None:
        """Break the group: it has lost step, and can do nothing more together."""
        if self.broken is None:
            self.broken = error.anew()
            self._break.set()
            self._listener.group_broken(self.broken)

    async def together(
        self,
        request: WorkerRequest,
        own: Callable[[], _T],
        reply: type[Response],
        timeout: float,
        spread: float = SPREAD_S,
    ) -> tuple[_T, list[Response]]:
        """Return the leader's result and every rank's reply, in order of ranks. What was begun is
        finished, also when the caller is cancelled.

        A rank has `timeout` seconds to answer, and `spread` from when the first part of the
        operation has ended. ZrtError: the leader's, with those of the ranks; `rank_failed` when the
        leader succeeded and a rank did not, or the group is broken.
        """
        task = asyncio.ensure_future(self._operation(request, own, reply, timeout, spread))
        try:
            return await asyncio.shield(task)
        finally:
            del task  # its error, and so this call, would know itself

    async def over(self) -> None:
        """Wait until the operation that runs is over. After `fail` that is soon, or the group is
        stuck."""
        async with self._one_at_a_time:
            pass

    def agree(self, own: RankMessage, replies: Sequence[RankMessage]) -> None:
        """Break the group, with ZrtError rank_failed, unless all ranks said the same as the
        leader."""
        for member, reply in zip(self._processes.members, replies, strict=True):
            if reply != own:
                text = f"{member.child.name} is out of step: it says {reply}, the leader {own}"
                error = ZrtError("rank_failed", text, self._name)
                self._stats.blame(member.rank, error)
                self.fail(error)
                raise error

    async def _operation(
        self, request: WorkerRequest, own: Callable[[], _T], reply: type[Response], timeout: float, spread: float
    ) -> tuple[_T, list[Response]]:
        async with self._one_at_a_time:
            if self.broken is not None:
                raise self.broken.anew()
            clock = _OperationTimes(self._processes.world)
            asked = [
                asyncio.ensure_future(clock.drained(self._processes.ask(member, request, reply, timeout), member))
                for member in self._processes.members
            ]
            await asyncio.sleep(0)  # they send now
            clock.fanned_out()
            leader = asyncio.ensure_future(clock.drained(self._executor.run(clock.forward, own)))
            parts: list[asyncio.Future[Any]] = [leader, *asked]
            await self._drain(parts, spread)
            op = str(type(request).__struct_config__.tag)
            known = self._released(op, leader)
            errors = [_error(part) for part in parts]
            for rank, part in enumerate(asked, 1):
                if errors[rank] is None and isinstance(answer := part.result(), StepBatchOk):
                    clock.forward_us[rank] = answer.forward_us
            steps = request.steps if isinstance(request, StepBatch) else []
            self._stats.ran(
                op,
                sessions=len(steps),
                rows=sum(step.n for step in steps),
                fan_out_us=clock.fan_out_us,
                forward_us=clock.forward_us,
                drain_us=clock.drain_us,
                errors=errors,
            )
            if any(errors):
                raise self._combined(op, errors, known=known)
            return leader.result(), [answer.result() for answer in asked]

    async def _drain(self, parts: Sequence["asyncio.Future[Any]"], spread: float) -> None:
        """Wait until all have ended, each in whatever way. Once one has, the others have `spread`
        to end as well; less, if it failed."""
        breaks = asyncio.ensure_future(self._break.wait())
        loop = asyncio.get_running_loop()
        pending = set(parts)
        due: float | None = None
        failed: ZrtError | None = None
        while pending and self.broken is None:
            wait = None if due is None else max(0.0, due - loop.time())
            done, _ = await asyncio.wait({*pending, breaks}, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
            pending -= done
            if not done:
                said = f"failed: {failed}" if failed is not None else "has ended"
                self.fail(ZrtError(_kind([failed]), f"one part {said}, and others still wait for it", self._name))
            elif failed is None and (failed := next(filter(None, map(_error, done - {breaks})), None)) is not None:
                due = loop.time() + GRACE_S
            elif due is None:
                due = loop.time() + spread
        breaks.cancel()
        if pending:
            await asyncio.wait(pending, timeout=ABORT_S)
        if not parts[0].done():
            log.error("%s: the executor does not come back from a broken group", self._name)
            self._listener.group_stuck()
        for part in parts:
            part.cancel()
        await asyncio.wait(parts)

    def _released(self, op: str, leader: "asyncio.Future[Any]") -> bool:
        """Return whether the leader's part raised a ZrtError. Free it of its traceback, which
        would keep the engine, with its memory."""
        error = None if leader.cancelled() else leader.exception()
        if error is None:
            return False
        known = isinstance(error, ZrtError)
        if not known and self.broken is None:
            log.error("%s: %s failed: %s", self._name, op, "".join(format_exception(error)))
        error.__traceback__ = error.__context__ = error.__cause__ = None
        return known

    def _combined(self, op: str, errors: Sequence[ZrtError | None], *, known: bool) -> ZrtError:
        """Return one error for those of all ranks, the leader's (`known`: it was a ZrtError) first.
        Unless all refused alike, break the group.

        What all of them refuse alike is the input's fault. Anything else, a collective that broke
        off for one or for all, left them out of step: the news that a rank has died may come last.
        """
        own, *others = errors
        faults = [f"rank {rank} {error.kind}: {error.message}" for rank, error in enumerate(others, 1) if error]
        words = "; ".join(faults)
        if self.broken is not None:
            said = f"{self.broken.message}{f'; {words}' if words else ''}"
            return ZrtError(_kind([self.broken, *errors]), f"{op}: {said}", self._name)
        if own is None:
            error = ZrtError(_kind(errors), f"{op}: leader succeeded but workers failed: {words}", self._name)
        elif not known or own.kind == "rank_failed" or any(not other or other.kind != own.kind for other in others):
            said = f"{op}: {own.message}{f'; {words}' if words else '; the ranks did not fail'}"
            error = ZrtError(_kind(errors), said, self._name)
        else:
            return ZrtError(own.kind, f"{own.message}; {words}", own.where)
        self.fail(error)
        return error


class _OperationTimes:
    """The times that one operation took, microseconds: one per rank, the leader's first."""

    def __init__(self, world: int) -> None:
        self.fan_out_us = 0
        self.forward_us = [0] * world
        self.drain_us = [0] * world
        self._started = time.perf_counter_ns()
        self._sent = self._started

    def fanned_out(self) -> None:
        self._sent = time.perf_counter_ns()
        self.fan_out_us = (self._sent - self._started) // 1000

    def forward(self, own: Callable[[], _T]) -> _T:
        """Do the leader's part, in the executor."""
        started = time.perf_counter_ns()
        try:
            return own()
        finally:
            self.forward_us[0] = (time.perf_counter_ns() - started) // 1000

    async def drained(self, part: Any, member: RankProcess | None = None) -> Any:
        try:
            return await part
        finally:
            rank = member.rank if member is not None else 0
            self.drain_us[rank] = max(0, time.perf_counter_ns() - self._sent) // 1000


def _error(part: "asyncio.Future[Any]") -> ZrtError | None:
    if part.cancelled():
        return ZrtError("rank_failed", "it did not end")
    error = part.exception()
    if error is None or isinstance(error, ZrtError):
        return error
    return out_of_memory(error) or ZrtError("internal", f"{type(error).__name__}: {error}")


def _kind(errors: Sequence[ZrtError | None]) -> Kind:
    """Return the kind of a broken group's error: that there was no memory is worth knowing."""
    return next((error.kind for error in errors if error is not None and error.kind in MEMORY), "rank_failed")
