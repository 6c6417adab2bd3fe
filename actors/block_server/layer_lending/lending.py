"""A block server's layer workers: which are there, what each gets, and what is done when one is
lost.

Told by the coordinator (`Workers`) who there is. Pinned runs wait for their workers; where the
stage takes help, the other blocks are shared out over the workers that are there and the block
server itself (layer_sharing.py). It waits for workers as long as its blocks do not fit without.
"""

import asyncio
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from zrt.actors.block_server.backend import Backend, LocalBackend, load_assigned
from zrt.actors.block_server.layer_lending.layer_setup import LentModel
from zrt.actors.block_server.layer_lending.lending_backend import LendingBackend, OwnRun, Progress, cut
from zrt.actors.block_server.layer_lending.lent_worker import LentWorker
from zrt.runtime.actor.executor import ComputeExecutor
from zrt.runtime.actor.member import Member
from zrt.runtime.cluster.layer_sharing import Holder, LayerPlan, plan_layers, ranges, usable
from zrt.runtime.cluster.memory import BLOCK_SERVER_BYTES, in_words
from zrt.runtime.compute.devices import device_memory
from zrt.runtime.compute.engine import Engine, given_back
from zrt.runtime.compute.layer_time import layer_time
from zrt.runtime.compute.tensors import DTYPES
from zrt.runtime.errors import ZrtError
from zrt.runtime.formatting import counted
from zrt.runtime.messages.control import Address, Fault
from zrt.runtime.messages.members import Assignment, Lend, Workers
from zrt.runtime.messages.stats import LendLoad
from zrt.runtime.models.checkpoint.formats.registry import format_of
from zrt.runtime.models.checkpoint.layout import ends_bytes

log = logging.getLogger(__name__)

ATTEMPTS: Final = 5
"""How often layers are given out before their stage is failed."""
PAUSE_S: Final = 0.5
WAIT_S: Final = 600.0
"""How long workers may take to join, or to come back."""
GRACE_S: Final = 5.0
"""How long a stage that could do without waits for workers of the cluster file, and for those it
had."""
FIRST_S: Final = 2.0
"""How long a stage that takes help waits for a first worker."""
RETRY_S: Final = 1.0
"""When a worker whose connection broke is tried again."""


class Lending:
    """What `load` gives out stays until `end`; `lost` is called when it breaks of itself, and
    `load` is due again. `told` is called when `stats` change while it loads."""

    def __init__(
        self,
        actor: Member,
        executor: ComputeExecutor,
        device: str,
        lost: Callable[[ZrtError], None],
        told: Callable[[], None],
    ) -> None:
        self.lent: LendingBackend | None = None
        self._actor = actor
        self._executor = executor
        self._device = device
        self._lost = lost
        self._told = told
        self._workers: dict[str, LentWorker] = {}
        self._awaited: set[str] = set()
        self._changed = asyncio.Event()
        self._down: dict[str, float] = {}
        self._refused: dict[Address, str] = {}
        self._seen: set[Address] = set()
        """Those that the last plan was made with."""
        self._roomless: set[Address] = set()
        """Those that had no room for a block when they were looked at."""
        self._plan = LayerPlan(())
        self._kept: dict[OwnRun, Engine] = {}
        self._given: Assignment | None = None
        self._own_us = 0
        self._own = ""
        self._waits_for = ""
        self._rebuilds = 0

    # ---- who is there ----------------------------------------------------------------------------

    def workers_are(self, message: Workers) -> None:
        """What the coordinator knows. One that it does not name may yet be there, and goes on with
        what it does."""
        for address in message.workers:
            known = self._workers.get(address.name)
            if known is None or known.address != address:
                if known is not None:
                    self._gone(known.address)
                self._workers[address.name] = LentWorker(self._actor, address)
                self._down.pop(address.name, None)
        named = {address.name for address in message.workers}
        for name in [name for name in self._workers if name not in named]:
            del self._workers[name]
        for address in message.gone:
            self._gone(address)
        self._awaited = set(message.awaited)
        self._changed.set()

    def peer_died(self, address: Address) -> None:
        """The connection broke; if the process is there, it is tried again."""
        worker = self._workers.get(address.name)
        if worker is not None and worker.address == address:
            self._down[address.name] = time.monotonic() + RETRY_S
            worker.load.state = "lost"
            self._changed.set()
        if self.lent is not None:
            self.lent.worker_lost(address)

    def _gone(self, address: Address) -> None:
        if self.lent is not None:
            self.lent.worker_lost(address)

    def may_mend(self, assignment: Assignment, fault: Fault) -> bool:
        """Whether a load that ended so may do now: all workers of pinned runs are there, and the
        one it failed for is not the one it was."""
        if any(lend.worker not in self._workers for lend in assignment.lend):
            return False
        worker = self._workers.get(fault.where)
        return fault.kind == "worker_failed" or (worker is not None and worker.address not in self._refused)

    @property
    def may_help(self) -> bool:
        """Whether nothing is lent, and a worker is there that was not when that was found best."""
        new = [name for name, worker in self._workers.items() if worker.address not in self._seen]
        return self.lent is None and any(self._down.get(name, 0.0) <= time.monotonic() for name in new)

    def stats(self) -> LendLoad:
        return LendLoad(
            self._own, self._waits_for, self._rebuilds, [worker.load for _, worker in sorted(self._workers.items())]
        )

    # ---- giving out ------------------------------------------------------------------------------

    async def load(
        self, folder: Path, assignment: Assignment, progress: Progress, cancelled: Callable[[], bool]
    ) -> Backend:
        """The backend of this assignment. What breaks off since a worker is lost is begun again, a
        few times.

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
        """Whether another attempt may do: a worker was lost, or one that nothing is pinned to
        cannot hold what it was given. That none will come is our own word, and final."""
        worker = self._workers.get(error.where)
        if error.kind == "worker_failed":
            return error.where != self._actor.name
        if worker is None:
            return False
        self._refused[worker.address] = error.message
        return all(lend.worker != worker.name for lend in assignment.lend)

    async def _give_out(
        self, folder: Path, model: LentModel, plan: LayerPlan, progress: Progress, cancelled: Callable[[], bool]
    ) -> Backend:
        given = model.assignment
        lent_blocks = {block for lend in plan.lends for block in range(lend.first, lend.last + 1)}
        self._own = ranges([block for block in range(given.first, given.last + 1) if block not in lent_blocks])
        for worker in self._workers.values():
            worker.load.layers = ranges(plan.layers(worker.name))
        self._say("")
        if not plan.lends:
            self._kept.clear()
            engine = await self._executor.run(_load, folder, given, self._device, progress, cancelled)
            return LocalBackend(self._executor, engine)
        runs = cut(given, plan.lends)
        self._kept = {run: engine for run, engine in self._kept.items() if run in runs}
        lent = self.lent = LendingBackend(self._actor, self._executor, self._on_lost)
        await lent.load(model, runs, self._workers, self._device, self._kept, progress, cancelled)
        self._kept = {}
        if lent.broken is not None:
            raise lent.broken.anew()
        return lent

    def _on_lost(self, error: ZrtError) -> None:
        self._rebuilds += 1
        self._lost(error)

    async def end(self) -> None:
        """Nothing is lent any more. Our own engines are kept for the next load, without their
        sessions."""
        lent, self.lent = self.lent, None
        if lent is not None:
            lent.end()
            self._kept |= lent.own
        for engine in self._kept.values():
            await self._executor.run(engine.close_all)

    def forget(self) -> None:
        """The next load is of another assignment."""
        self._kept.clear()
        self._refused.clear()
        self._roomless.clear()
        self._seen.clear()
        self._plan = LayerPlan(())
        self._own_us = self._rebuilds = 0

    # ---- the plan --------------------------------------------------------------------------------

    async def _planned(self, model: LentModel, cancelled: Callable[[], bool]) -> LayerPlan:
        """Who gets which blocks, once all that is needed is there. ZrtError bad_config,
        worker_failed, cancelled."""
        given = model.assignment
        began = time.monotonic()
        while True:
            self._changed.clear()
            now = time.monotonic()
            if cancelled():
                raise ZrtError("cancelled", "another assignment came", self._actor.name)
            there = {name for name in self._workers if self._down.get(name, 0.0) <= now}
            pins = [lend for lend in given.lend if lend.worker in there or not self._given_up(lend.worker, given)]
            missing = sorted({lend.worker for lend in pins} - there)
            if missing:
                waits = f"layer worker {', '.join(missing)}"
            elif (grace := self._grace(given, there)) and now - began < grace:
                waits = f"layer workers to join, {grace:g} s at most, and then loads with those that are there"
            else:
                found = await self._plan_with(model, pins, there)
                if isinstance(found, LayerPlan):
                    self._seen = {worker.address for name in there if (worker := self._workers.get(name)) is not None}
                    return found
                waits = found
            if now - began > WAIT_S:
                raise ZrtError("worker_failed", f"{WAIT_S:.0f} s went by without {waits}", self._actor.name)
            self._say(waits)
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S):
                    await self._changed.wait()

    def _given_up(self, name: str, given: Assignment) -> bool:
        """Whether a worker that blocks are pinned to will not come: others take them, where the
        stage takes help. ZrtError worker_failed."""
        if name in self._workers or name in self._awaited:
            return False
        if given.helped:
            return True
        text = f"the layer worker {name} is not started again, and blocks are pinned to it"
        raise ZrtError("worker_failed", text, self._actor.name)

    def _grace(self, given: Assignment, there: set[str]) -> float:
        """Seconds to wait for workers that the stage could do without."""
        if not given.helped:
            return 0.0
        had = {lend.worker for lend in self._plan.lends}
        no_use = self._roomless | self._refused.keys()
        spare = {name for name in there - had if self._workers[name].address not in no_use}
        spare -= {lend.worker for lend in given.lend}
        if (self._awaited | had) - there and not (had and spare):
            return GRACE_S
        return 0.0 if there else FIRST_S

    async def _plan_with(self, model: LentModel, pins: list[Lend], there: Iterable[str]) -> LayerPlan | str:
        """The plan with these workers; or what it waits for, in words. ZrtError bad_config."""
        given = model.assignment
        pinned = {lend.worker for lend in pins}
        looked = [
            worker
            for name in sorted(there)
            if (worker := self._workers.get(name)) is not None
            and (name in pinned or (given.helped and worker.address not in self._refused))
        ]
        answers = await asyncio.gather(*(worker.look(model.prepare(0)) for worker in looked), return_exceptions=True)
        helpers = []
        for worker, answer in zip(looked, answers, strict=True):
            if isinstance(answer, ZrtError) and answer.kind == "worker_failed":
                self._down[worker.name] = time.monotonic() + RETRY_S
                worker.load.state = "lost"
                return f"layer worker {answer.message}"
            if isinstance(answer, ZrtError) and worker.name not in pinned:
                self._refused[worker.address] = answer.message
                continue
            if isinstance(answer, BaseException):
                raise answer
            worker.load.state = "reserve"
            if worker.name not in pinned:
                helpers.append(worker)
            elif narrow := _narrow(worker, model, pins):
                return narrow
        if not given.helped:
            return plan_layers(given.first, given.last, pins, [Holder("", given.num_blocks, 1)])
        holders = await self._holders(model, helpers)
        plan = plan_layers(given.first, given.last, pins, holders)
        if not plan.lacking:
            return plan
        refused = [why for address, why in self._refused.items() if address.name in there]
        besides = f"; not {'; not '.join(refused)}" if refused else ""
        room = ", ".join(f"{holder.name or 'here'} {holder.layers}" for holder in holders)
        return (
            f"layer workers with room for {plan.lacking} of blocks {given.first}-{given.last} (room: {room}){besides}"
        )

    async def _holders(self, model: LentModel, helpers: list[LentWorker]) -> list[Holder]:
        """Ourselves and the workers, with what each has room for. Those of one machine have its
        memory together."""
        given = model.assignment
        block = model.block_bytes
        here = (socket.gethostname(), self._device)
        crowd = Counter([here, *((worker.has.host, worker.has.device) for worker in helpers)])
        free, total = await self._executor.run(device_memory, self._device)
        weights = format_of(given.dtype)
        ends = ends_bytes(model.spec, given.first == 0, given.last == given.num_blocks - 1, weights)
        turn = model.turn_bytes
        held = given_back(self._kept.values(), self._device)
        if self._device == "cpu":
            room = (free + held) // crowd[here]
            if self._actor.memory_bytes:
                room = min(room, self._actor.memory_bytes - BLOCK_SERVER_BYTES)
        else:
            room = min(free + held, int(total * given.gpu_memory))
        if helpers and not self._own_us:
            self._own_us = await self._executor.run(layer_time, model.spec, DTYPES[given.dtype], self._device)
        holders = [Holder("", max(0, room - ends - turn) // block, self._own_us)]
        for worker in helpers:
            has = worker.has
            shared = crowd[has.host, has.device]
            space = usable(has.free_bytes, has.total_bytes, has.device) // shared
            space = min(space, has.most_bytes) if has.most_bytes else space
            layers = max(0, space - turn) // block
            (self._roomless.discard if layers else self._roomless.add)(worker.address)
            holders.append(Holder(worker.name, layers, has.layer_us))
        return holders

    def _say(self, waits_for: str) -> None:
        if waits_for != self._waits_for:
            self._waits_for = waits_for
            if waits_for:
                log.info("%s waits for %s", self._actor.name, waits_for)
        self._told()


def _narrow(worker: LentWorker, model: LentModel, pins: list[Lend]) -> str:
    """What is waited for, where the blocks pinned to a worker are more than its `--memory`."""
    count = sum(lend.last - lend.first + 1 for lend in pins if lend.worker == worker.name)
    needed, most = count * model.block_bytes + model.turn_bytes, worker.has.most_bytes
    if not most or needed <= most:
        return ""
    blocks = counted(count, "block")
    leaves = in_words(most) if most > 1 else "nothing beside what the process takes"
    return f"layer worker {worker.name} to have {in_words(needed)} for the {blocks} pinned to it: its --memory leaves {leaves}"


def _load(folder: Path, given: Assignment, device: str, progress: Progress, cancelled: Callable[[], bool]) -> Engine:
    return load_assigned(folder, given, device=device, progress=progress, cancelled=cancelled)
