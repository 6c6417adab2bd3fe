"""A block server as master: a stage whose runs of blocks are computed in turn, some in its own lane, some by layer workers.

Each run that is lent is one Batch with the hidden states of the turn, and one hop. A step that a run cannot take is left out of the runs behind
it; the runs before it go back when the step comes again (the step rule). A worker that is gone, or says what it should not, ends the whole: its
KV is lost, so the stage is loaded again, and the sessions are replayed.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch

from zrt.actors.layer_push import push
from zrt.actors.lent_run import LentRun, Numbers
from zrt.actors.lent_worker import CHUNK_S, HELLO_S, LOAD_S, STEP_S, LentWorker
from zrt.runtime.actor import Actor
from zrt.runtime.compute.engine import Engine, Outcome, TurnResult, Work
from zrt.runtime.compute.held_layers import Blocks, runs_of
from zrt.runtime.compute.inventory import Inventory
from zrt.runtime.compute.layout import shard_bytes
from zrt.runtime.compute.spec import ModelSpec, read_spec
from zrt.runtime.compute.weights import RandomCheckpoint, Source, open_checkpoint
from zrt.runtime.errors import ZrtError
from zrt.runtime.lane import Lane
from zrt.runtime.layer_files import LayerFile, Offer
from zrt.runtime.messages.control import Address, Assignment
from zrt.runtime.messages.layers import (
    RAW_DTYPES,
    CloseLayers,
    Hello,
    LayerAssignment,
    LayerAssignmentAck,
    LayersClosed,
    LayersOpened,
    LayersPrepared,
    ModelDataDone,
    OpenLayers,
    PrepareLayers,
    WorkerInfo,
    WorkerReady,
    layer_name,
)
from zrt.runtime.tensors import DTYPES, RAW

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]


class Ends(Engine):
    """What a stage of several engines is to those that ask for sizes: it takes what its first run takes, and gives what its last one gives."""

    def __init__(self, first: Engine, last: Engine) -> None:
        self.shard = replace(first.shard, last=last.shard.last, final_norm=last.shard.final_norm, head=last.shard.head)
        self.cache = first.cache


class LentLayers:
    """The backend; made by `load`. `lost(error)` is called once, when it breaks of itself: then another is needed."""

    def __init__(self, actor: Actor, lane: Lane, lost: Callable[[ZrtError], None]) -> None:
        self.engine: Engine
        self.broken: ZrtError | None = None
        self._actor = actor
        self._lane = lane
        self._lost = lost
        self._runs: list[Engine | LentRun] = []
        self._workers: dict[str, LentWorker] = {}
        self._turns = asyncio.Lock()
        self._numbers = Numbers()

    # ---- life -------------------------------------------------------------------------------------------------------

    async def load(
        self,
        folder: Path,
        assignment: Assignment,
        workers: Mapping[str, Address],
        device: str,
        progress: Progress,
        cancelled: Callable[[], bool],
    ) -> None:
        """Give each worker its layers and load our own. ZrtError: as Engine.load; `worker_failed`."""
        self._workers = {name: LentWorker(self._actor, address) for name, address in workers.items()}
        spec = await self._lane.run(read_spec, folder)
        source: Source = RandomCheckpoint(spec)
        if assignment.weights == "files":
            source, spec = (await self._lane.run(open_checkpoint, folder)).matched(spec)
        runs = list(_cut(assignment))
        own_bytes = sum(shard_bytes(spec, *run, assignment.dtype) for name, run in runs if not name)
        parts = {"": (0, own_bytes)}

        def report(part: str, done: int, total: int) -> None:
            parts[part] = (done, total)
            progress(sum(done for done, _ in parts.values()), sum(total for _, total in parts.values()))

        lent: dict[str, list[int]] = {name: [] for name, _ in runs if name}
        for name, run in runs:
            if name:
                lent[name] += range(run[0], run[1] + 1)
        await asyncio.gather(
            *(
                self._set_up(self._workers[name], layers, folder, spec, source, assignment, report)
                for name, layers in lent.items()
            )
        )
        loaded = 0
        for name, run in runs:
            if name:
                self._runs.append(LentRun(self._workers[name], run, self._numbers))
                continue
            before = loaded

            def tick(done: int, _: int, before: int = before) -> None:
                report("", before + done, own_bytes)

            def read(run: Blocks = run, tick: Progress = tick) -> Engine:
                return Engine.read(
                    spec,
                    source,
                    run,
                    dtype=DTYPES[assignment.dtype],
                    kv_bytes=_share(assignment, run),
                    context=assignment.context,
                    sessions=assignment.sessions,
                    device=device,
                    progress=tick,
                    cancelled=cancelled,
                )

            self._runs.append(await self._lane.run(read))
            loaded += shard_bytes(spec, *run, assignment.dtype)
        own = [run for run in self._runs if isinstance(run, Engine)]
        self.engine = Ends(own[0], own[-1])

    def worker_lost(self, address: Address) -> None:
        """A process is gone."""
        if any(worker.address == address for worker in self._workers.values()):
            self._fail(ZrtError("worker_failed", f"the layer worker {address.name} is gone", address.name))

    def workers_are(self, workers: Mapping[str, Address]) -> None:
        """Those the coordinator knows now."""
        for name, worker in self._workers.items():
            if workers.get(name) != worker.address:
                self.worker_lost(worker.address)

    def end(self) -> None:
        """No more turns; nobody is told."""
        if self.broken is None:
            self.broken = ZrtError("cancelled", "these layers are not lent any more", self._actor.name)
        for worker in self._workers.values():
            self._actor.forget(worker.address)

    def _fail(self, error: ZrtError) -> None:
        if self.broken is not None:
            return
        self.broken = error
        log.warning("%s: %s", self._actor.name, error)
        for worker in self._workers.values():
            self._actor.forget(worker.address)  # whoever waits for an answer need not wait until the deadline
        self._lost(error)

    # ---- set-up -----------------------------------------------------------------------------------------------------

    async def _set_up(
        self,
        worker: LentWorker,
        layers: list[int],
        folder: Path,
        spec: ModelSpec,
        source: Source,
        assignment: Assignment,
        report: Callable[[str, int, int], None],
    ) -> None:
        started = time.perf_counter()
        info = await worker.ask(Hello(), WorkerInfo, HELLO_S)
        info.latency = int((time.perf_counter() - started) * 1000)
        if info.version != version("zrt"):
            text = f"{worker.name} runs zrt {info.version}, this process {version('zrt')}"
            raise ZrtError("worker_failed", text, worker.name)
        config = (folder / "config.json").read_text()
        kv_bytes = sum(_share(assignment, run) for run in runs_of(layers))
        prepare = PrepareLayers(
            config, assignment.dtype, kv_bytes, assignment.context, assignment.sessions, assignment.weights == "random"
        )
        await worker.ask(prepare, LayersPrepared, CHUNK_S)
        offer = None
        if isinstance(source, Inventory):
            files = [LayerFile.of(source, spec, layer) for layer in layers]
            offer = await asyncio.to_thread(Offer, files, config)
        names = [layer_name(layer) for layer in layers]
        model_hash = offer.model_hash if offer is not None else ""
        ack = await worker.ask(LayerAssignment(names, model_hash), LayerAssignmentAck, CHUNK_S)
        if ack.needs_data and offer is not None:
            await push(worker, offer, partial(report, worker.name))
        await worker.ask(ModelDataDone(), WorkerReady, LOAD_S)
        info = await worker.ask(Hello(), WorkerInfo, HELLO_S)
        wanted = RAW_DTYPES[RAW.index(DTYPES[assignment.dtype])]
        if info.dtype != wanted:
            raise ZrtError("worker_failed", f"{worker.name} computes in {info.dtype}, not {wanted}", worker.name)

    # ---- work -------------------------------------------------------------------------------------------------------

    async def open(self, key: Hashable, length: int, names: Sequence[int], prompt: int) -> int:
        """As Engine.open: what all runs hold."""
        async with self._turns:
            self._check()
            have = []
            for run in self._runs:
                if isinstance(run, Engine):
                    have.append(await self._lane.run(run.open, key, length, names, prompt))
            message = OpenLayers(self._numbers.of(key), length, prompt, list(names))
            asked = (worker.ask(message, LayersOpened, STEP_S) for worker in self._workers.values())
            have += [answer.have for answer in await asyncio.gather(*asked)]
            return min(have)

    async def close(self, key: Hashable, names: Sequence[int] | None) -> None:
        """As Engine.close."""
        async with self._turns:
            number = self._numbers.pop(key)
            for run in self._runs:
                if isinstance(run, Engine):
                    await self._lane.run(run.close, key, names)
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
            self._check()
            outcomes: list[Outcome | None] = [None] * len(works)
            going = list(range(len(works)))
            part = list(works)
            output = None
            for run in self._runs:
                if run is not self._runs[-1]:  # what is picked is picked at the end
                    part = [replace(work, sampler=None, logits=False) for work in part]
                if isinstance(run, Engine):
                    result = await self._lane.run(run.turn, part, threads)
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
                    rows = torch.split(output, [works[index].n for index in ran])
                    part = [replace(works[index], rows=own) for index, own in zip(ran, rows, strict=True)]
                going = ran
            return TurnResult([outcome for outcome in outcomes if outcome is not None], output)

    async def _hop(self, run: LentRun, works: Sequence[Work]) -> TurnResult:
        try:
            return await run.turn(works)
        except ZrtError as error:
            self._fail(error)
            raise

    def _check(self) -> None:
        if self.broken is not None:
            raise self.broken


def _cut(assignment: Assignment) -> Iterator[tuple[str, Blocks]]:
    """The runs of a stage in order, each with the worker that holds it, empty for our own."""
    at = assignment.first
    for lend in sorted(assignment.lend, key=lambda lend: lend.first):
        if at < lend.first:
            yield "", (at, lend.first - 1)
        yield lend.worker, (lend.first, lend.last)
        at = lend.last + 1
    if at <= assignment.last:
        yield "", (at, assignment.last)


def _share(assignment: Assignment, run: Blocks) -> int:
    """A run's part of the stage's KV memory."""
    return assignment.kv_bytes * (run[1] - run[0] + 1) // (assignment.last - assignment.first + 1)
