"""The set-up of a worker's layers: what model they are of, which, the bytes it lacks, and its word
that they are loaded."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from zrt.actors.block_server.layer_lending.lending_plan import BlockBytes
from zrt.actors.block_server.layer_lending.lent_worker import CHUNK_S, HELLO_S, LOAD_S, LentWorker
from zrt.actors.block_server.layer_lending.offer import CHUNK_BYTES, LayerFile, Offer
from zrt.runtime.cluster.layer_sharing import ranges
from zrt.runtime.cluster.memory import turn_bytes
from zrt.runtime.compute.tensors import DTYPES, RAW
from zrt.runtime.compute.weight_sources import RandomCheckpoint, Source, open_checkpoint
from zrt.runtime.messages.layers import (
    RAW_DTYPES,
    Hello,
    LayerAssignment,
    LayerAssignmentAck,
    LayersPrepared,
    ModelDataChunk,
    ModelDataDone,
    ModelDataTaken,
    PrepareLayers,
    WorkerInfo,
    WorkerReady,
    layer_name,
)
from zrt.runtime.messages.members import Assignment
from zrt.runtime.models.architecture.config_json import config_text
from zrt.runtime.models.architecture.spec import ModelSpec, read_spec
from zrt.runtime.models.checkpoint.formats.registry import format_of
from zrt.runtime.models.checkpoint.index import CheckpointIndex
from zrt.runtime.models.checkpoint.layer_manifest import MANIFEST
from zrt.runtime.models.checkpoint.layout import block_bytes


@dataclass(frozen=True, slots=True)
class LentModel:
    """The model of an assignment, as the master of its workers reads it."""

    assignment: Assignment
    config_json: str
    spec: ModelSpec
    source: Source

    @classmethod
    def open(cls, folder: Path, assignment: Assignment) -> "LentModel":
        """Read the model's config, and its weights' headers: not for an event loop. ZrtError
        bad_model, unsupported."""
        spec = read_spec(folder)
        source: Source = RandomCheckpoint(spec)
        if assignment.weights == "files":
            source, spec = open_checkpoint(folder).matched(spec)
        return cls(assignment, config_text(folder), spec, source)

    def kv_bytes(self, blocks: int) -> int:
        """Return the share of so many blocks in the stage's KV memory."""
        return self.assignment.kv_bytes * blocks // (self.assignment.last - self.assignment.first + 1)

    @property
    def block_bytes(self) -> BlockBytes:
        """The bytes that blocks take of their holder's memory."""
        given = self.assignment
        block = block_bytes(self.spec, format_of(given.dtype)) + self.kv_bytes(1)
        return BlockBytes(block, turn_bytes(self.spec, given.dtype, given.chunk, given.sessions))

    def prepare(self, blocks: int) -> PrepareLayers:
        """Return the message that tells a worker of which model so many of its layers are."""
        given = self.assignment
        return PrepareLayers(
            self.config_json,
            given.dtype,
            self.kv_bytes(blocks),
            given.context,
            given.sessions,
            given.weights == "random",
        )

    def offer(self, layers: Sequence[int]) -> Offer | None:
        """Return these layers' files; None where weights are drawn. Reads them all, for their
        hashes."""
        if not isinstance(self.source, CheckpointIndex):
            return None
        files = [LayerFile.of(self.source, self.spec, layer) for layer in layers]
        return Offer(files, self.config_json)


async def set_up(worker: LentWorker, model: LentModel, layers: Sequence[int], changed: Callable[[], None]) -> None:
    """Give a worker `layers`, until it has loaded them; `changed` is called as its `load` changes.
    ZrtError: the worker's, worker_failed."""
    load = worker.load
    load.state, load.layers = "asked", ranges(layers)
    load.push_bytes = load.push_bytes_s = 0
    offer = await asyncio.to_thread(model.offer, layers)
    await worker.ask(model.prepare(len(layers)), LayersPrepared, CHUNK_S)
    names = [layer_name(layer) for layer in layers]
    assignment = LayerAssignment(names, offer.model_hash if offer is not None else "")
    ack = await worker.ask(assignment, LayerAssignmentAck, CHUNK_S)
    load.total_bytes = sum(file.size for file in offer.files) if offer is not None else 0
    if ack.needs_data and offer is not None:
        load.state = "pushing"
        started, before = time.monotonic(), load.pushed_bytes

        def pushed(held: int, sent: int) -> None:
            load.held_bytes = held
            load.pushed_bytes = before + sent
            load.push_bytes = sent
            load.push_bytes_s = int(sent / max(1e-6, time.monotonic() - started))
            changed()

        await push(worker, offer, pushed)
    load.held_bytes, load.state = load.total_bytes, "loading"
    changed()
    await worker.ask(ModelDataDone(), WorkerReady, LOAD_S)
    info = await worker.ask(Hello(), WorkerInfo, HELLO_S)
    wanted = RAW_DTYPES[RAW.index(DTYPES[model.assignment.dtype])]
    if info.dtype != wanted:
        raise worker.failure(f"it computes in {info.dtype}, not {wanted}")
    load.state = "ready"
    changed()


UNACKNOWLEDGED: Final = 4
"""Chunks that are on their way to one worker."""


async def push(worker: LentWorker, offer: Offer, report: Callable[[int, int], None]) -> None:
    """Send what the worker does not hold yet; call `report(bytes held, bytes sent)` at first and
    with every chunk. ZrtError: the worker's, worker_failed.

    What is on its way lies in UNACKNOWLEDGED buffers, each read into again once the worker has
    answered what it held.
    """
    size = len(offer.manifest)
    await worker.ask(ModelDataChunk(MANIFEST, 0, size, memoryview(offer.manifest)), ModelDataTaken, CHUNK_S)
    held_before, sent = 0, 0
    buffer_bytes = min(CHUNK_BYTES, max(file.size for file in offer.files))
    free: asyncio.Queue[memoryview] = asyncio.Queue()
    for _ in range(UNACKNOWLEDGED):
        free.put_nowait(memoryview(bytearray(buffer_bytes)))

    async def send(chunk: ModelDataChunk, buffer: memoryview) -> None:
        nonlocal sent
        try:
            await worker.ask(chunk, ModelDataTaken, CHUNK_S)
        finally:
            free.put_nowait(buffer)
        sent += len(chunk.data)
        report(held_before + sent, sent)

    sends: list[asyncio.Task[None]] = []
    try:
        held_bytes = []
        for file in offer.files:
            probe = ModelDataChunk(file.name, 0, file.size, memoryview(b""))
            held_bytes.append((await worker.ask(probe, ModelDataTaken, CHUNK_S)).held)
        held_before = sum(held_bytes)
        report(held_before, 0)
        for file, held in zip(offer.files, held_bytes, strict=True):
            for offset, size in file.chunks(held):
                buffer = await free.get()
                _raise_first(sends)
                data = buffer[:size]
                await asyncio.to_thread(file.read, offset, data)
                sends.append(asyncio.ensure_future(send(ModelDataChunk(file.name, offset, file.size, data), buffer)))
        await asyncio.gather(*sends)
    finally:
        for task in sends:
            task.cancel()
        await asyncio.gather(*sends, return_exceptions=True)


def _raise_first(sends: list[asyncio.Task[None]]) -> None:
    """Forget the sends that are over; raise the error of the first that failed: the others may have
    failed because of it."""
    for task in [task for task in sends if task.done()]:
        sends.remove(task)
        task.result()
