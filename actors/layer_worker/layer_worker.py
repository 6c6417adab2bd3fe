"""A layer worker: holds single layers of a model for a block server, its master, which may be on
another machine.

Receives from its master, and bare from any peer: the messages of messages/layers.py; sends one
answer to each, in order of arrival. Sends to the coordinator: Register, Beat. The event loop
answers Hello, so that a worker shows signs of life while it computes; everything else runs in the
executor.

KV is kept per session where a header names one, otherwise per peer, until Goodbye or for IDLE_S
without an operation.
"""

import logging
import os
import platform
import socket
import time
from collections.abc import Hashable
from functools import partial
from pathlib import Path
from typing import Final, get_args

import torch

from zrt.actors.layer_worker.assigned_layers import AssignedLayers, layer_of
from zrt.actors.options import LayerWorkerOptions
from zrt.runtime.actor.envelope import Bare, Envelope, Reply
from zrt.runtime.actor.executor import ComputeExecutor
from zrt.runtime.actor.member import Member
from zrt.runtime.compute.devices import device_lives
from zrt.runtime.compute.tensors import RAW, Rows, as_dtype, to_bytes
from zrt.runtime.compute.threads import configure_threads
from zrt.runtime.compute.turn import Work
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.header import HopTime, Step
from zrt.runtime.messages.layers import (
    RAW_DTYPES,
    Batch,
    CloseLayers,
    Goodbye,
    Hello,
    LayerAssignment,
    LayersClosed,
    LayersOpened,
    LayerTraffic,
    ModelDataChunk,
    ModelDataDone,
    OpenLayers,
    PrepareLayers,
    RawTensor,
    SingleOp,
    StepFaults,
    Tensor,
    WorkerError,
    WorkerInfo,
    layer_name,
)
from zrt.runtime.messages.members import ActorState, Register
from zrt.runtime.paths import home
from zrt.runtime.version import release
from zrt.runtime.wire.layers import decode_layers, encode_layers

log = logging.getLogger(__name__)

IDLE_S: Final = 600.0
COLLECT_S: Final = 30.0
_FLOATS: Final = frozenset({"BF16", "F16", "F32"})


class LayerWorker(Member):
    """The actor. Pushed layers are kept in `cache`; `device` is a torch device, `threads` how many
    threads its GEMMs may use, `memory_bytes` the most the process may take in all, 0 for what there
    is."""

    def __init__(
        self,
        name: str,
        *,
        join: str,
        cache: Path,
        device: str,
        threads: int,
        listen: str,
        advertise: str | None = None,
        cluster: str = "",
        memory_bytes: int = 0,
    ) -> None:
        super().__init__(name, "layer_worker", join=join, listen=listen, advertise=advertise, cluster=cluster)
        self.memory_bytes = memory_bytes
        self._given = cluster
        self._device = torch.device(device)
        self._threads = threads
        self._executor = ComputeExecutor(f"{name}-{device}", partial(device_lives, self._device))
        self._assigned = AssignedLayers(cache, device, memory_bytes, self._moved)
        self._serves = ""
        self._rows = Rows()
        self._unnamed: dict[Hashable, float] = {}  # sessions of peers that name none, by when they last ran
        for kind in get_args(LayerTraffic):
            self.handle(kind, self._on_message)
        self.handle_bare(self._on_bare)
        self.on_coordinator_lost(self._free)

    async def start(self) -> None:
        configure_threads(self._threads)
        self.state = "blank"
        await super().start()
        self.every(COLLECT_S, self._collect_idle)

    async def stop(self) -> None:
        self.state = "stopped"
        await super().stop()
        self._executor.close()
        self._assigned.close()

    def _moved(self, state: ActorState) -> None:
        if self.state != "stopped":
            self.state = state

    def _free(self) -> None:
        """Let the worker join the next cluster at its endpoint, unless the process was started for
        one cluster alone."""
        self.cluster = self._given

    def registration(self) -> Register:
        message = super().registration()
        message.device = str(self._device)
        message.serves = self._serves
        return message

    async def _on_message(self, message: LayerTraffic, envelope: Envelope) -> LayerTraffic | Reply:
        steps = envelope.header.steps
        if isinstance(message, PrepareLayers):
            self._serves = envelope.header.sender
        if not steps or not isinstance(message, SingleOp | Batch):
            return await self._serve(message, steps, envelope.peer)
        clock = _HopClock()
        answer = await self._serve(message, steps, envelope.peer, clock)
        steps[0].times = [clock.hop()]
        return Reply(answer, steps[:1])

    def _on_bare(self, bare: Bare) -> None:
        self.spawn(self._answer_bare(bare), "a bare message")

    async def _answer_bare(self, bare: Bare) -> None:
        answer: LayerTraffic
        try:
            message = decode_layers(bare.frame)
        except ZrtError as error:
            answer = _error(error)
        else:
            answer = await self._serve(message, [], bare.peer)
        self.reply_bare(bare, encode_layers(answer))

    async def _serve(
        self, message: LayerTraffic, steps: list[Step], peer: bytes, clock: "_HopClock | None" = None
    ) -> LayerTraffic:
        """Return the answer to a message. Never raises: a failure is answered with a
        WorkerError."""
        if isinstance(message, Hello):
            return self._info()
        try:
            return await self._executor.run(self._work, message, steps, peer, clock or _HopClock())
        except ZrtError as error:
            return _error(error)
        except Exception as error:
            log.exception("%s: %s failed", self.name, type(message).__name__)
            return _error(ZrtError("internal", f"{type(message).__name__} failed: {type(error).__name__}: {error}"))

    # ---- the executor's --------------------------------------------------------------------------

    def _work(self, message: LayerTraffic, steps: list[Step], peer: bytes, clock: "_HopClock") -> LayerTraffic:
        match message:
            case SingleOp():
                entries = [(message.layer_name, message.index_pos, message.block_idx)]
                return self._run(message.x, entries, steps, peer, clock)
            case Batch():
                return self._run(message.x, message.batch, steps, peer, clock)
            case Goodbye():
                self._forget(peer)
                return self._info()
            case PrepareLayers():
                return self._assigned.prepare(message)
            case LayerAssignment():
                self._unnamed.clear()
                return self._assigned.assign(message)
            case ModelDataChunk():
                return self._assigned.take(message)
            case ModelDataDone():
                return self._assigned.load()
            case OpenLayers():
                held = self._assigned.loaded()
                return LayersOpened(held.open(message.session, message.length, message.page_keys, message.prompt))
            case CloseLayers():
                self._assigned.loaded().close(message.session, message.page_keys)
                return LayersClosed()
            case _:
                raise ZrtError("unknown_op", f"{type(message).__name__} is not for a worker")

    def _run(
        self, raw: RawTensor, entries: list[tuple[str, int, int]], steps: list[Step], peer: bytes, clock: "_HopClock"
    ) -> LayerTraffic:
        held = self._assigned.loaded()
        if not entries:
            raise ZrtError("bad_request", "batch: expected one or more entries")
        layers, position = [block for _, _, block in entries], entries[0][1]
        for name, index, block in entries:
            if name != layer_name(block):
                layer_of(name)
                raise ZrtError("bad_request", "block_idx: expected the number in each layer's name")
            if index != position:
                raise ZrtError("bad_request", "index_pos: expected the same one in each entry")
        shape = raw.shape
        if RAW_DTYPES[raw.dtype] not in _FLOATS or len(shape) != 3 or shape[0] != 1 or shape[2] != held.hidden:
            text = f"x: expected floats [1, n, {held.hidden}], got {RAW_DTYPES[raw.dtype]} {shape}"
            raise ZrtError("bad_request", text)
        if not shape[1]:
            raise ZrtError("bad_request", "x: expected at least one row")
        rows = as_dtype(self._rows.take(raw), held.dtype)
        chain = held.chain(layers)
        if steps:
            if steps[0].seq_pos != position:
                raise ZrtError("bad_request", "index_pos: expected that of the first step")
            parts = [rows] if len(steps) == 1 else torch.split(rows, [step.n for step in steps])
            works = [Work(step.session, step.seq_pos, step.n, part) for step, part in zip(steps, parts, strict=True)]
        else:
            works = [Work(("peer", peer), position, len(rows), rows, opens=0 if position else len(rows))]
            self._unnamed[peer] = time.monotonic()
        clock.started = time.perf_counter_ns()
        ran = held.run(chain, works)
        clock.ended = time.perf_counter_ns()
        if ran.output is None:
            if not steps:
                raise next(fault for fault in ran.faults if fault is not None)
            return StepFaults(ran.have, [fault.kind if fault is not None else "" for fault in ran.faults])
        return Tensor(to_bytes(as_dtype(ran.output, RAW[raw.dtype])), raw.dtype, shape)

    def _forget(self, peer: Hashable) -> None:
        self._unnamed.pop(peer, None)
        if self._assigned.held is not None:
            self._assigned.held.close(("peer", peer))

    def _collect_idle(self) -> None:
        self.spawn(self._executor.run(self._collect), "collect")

    def _collect(self) -> None:
        """End the unnamed sessions of peers that ran nothing for IDLE_S."""
        limit = time.monotonic() - IDLE_S
        for peer in [peer for peer, last in self._unnamed.items() if last < limit]:
            self._forget(peer)

    def _info(self) -> WorkerInfo:
        held = self._assigned.held
        return WorkerInfo(
            release(),
            RAW_DTYPES[RAW.index(held.dtype)] if held is not None else "",
            platform.system().lower(),
            platform.machine(),
            self._device.type,
            self._device.index or 0,
            0,
        )


class _HopClock:
    """The times at which an operation arrived, and at which its layers began and ended, in
    nanoseconds."""

    __slots__ = ("came", "ended", "started")

    def __init__(self) -> None:
        self.came = self.started = self.ended = time.perf_counter_ns()

    def hop(self) -> HopTime:
        return HopTime((self.started - self.came) // 1000, (self.ended - self.started) // 1000)


def _error(error: ZrtError) -> WorkerError:
    return WorkerError(f"{error.kind}: {error.message}")


def make(options: LayerWorkerOptions) -> LayerWorker:
    """Return a layer worker, which waits for a master. Whatever of a model is sent to the worker is
    kept in the cache."""
    return LayerWorker(
        options.name or f"worker-{socket.gethostname()}-{os.getpid()}",
        join=options.join,
        cache=home() / "layers",
        device=options.device,
        threads=options.num_threads,
        listen=options.listen,
        advertise=options.advertise,
        cluster=options.cluster_id,
        memory_bytes=options.memory,
    )
