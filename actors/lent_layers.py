"""A block server as master: a stage whose runs of blocks are computed in turn, some in its own lane, some by layer workers.

Each run that is lent is one Batch with the hidden states of the turn, and one hop. A step that a run cannot take is left out of the runs behind
it; the runs before it go back when the step comes again (the step rule). A worker that is gone, or says what it should not, ends the whole: its
KV is lost, so the stage is loaded again, and the sessions are replayed.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Final, TypeVar

import torch

from zrt.runtime.actor import Actor
from zrt.runtime.compute.engine import Engine, Outcome, TurnResult, Work
from zrt.runtime.compute.held_layers import Blocks, runs_of
from zrt.runtime.compute.inventory import Inventory
from zrt.runtime.compute.layout import shard_bytes
from zrt.runtime.compute.spec import ModelSpec, read_spec
from zrt.runtime.compute.weights import RandomCheckpoint, Source, open_checkpoint
from zrt.runtime.errors import KINDS, ZrtError
from zrt.runtime.lane import Lane
from zrt.runtime.layer_files import MANIFEST, PIECE_BYTES, LayerFile, Offer
from zrt.runtime.messages.control import Address, Assignment
from zrt.runtime.messages.header import Step
from zrt.runtime.messages.layers import (
    RAW_DTYPES,
    Batch,
    CloseLayers,
    Hello,
    LayerAssignment,
    LayerAssignmentAck,
    LayerMessage,
    LayersClosed,
    LayersOpened,
    LayersPrepared,
    LayerTraffic,
    ModelDataChunk,
    ModelDataDone,
    ModelDataTaken,
    OpenLayers,
    PrepareLayers,
    StepFaults,
    Tensor,
    WorkerError,
    WorkerInfo,
    WorkerReady,
    layer_name,
)
from zrt.runtime.tensors import DTYPES, RAW, from_raw, to_raw

log = logging.getLogger(__name__)

HELLO_S: Final = 5.0
CHUNK_S: Final = 60.0
LOAD_S: Final = 1800.0
STEP_S: Final = 120.0
UNACKNOWLEDGED: Final = 4
"""Chunks that are on their way to one worker."""

Progress = Callable[[int, int], None]
_Answer = TypeVar("_Answer", bound=LayerMessage)


class Ends(Engine):
    """What a stage of several engines is to those that ask for sizes: it takes what its first run takes, and gives what its last one gives."""

    def __init__(self, first: Engine, last: Engine) -> None:
        self.shard = replace(first.shard, last=last.shard.last, final_norm=last.shard.final_norm, head=last.shard.head)
        self.cache = first.cache


@dataclass(frozen=True, slots=True)
class Lent:
    """A run that a worker holds."""

    worker: Address
    blocks: Blocks


class LentLayers:
    """The backend; made by `load`. `lost(error)` is called once, when it breaks of itself: then another is needed."""

    def __init__(self, actor: Actor, lane: Lane, lost: Callable[[ZrtError], None]) -> None:
        self.engine: Engine
        self.broken: ZrtError | None = None
        self._actor = actor
        self._lane = lane
        self._lost = lost
        self._runs: list[Engine | Lent] = []
        self._workers: dict[str, Address] = {}
        self._turns = asyncio.Lock()
        self._numbers: dict[Hashable, int] = {}
        self._number = 0

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
        self._workers = dict(workers)
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
                self._runs.append(Lent(self._workers[name], run))
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
        if address in self._workers.values():
            self._fail(ZrtError("worker_failed", f"the layer worker {address.name} is gone", address.name))

    def workers_are(self, workers: Mapping[str, Address]) -> None:
        """Those the coordinator knows now."""
        for name, address in self._workers.items():
            if workers.get(name) != address:
                self.worker_lost(address)

    def end(self) -> None:
        """No more turns; nobody is told."""
        if self.broken is None:
            self.broken = ZrtError("cancelled", "these layers are not lent any more", self._actor.name)
        for address in self._workers.values():
            self._actor.forget(address)

    def _fail(self, error: ZrtError) -> None:
        if self.broken is not None:
            return
        self.broken = error
        log.warning("%s: %s", self._actor.name, error)
        for address in self._workers.values():
            self._actor.forget(address)  # whoever waits for an answer need not wait until the deadline
        self._lost(error)

    # ---- set-up -----------------------------------------------------------------------------------------------------

    async def _set_up(
        self,
        worker: Address,
        layers: list[int],
        folder: Path,
        spec: ModelSpec,
        source: Source,
        assignment: Assignment,
        report: Callable[[str, int, int], None],
    ) -> None:
        started = time.perf_counter()
        info = await self._ask(worker, Hello(), WorkerInfo, HELLO_S)
        info.latency = int((time.perf_counter() - started) * 1000)
        if info.version != version("zrt"):
            text = f"{worker.name} runs zrt {info.version}, this process {version('zrt')}"
            raise ZrtError("worker_failed", text, worker.name)
        config = (folder / "config.json").read_text()
        kv_bytes = sum(_share(assignment, run) for run in runs_of(layers))
        prepare = PrepareLayers(
            config, assignment.dtype, kv_bytes, assignment.context, assignment.sessions, assignment.weights == "random"
        )
        await self._ask(worker, prepare, LayersPrepared, CHUNK_S)
        offer = None
        if isinstance(source, Inventory):
            files = [LayerFile.of(source, spec, layer) for layer in layers]
            offer = await asyncio.to_thread(Offer, files, config)
        names = [layer_name(layer) for layer in layers]
        model_hash = offer.model_hash if offer is not None else ""
        ack = await self._ask(worker, LayerAssignment(names, model_hash), LayerAssignmentAck, CHUNK_S)
        if ack.needs_data and offer is not None:
            await self._push(worker, offer, report)
        await self._ask(worker, ModelDataDone(), WorkerReady, LOAD_S)
        info = await self._ask(worker, Hello(), WorkerInfo, HELLO_S)
        wanted = RAW_DTYPES[RAW.index(DTYPES[assignment.dtype])]
        if info.dtype != wanted:
            raise ZrtError("worker_failed", f"{worker.name} computes in {info.dtype}, not {wanted}", worker.name)

    async def _push(self, worker: Address, offer: Offer, report: Callable[[str, int, int], None]) -> None:
        """Send what the worker does not hold yet, a few chunks ahead of its answers."""
        size = len(offer.manifest)
        manifest = ModelDataChunk(MANIFEST, 0, size, memoryview(offer.manifest))
        await self._ask(worker, manifest, ModelDataTaken, CHUNK_S)
        total, done = sum(file.size for file in offer.files), 0
        window = asyncio.Semaphore(UNACKNOWLEDGED)

        async def send(chunk: ModelDataChunk) -> None:
            nonlocal done
            try:
                await self._ask(worker, chunk, ModelDataTaken, CHUNK_S)
            finally:
                window.release()
            done += len(chunk.data)
            report(worker.name, done, total)

        sends: list[asyncio.Task[None]] = []
        try:
            held_bytes = []
            for file in offer.files:
                probe = ModelDataChunk(file.name, 0, file.size, memoryview(b""))
                held_bytes.append((await self._ask(worker, probe, ModelDataTaken, CHUNK_S)).held)
            done = sum(held_bytes)
            for file, held in zip(offer.files, held_bytes, strict=True):
                for offset in range(held, file.size, PIECE_BYTES):
                    await window.acquire()
                    data = await asyncio.to_thread(file.read, offset, PIECE_BYTES)
                    chunk = ModelDataChunk(file.name, offset, file.size, memoryview(data))
                    sends.append(asyncio.ensure_future(send(chunk)))
            await asyncio.gather(*sends)
        finally:
            for task in sends:
                task.cancel()
            await asyncio.gather(*sends, return_exceptions=True)

    # ---- work -------------------------------------------------------------------------------------------------------

    async def open(self, key: Hashable, length: int, names: Sequence[int], prompt: int) -> int:
        """As Engine.open: what all runs hold."""
        async with self._turns:
            self._check()
            have = []
            for run in self._runs:
                if isinstance(run, Engine):
                    have.append(await self._lane.run(run.open, key, length, names, prompt))
            message = OpenLayers(self._numbered(key), length, prompt, list(names))
            asked = (self._ask(worker, message, LayersOpened, STEP_S) for worker in self._workers.values())
            have += [answer.have for answer in await asyncio.gather(*asked)]
            return min(have)

    async def close(self, key: Hashable, names: Sequence[int] | None) -> None:
        """As Engine.close."""
        async with self._turns:
            number = self._numbers.pop(key, None)
            for run in self._runs:
                if isinstance(run, Engine):
                    await self._lane.run(run.close, key, names)
            if number is None or self.broken is not None:
                return
            message = CloseLayers(number, None if names is None else list(names))
            asked = (self._ask(worker, message, LayersClosed, STEP_S) for worker in self._workers.values())
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
                    result = await self._batch(run, part)
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

    async def _batch(self, run: Lent, works: list[Work]) -> TurnResult:
        """One hop; two where a step cannot run, which the worker finds before it runs any."""
        outcomes: dict[int, Outcome] = {}
        left = list(range(len(works)))
        for _ in range(len(works) + 1):
            if not left:
                return TurnResult([outcomes[index] for index in range(len(works))], None)
            answer = await self._send(run, [works[index] for index in left])
            if isinstance(answer, Tensor):
                row = 0
                for index in left:
                    outcomes[index] = Outcome(works[index].seq_pos + works[index].n, first=row)
                    row += works[index].n
                output = from_raw(answer)[0]
                return TurnResult([outcomes[index] for index in range(len(works))], output)
            still = []
            for index, have, kind in zip(left, answer.have, answer.faults, strict=True):
                if kind:
                    outcomes[index] = Outcome(
                        have, ZrtError.of(kind, f"blocks {run.blocks[0]}-{run.blocks[1]}", run.worker.name)
                    )
                else:
                    still.append(index)
            left = still
        raise self._failure(run.worker, "it finds more faults than there are steps")

    async def _send(self, run: Lent, works: Sequence[Work]) -> Tensor | StepFaults:
        for work in works:
            if work.opens and work.seq_pos == 0:  # a session that nobody opened
                message = OpenLayers(self._numbered(work.key), work.opens)
                await self._ask(run.worker, message, LayersOpened, STEP_S)
        steps = [Step(self._numbered(work.key), 0, work.seq_pos, work.n) for work in works]
        rows = torch.cat([work.rows for work in works])
        position = works[0].seq_pos
        layers = range(run.blocks[0], run.blocks[1] + 1)
        batch = Batch(to_raw(rows.unsqueeze(0)), [(layer_name(layer), position, layer) for layer in layers])
        try:
            envelope = await self._actor.ask(run.worker, batch, timeout=STEP_S, steps=steps)
        except ZrtError as error:
            raise self._failure(run.worker, error.message) from None
        answer = envelope.body
        if isinstance(answer, Tensor) and list(answer.shape) == [1, *rows.shape] and answer.dtype == batch.x.dtype:
            return answer
        if (
            isinstance(answer, StepFaults)
            and any(answer.faults)
            and len(answer.faults) == len(answer.have) == len(works)
        ):
            return answer
        said = answer.message if isinstance(answer, WorkerError) else type(answer).__name__
        raise self._failure(run.worker, f"it answered {said}")

    def _failure(self, worker: Address, why: str) -> ZrtError:
        error = ZrtError("worker_failed", f"{worker.name}: {why}", worker.name)
        self._fail(error)
        return error

    def _check(self) -> None:
        if self.broken is not None:
            raise self.broken

    def _numbered(self, key: Hashable) -> int:
        """What the workers call a session."""
        if key not in self._numbers:
            self._number += 1
            self._numbers[key] = self._number
        return self._numbers[key]

    async def _ask(self, worker: Address, message: LayerTraffic, answer: type[_Answer], timeout: float) -> _Answer:
        """ZrtError: the worker's own; worker_failed: another answer than this, or none."""
        try:
            body = (await self._actor.ask(worker, message, timeout=timeout)).body
        except ZrtError as error:
            raise ZrtError("worker_failed", f"{worker.name}: {error.message}", worker.name) from None
        if isinstance(body, WorkerError):
            kind, _, text = body.message.partition(": ")
            raise ZrtError.of(kind if kind in KINDS else "worker_failed", text or body.message, worker.name)
        if not isinstance(body, answer):
            raise ZrtError("worker_failed", f"{worker.name} answered {type(body).__name__}", worker.name)
        return body


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
