"""A block server as master: a stage whose runs of blocks are computed in turn, some in its own
executor, some by layer workers.

Each run that is lent is one Batch with the hidden states of the turn, and one hop. A step that a
run cannot take is left out of the runs behind it; the runs before it go back when the step comes
again (the step rule). A worker that is gone, or says what it should not, ends the whole: its KV is
lost, so the layers are given out anew (lending.py), and the sessions are replayed.

Embedding, norm and head stay here. Where the blocks beside them are lent they are runs of their
own, without blocks.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from zrt.actors.block_server.backend import options_of
from zrt.actors.block_server.layer_lending.layer_setup import LentModel, set_up
from zrt.actors.block_server.layer_lending.lent_run import LentRun, Numbers
from zrt.actors.block_server.layer_lending.lent_worker import STEP_S, LentWorker
from zrt.runtime.actor.executor import ComputeExecutor
from zrt.runtime.actor.member import Member
from zrt.runtime.actor.tasks import together
from zrt.runtime.compute.decoder.linear import Linear
from zrt.runtime.compute.engine import Engine, Holding
from zrt.runtime.compute.loading import LoadWatch, engine_of_ends, read_engine
from zrt.runtime.compute.turn import Outcome, TurnResult, Work
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.control import Address
from zrt.runtime.messages.layers import CloseLayers, LayersClosed, LayersOpened, OpenLayers
from zrt.runtime.messages.members import Assignment, Lend
from zrt.runtime.models.checkpoint.formats.registry import format_of
from zrt.runtime.models.checkpoint.layout import block_bytes, embedding_bytes, ends_bytes
from zrt.runtime.models.checkpoint.split import kv_pages

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class OwnRun:
    """A run of ours: blocks first..last (none: last is first - 1), with what of the model's ends is
    beside them."""

    first: int
    last: int
    embedding: bool = False
    head: bool = False

    def device(self, device: str) -> str:
        """Where it computes, of a stage on `device`: ends alone are on the CPU."""
        return device if self.last >= self.first else "cpu"

    def nbytes(self, model: LentModel) -> int:
        weights = format_of(model.assignment.dtype)
        blocks = (self.last - self.first + 1) * block_bytes(model.spec, weights)
        return blocks + ends_bytes(model.spec, self.embedding, self.head, weights)


def read_bytes(model: LentModel, runs: Sequence[OwnRun], device: str) -> list[int]:
    """What each of our runs takes, bytes: an embedding that is the head as well is the first one's
    on each device."""
    sizes, held = [], set()
    for run in runs:
        size, place = run.nbytes(model), run.device(device)
        if model.spec.tied and (run.embedding or run.head):
            size -= embedding_bytes(model.spec, format_of(model.assignment.dtype)) if place in held else 0
            held.add(place)
        sizes.append(size)
    return sizes


def ends(first: Engine, last: Engine) -> Holding:
    """What a stage of several engines is to those that ask: it takes what its first run takes, and
    gives what its last one gives."""
    shard = replace(first.shard, last=last.shard.last, final_norm=last.shard.final_norm, head=last.shard.head)
    return Holding(shard, first.cache)


class LendingBackend:
    """The backend; made by `load`. `lost(error)` is called once, when it breaks of itself: then
    another is needed.

    `own` are its engines, which the next one may go on with.
    """

    def __init__(self, actor: Member, executor: ComputeExecutor, lost: Callable[[ZrtError], None]) -> None:
        self.engine: Holding
        self.broken: ZrtError | None = None
        self.own: dict[OwnRun, Engine] = {}
        self._actor = actor
        self._executor = executor
        self._lost = lost
        self._runs: list[Engine | LentRun] = []
        self._workers: dict[str, LentWorker] = {}
        self._turns = asyncio.Lock()
        self._numbers = Numbers()
        self._hopped_ns = 0

    # ---- life ------------------------------------------------------------------------------------

    async def load(
        self,
        model: LentModel,
        runs: "Sequence[OwnRun | Lend]",
        workers: Mapping[str, LentWorker],
        device: str,
        kept: Mapping[OwnRun, Engine],
        progress: Progress,
        cancelled: Callable[[], bool],
    ) -> None:
        """Give each worker its layers and load our own, but for those that are `kept`.

        ZrtError: as load_engine; a worker's own; `worker_failed`.
        """
        lent: dict[str, list[int]] = {}
        for run in runs:
            if isinstance(run, Lend):
                lent.setdefault(run.worker, []).extend(range(run.first, run.last + 1))
        self._workers = {name: workers[name] for name in lent}
        ours = [run for run in runs if isinstance(run, OwnRun)]
        sizes = dict(zip(ours, read_bytes(model, ours, device), strict=True))
        total, done = sum(sizes.values()), 0

        def tick(now: int, _: int = 0) -> None:
            progress(done + now, total)

        await together(*(set_up(self._workers[name], model, layers, lambda: tick(0)) for name, layers in lent.items()))
        for run in runs:
            if isinstance(run, Lend):
                self._runs.append(LentRun(self._workers[run.worker], (run.first, run.last), self._numbers))
                continue
            engine = kept.get(run)
            if engine is None:
                table = _table([*kept.values(), *self.own.values()], run.device(device))
                engine = await self._executor.run(_read, model, run, device, table, tick, cancelled)
            self.own[run] = engine
            self._runs.append(engine)
            done += sizes[run]
            tick(0)
        own = list(self.own.values())
        self.engine = ends(own[0], own[-1])

    def worker_lost(self, address: Address) -> None:
        """A process is gone."""
        if any(worker.address == address for worker in self._workers.values()):
            self._fail(ZrtError("worker_failed", f"the layer worker {address.name} is gone", address.name))

    def end(self) -> None:
        """No more turns; nobody is told."""
        if self.broken is None:
            self.broken = ZrtError("cancelled", "these layers are not lent any more", self._actor.name)
        self._forget()

    def _fail(self, error: ZrtError) -> None:
        if self.broken is not None:
            return
        self.broken = error
        ends = self._actor.goes_down or self._actor.ended.is_set()  # and all others with it
        level = logging.INFO if ends else logging.WARNING
        log.log(level, "%s: %s", self._actor.name, error)
        self._forget()
        self._lost(error)

    def _forget(self) -> None:
        """Whoever waits for a worker's answer need not wait until the deadline."""
        for worker in self._workers.values():
            self._actor.forget(worker.address)

    def _check(self) -> None:
        if self.broken is not None:
            raise self.broken.anew()

    # ---- work ------------------------------------------------------------------------------------

    async def open(self, key: Hashable, length: int, names: Sequence[int], prompt: int) -> int:
        """As Engine.open: what all runs hold."""
        async with self._turns:
            have = []
            for engine in self.own.values():
                self._check()  # each time: what is broken meanwhile has had its engines emptied for the next
                have.append(await self._executor.run(engine.open, key, length, names, prompt))
            self._check()
            message = OpenLayers(self._numbers.of(key), length, prompt, list(names))
            try:
                asked = (worker.ask(message, LayersOpened, STEP_S) for worker in self._workers.values())
                return min(have + [answer.have for answer in await together(*asked)])
            except ZrtError as error:
                self._judge(error)
                raise

    async def close(self, key: Hashable, names: Sequence[int] | None) -> None:
        """As Engine.close."""
        async with self._turns:
            number = self._numbers.pop(key)
            for engine in self.own.values():
                await self._executor.run(engine.close, key, names)
            if number is None or self.broken is not None:
                return
            message = CloseLayers(number, None if names is None else list(names))
            asked = (worker.ask(message, LayersClosed, STEP_S) for worker in self._workers.values())
            for error in await asyncio.gather(*asked, return_exceptions=True):
                if isinstance(error, ZrtError):
                    self._fail(ZrtError("worker_failed", f"a session could not be closed: {error}", error.where))

    async def turn(self, works: Sequence[Work], threads: int) -> TurnResult:
        """As Engine.turn. ZrtError worker_failed."""
        async with self._turns:
            self._hopped_ns = 0
            outcomes: list[Outcome | None] = [None] * len(works)
            going = list(range(len(works)))
            part = list(works)
            output = None
            for run in self._runs:
                self._check()
                if run is not self._runs[-1]:  # what is picked is picked at the end
                    part = [replace(work, sampler=None, logits=False) for work in part]
                if isinstance(run, Engine):
                    result = await self._executor.run(run.turn, part, threads)
                else:
                    result = await self._hop(run, part)
                output = result.output
                for index, outcome in zip(going, result.outcomes, strict=True):
                    outcomes[index] = outcome
                ran = [index for index, outcome in zip(going, result.outcomes, strict=True) if outcome.fault is None]
                if not ran:
                    output = None
                    break
                if run is not self._runs[-1]:
                    assert output is not None
                    rows = [output] if len(ran) == 1 else torch.split(output, [works[index].n for index in ran])
                    part = [replace(works[index], rows=own) for index, own in zip(ran, rows, strict=True)]
                going = ran
            return TurnResult(
                [outcome for outcome in outcomes if outcome is not None], output, lent_us=self._hopped_ns // 1000
            )

    async def _hop(self, run: LentRun, works: Sequence[Work]) -> TurnResult:
        started = time.perf_counter_ns()
        try:
            return await run.turn(works)
        except ZrtError as error:
            self._judge(error)
            raise
        finally:
            self._hopped_ns += time.perf_counter_ns() - started

    def _judge(self, error: ZrtError) -> None:
        """What a worker may say goes to the session alone; else it has failed."""
        if error.kind == "worker_failed":
            self._fail(error)


def cut(assignment: Assignment, lends: Sequence[Lend]) -> list[OwnRun | Lend]:
    """The runs of a stage in order. At least one is our own, if only without blocks: whatever comes
    in is checked there."""
    first, last, end = assignment.first, assignment.last, assignment.num_blocks - 1
    ordered = sorted(lends, key=lambda lend: lend.first)
    runs: list[OwnRun | Lend] = []
    at = first
    for lend in ordered:
        if at < lend.first:
            runs.append(OwnRun(at, lend.first - 1, embedding=at == 0))
        runs.append(lend)
        at = lend.last + 1
    if at <= last:
        runs.append(OwnRun(at, last, embedding=at == 0, head=last == end))
    elif last == end:
        runs.append(OwnRun(end + 1, end, head=True))
    if isinstance(runs[0], Lend) and (first == 0 or all(isinstance(run, Lend) for run in runs)):
        runs.insert(0, OwnRun(first, first - 1, embedding=first == 0))
    return runs


def _table(engines: Sequence[Engine], device: str) -> Linear | None:
    """An embedding or head that is held on a device."""
    shards = [engine.shard for engine in engines if engine.shard.device == torch.device(device)]
    return next((table for shard in shards for table in (shard.embedding, shard.head) if table is not None), None)


def _read(
    model: LentModel,
    run: OwnRun,
    device: str,
    table: Linear | None,
    progress: Progress,
    cancelled: Callable[[], bool],
) -> Engine:
    given = model.assignment
    options = replace(options_of(given, device), ends=(run.embedding, run.head))
    if run.last < run.first:
        pages = kv_pages(model.spec, given.last - given.first + 1, given.dtype, given.kv_bytes, 1)
        return engine_of_ends(model.spec, model.source, run.first, options, pages=pages, table=table)
    return read_engine(
        model.spec,
        model.source,
        (run.first, run.last),
        replace(options, kv_bytes=model.kv_bytes(run.last - run.first + 1)),
        table=table,
        watch=LoadWatch(progress=progress, cancelled=cancelled),
    )
