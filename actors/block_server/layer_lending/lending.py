"""A block server's layer workers: what each gets, and what is done when one is lost.

The coordinator tells (`Workers`) who there is (known_workers.py). Pinned runs wait for their
workers; where the stage takes help, the other blocks are shared out over the workers that are there
and the block server itself (lending_plan.py). A stage waits for workers as long as its blocks do
not fit without.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Set
from contextlib import suppress
from pathlib import Path
from typing import Final

from zrt.actors.block_server.backend import Backend, BackendListener, LocalBackend, Progress, load_assigned
from zrt.actors.block_server.layer_lending.known_workers import RETRY_S, KnownWorkers
from zrt.actors.block_server.layer_lending.layer_setup import LentModel
from zrt.actors.block_server.layer_lending.lending_backend import LendingBackend
from zrt.actors.block_server.layer_lending.lending_plan import (
    OwnMemory,
    grace_s,
    holders_of,
    pinned_shortage,
    share_out,
)
from zrt.actors.block_server.layer_lending.lent_worker import LentWorker
from zrt.actors.block_server.layer_lending.own_runs import OwnRun, cut
from zrt.runtime.actor.executor import ComputeExecutor
from zrt.runtime.actor.member import Member
from zrt.runtime.cluster.layer_sharing import Holder, LayerPlan, plan_layers, ranges
from zrt.runtime.compute.devices import device_memory
from zrt.runtime.compute.engine import Engine, given_back
from zrt.runtime.compute.layer_time import layer_time
from zrt.runtime.compute.tensors import DTYPES
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.control import Address, Fault
from zrt.runtime.messages.members import Assignment, Lend, Workers
from zrt.runtime.messages.stats import LendLoad
from zrt.runtime.models.checkpoint.formats.registry import format_of
from zrt.runtime.models.checkpoint.layout import ends_bytes

log = logging.getLogger(__name__)

ATTEMPTS: Final = 5
"""How many times layers are given out before their stage fails."""
PAUSE_S: Final = 0.5
WAIT_S: Final = 600.0
"""How long workers may take to join, or to come back."""


class Lending:
    """The layers of a stage that workers hold. What `load` gives out stays until `end`; `listener`
    hears when it breaks by itself, and `load` is due again, and when `stats` change meanwhile."""

    def __init__(self, actor: Member, executor: ComputeExecutor, device: str, listener: BackendListener) -> None:
        self.lent: LendingBackend | None = None
        self._actor = actor
        self._executor = executor
        self._device = device
        self._listener = listener
        self._workers = KnownWorkers(actor)
        self._plan = LayerPlan(())
        self._kept: dict[OwnRun, Engine] = {}
        self._given: Assignment | None = None
        self._own_us = 0
        self._own = ""
        self._waits_for = ""
        self._rebuilds = 0

    # ---- who is there ----------------------------------------------------------------------------

    def workers_are(self, message: Workers) -> None:
        """Take what the coordinator knows of the workers."""
        for address in self._workers.update(message):
            self._lose(address)

    def peer_died(self, address: Address) -> None:
        """Lose a worker whose connection broke; if the process is there, it is tried again."""
        self._workers.connection_broke(address)
        self._lose(address)

    def _lose(self, address: Address) -> None:
        if self.lent is not None:
            self.lent.worker_lost(address)

    def may_mend(self, assignment: Assignment, fault: Fault) -> bool:
        """Return whether a load that ended with this fault may succeed now: all workers of pinned
        runs are there, and the worker it failed for is another process than then."""
        workers = self._workers.by_name
        if any(lend.worker not in workers for lend in assignment.lend):
            return False
        worker = workers.get(fault.where)
        return fault.kind == "worker_failed" or (worker is not None and worker.address not in self._workers.refused)

    @property
    def may_help(self) -> bool:
        """Whether nothing is lent, and a worker is there that was not when that was found best."""
        return self.lent is None and self._workers.has_new

    def stats(self) -> LendLoad:
        """Return what is lent and waited for, and every worker's load."""
        loads = [worker.load for _, worker in sorted(self._workers.by_name.items())]
        return LendLoad(self._own, self._waits_for, self._rebuilds, loads)

    # ---- giving out ------------------------------------------------------------------------------

    async def load(
        self, folder: Path, assignment: Assignment, progress: Progress, cancelled: Callable[[], bool]
    ) -> Backend:
        """Return the backend of this assignment. A load that breaks off because a worker is lost
        begins again, a few times.

        ZrtError: as load_engine; a worker's own, where blocks are pinned to it; `worker_failed`.
        """
        if assignment != self._given:
            self.forget()
            self._given = assignment
        model = await self._executor.run(LentModel.open, folder, assignment)
        for attempt in range(ATTEMPTS):
            if attempt:
                self._rebuilds += 1
                await asyncio.sleep(PAUSE_S * attempt)
            try:
                plan = self._plan = await self._planned(model, cancelled)
                return await self._give_out(folder, model, plan, progress, cancelled)
            except ZrtError as error:
                if cancelled():
                    raise
                if attempt == ATTEMPTS - 1 or not self._may_go_on(assignment, error):
                    self._say("")
                    raise
                log.warning("%s: layers are given out again: %s", self._actor.name, error)
                await self.end()
        raise AssertionError("the last attempt returns or raises")

    def _may_go_on(self, assignment: Assignment, error: ZrtError) -> bool:
        """Return whether another attempt may succeed: a worker was lost, or one that nothing is
        pinned to cannot hold what it was given. An error of this actor's own, that no worker will
        come, is final."""
        worker = self._workers.by_name.get(error.where)
        if error.kind == "worker_failed":
            return error.where != self._actor.name
        if worker is None:
            return False
        self._workers.refused[worker.address] = error.message
        return all(lend.worker != worker.name for lend in assignment.lend)

    async def _give_out(
        self, folder: Path, model: LentModel, plan: LayerPlan, progress: Progress, cancelled: Callable[[], bool]
    ) -> Backend:
        given = model.assignment
        lent_blocks = {block for lend in plan.lends for block in range(lend.first, lend.last + 1)}
        self._own = ranges([block for block in range(given.first, given.last + 1) if block not in lent_blocks])
        for worker in self._workers.by_name.values():
            load, layers = worker.load, ranges(plan.layers(worker.name))
            if not layers and load.state != "lost":
                worker.reserve()
            load.layers = layers
        self._say("")
        if not plan.lends:
            self._kept.clear()
            engine = await self._executor.run(
                load_assigned, folder, given, device=self._device, progress=progress, cancelled=cancelled
            )
            return LocalBackend(self._executor, engine)
        runs = cut(given, plan.lends)
        self._kept = {run: engine for run, engine in self._kept.items() if run in runs}
        lent = self.lent = LendingBackend(self._actor, self._executor, self._on_lost)
        await lent.load(model, runs, self._workers.by_name, self._device, self._kept, progress, cancelled)
        self._kept = {}
        if lent.broken is not None:
            raise lent.broken.anew()
        return lent

    def _on_lost(self, error: ZrtError) -> None:
        self._rebuilds += 1
        self._listener.backend_lost(error)

    async def end(self) -> None:
        """Lend nothing any more. The stage's own engines are kept for the next load, without their
        sessions."""
        lent, self.lent = self.lent, None
        if lent is not None:
            lent.end()
            self._kept |= lent.own
        for engine in self._kept.values():
            await self._executor.run(engine.close_all)

    def forget(self) -> None:
        """Forget what was found out: the next load is of another assignment."""
        self._kept.clear()
        self._workers.forget()
        self._plan = LayerPlan(())
        self._own_us = self._rebuilds = 0
        self._own = self._waits_for = ""

    # ---- the plan --------------------------------------------------------------------------------

    async def _planned(self, model: LentModel, cancelled: Callable[[], bool]) -> LayerPlan:
        """Return who gets which blocks, once all that is needed is there. ZrtError bad_config,
        worker_failed, cancelled."""
        given, workers = model.assignment, self._workers
        began = time.monotonic()
        while True:
            workers.changed.clear()
            waited = time.monotonic() - began
            if cancelled():
                raise ZrtError("cancelled", "another assignment came", self._actor.name)
            there = workers.there()
            pins = [lend for lend in given.lend if lend.worker in there or not self._given_up(lend.worker, given)]
            missing = sorted({lend.worker for lend in pins} - there)
            had = {lend.worker for lend in self._plan.lends}
            if missing:
                waits = f"layer worker {', '.join(missing)}"
            elif waited < (grace := grace_s(given, there, workers.awaited, had, workers.of_no_use())):
                waits = f"layer workers to join, {grace:g} s at most, and then loads with those that are there"
            else:
                found = await self._plan_with(model, pins, there)
                if isinstance(found, LayerPlan):
                    workers.planned_with(there)
                    return found
                waits = found
            if waited > WAIT_S:
                raise ZrtError("worker_failed", f"{WAIT_S:.0f} s went by without {waits}", self._actor.name)
            self._say(waits)
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S):
                    await workers.changed.wait()

    def _given_up(self, name: str, given: Assignment) -> bool:
        """Return whether a worker that blocks are pinned to will not come: others take them, where
        the stage takes help. ZrtError worker_failed: it takes none."""
        if name in self._workers.by_name or name in self._workers.awaited:
            return False
        if given.helped:
            return True
        text = f"the layer worker {name} is not started again, and blocks are pinned to it"
        raise ZrtError("worker_failed", text, self._actor.name)

    async def _plan_with(self, model: LentModel, pins: list[Lend], there: Set[str]) -> LayerPlan | str:
        """Return the plan with these workers; or what it waits for, in words. ZrtError bad_config,
        and that of a worker with pinned blocks."""
        given, workers = model.assignment, self._workers
        pinned = {lend.worker for lend in pins}
        looked = [
            worker
            for name in sorted(there)
            if (worker := workers.by_name.get(name)) is not None
            and (name in pinned or (given.helped and worker.address not in workers.refused))
        ]
        answers = await asyncio.gather(*(worker.look(model.prepare(0)) for worker in looked), return_exceptions=True)
        helpers = []
        for worker, answer in zip(looked, answers, strict=True):
            if isinstance(answer, ZrtError) and answer.kind == "worker_failed":
                workers.try_later(worker)
                return f"layer worker {answer.message}"
            if isinstance(answer, ZrtError) and worker.name not in pinned:
                workers.refused[worker.address] = answer.message
                continue
            if isinstance(answer, BaseException):
                raise answer
            worker.reserve()
            if worker.name not in pinned:
                helpers.append(worker)
            elif shortage := pinned_shortage(worker.name, worker.has.most_bytes, pins, model.block_bytes):
                return shortage
        if not given.helped:
            return plan_layers(given.first, given.last, pins, [Holder("", given.num_blocks, 1)])
        holders = await self._holders(model, helpers)
        refused = [why for address, why in workers.refused.items() if address.name in there]
        return share_out(given, pins, holders, refused)

    async def _holders(self, model: LentModel, helpers: list[LentWorker]) -> list[Holder]:
        """Return the block server and the workers, with what each has room for."""
        given = model.assignment
        free, total = await self._executor.run(device_memory, self._device)
        held = given_back(self._kept.values(), self._device)
        if helpers and not self._own_us:
            self._own_us = await self._executor.run(layer_time, model.spec, DTYPES[given.dtype], self._device)
        own = OwnMemory(
            socket.gethostname(),
            self._device,
            free + held,
            total,
            ends_bytes(model.spec, given.first == 0, given.last == given.num_blocks - 1, format_of(given.dtype)),
            self._actor.memory_bytes,
            given.gpu_memory,
            self._own_us,
        )
        holders = holders_of(own, {worker.name: worker.has for worker in helpers}, model.block_bytes)
        roomless = self._workers.roomless
        for worker, holder in zip(helpers, holders[1:], strict=True):
            (roomless.discard if holder.layers else roomless.add)(worker.address)
        return holders

    def _say(self, waits_for: str) -> None:
        """Log and tell the listener what is waited for; empty: nothing."""
        if waits_for != self._waits_for:
            self._waits_for = waits_for
            if waits_for:
                log.info("%s waits for %s", self._actor.name, waits_for)
        self._listener.progress_changed()
