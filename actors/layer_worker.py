"""A layer worker: holds single layers of a model for a block server, its master, which may be on another machine.

Receives from its master, and bare from any peer: the messages of messages/layers.py; sends one answer to each, in the order they came.
Sends to the coordinator: Register, Beat. The loop answers Hello, so that a worker is heard while it computes; all else is the lane's.

KV is kept per session where a header names one, per peer otherwise: then until Goodbye, or IDLE_S without an operation.
"""

import logging
import platform
import socket
import time
from collections.abc import Hashable
from importlib.metadata import version
from pathlib import Path
from typing import Final, get_args

import torch
from msgspec.structs import replace

from zrt.runtime.actor import Bare, Envelope, Reply
from zrt.runtime.capacity import BLOCK_SERVER_BYTES
from zrt.runtime.compute.config_json import parse_config
from zrt.runtime.compute.device_memory import device_memory
from zrt.runtime.compute.engine import Work
from zrt.runtime.compute.held_layers import HeldLayers, runs_of
from zrt.runtime.compute.layer_time import layer_time
from zrt.runtime.compute.spec import spec_from_config
from zrt.runtime.compute.threads import configure_threads
from zrt.runtime.compute.weights import Checkpoint, RandomCheckpoint
from zrt.runtime.errors import ZrtError
from zrt.runtime.lane import Lane
from zrt.runtime.layer_files import LayerStore, digest
from zrt.runtime.member import Member
from zrt.runtime.messages.control import Register
from zrt.runtime.messages.header import HopTime, Step
from zrt.runtime.messages.layers import (
    MAX_CHUNK,
    RAW_DTYPES,
    Batch,
    CloseLayers,
    Goodbye,
    Hello,
    LayerAssignment,
    LayerAssignmentAck,
    LayersClosed,
    LayersOpened,
    LayersPrepared,
    LayerTraffic,
    ModelDataChunk,
    ModelDataDone,
    ModelDataTaken,
    OpenLayers,
    PrepareLayers,
    RawTensor,
    SingleOp,
    StepFaults,
    Tensor,
    WorkerError,
    WorkerInfo,
    WorkerReady,
    layer_index,
)
from zrt.runtime.tensors import DTYPES, RAW, as_dtype, rows_from_raw, rows_to_raw
from zrt.runtime.wire import decode_layers, encode_layers

log = logging.getLogger(__name__)

IDLE_S: Final = 600.0
COLLECT_S: Final = 30.0
_FLOATS: Final = frozenset({"BF16", "F16", "F32"})


class LayerWorker(Member):
    """`cache` is where pushed layers are kept; `device` a torch device, `threads` what its products may use, `memory_bytes` the most it may
    take in all, 0: what there is."""

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
        self._cache = cache
        self._given = cluster
        self._device = torch.device(device)
        self._threads = threads
        self._lane = Lane(f"{name}-{device}")
        self._prepared: PrepareLayers | None = None
        self._layers: list[int] = []
        self._store: LayerStore | None = None
        self._held: HeldLayers | None = None
        self._held_as: tuple[PrepareLayers, list[int], str] | None = None
        self._measured: dict[tuple[str, str], int] = {}  # layer times, by config and dtype
        self._serves = ""
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
        self._lane.close()

    def _free(self) -> None:
        """It may serve the next cluster at that endpoint, unless it was started for this one alone."""
        self.cluster = self._given

    def registration(self) -> Register:
        message = super().registration()
        message.device = str(self._device)
        message.serves = self._serves
        return message

    async def _on_message(self, envelope: Envelope) -> LayerTraffic | Reply:
        assert isinstance(envelope.body, get_args(LayerTraffic))
        message, steps = envelope.body, envelope.header.steps
        if isinstance(message, PrepareLayers):
            self._serves = envelope.header.sender
        if not steps or not isinstance(message, SingleOp | Batch):
            return await self._serve(message, steps, envelope.peer)
        clock = _Clock()
        answer = await self._serve(message, steps, envelope.peer, clock)
        return Reply(answer, [replace(steps[0], times=[clock.hop()])])

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
        self, message: LayerTraffic, steps: list[Step], peer: bytes, clock: "_Clock | None" = None
    ) -> LayerTraffic:
        """Never raises: what goes wrong is a WorkerError like any answer."""
        if isinstance(message, Hello):
            return self._info()
        try:
            return await self._lane.run(self._work, message, steps, peer, clock or _Clock())
        except ZrtError as error:
            return _error(error)
        except Exception as error:
            log.exception("%s: %s failed", self.name, type(message).__name__)
            return _error(ZrtError("internal", f"{type(message).__name__} failed: {type(error).__name__}: {error}"))

    # ---- the lane's ---------------------------------------------------------------------------------------------

    def _work(self, message: LayerTraffic, steps: list[Step], peer: bytes, clock: "_Clock") -> LayerTraffic:
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
                return self._prepare(message)
            case LayerAssignment():
                return self._assign(message)
            case ModelDataChunk():
                return self._take(message)
            case ModelDataDone():
                return self._load()
            case OpenLayers():
                held = self._loaded()
                return LayersOpened(held.open(message.session, message.length, message.page_keys, message.prompt))
            case CloseLayers():
                self._loaded().close(message.session, message.page_keys)
                return LayersClosed()
            case _:
                raise ZrtError("unknown_op", f"{type(message).__name__} is not for a worker")

    def _loaded(self) -> HeldLayers:
        if self._held is None:
            raise ZrtError("model_not_loaded", "no layers are loaded: PrepareLayers and LayerAssignment come first")
        return self._held

    def _prepare(self, message: PrepareLayers) -> LayerTraffic:
        if message.dtype not in DTYPES or message.dtype == "uint32":
            raise ZrtError("bad_request", f"dtype {message.dtype!r} is none of a model's")
        spec = spec_from_config(parse_config(message.config_json))
        device = str(self._device)
        free, total = device_memory(device)
        model = digest(message.config_json.encode()), message.dtype
        if model not in self._measured:
            self._measured[model] = layer_time(spec, DTYPES[message.dtype], device)
        self._prepared = message
        return LayersPrepared(
            free + (self._held.nbytes if self._held is not None else 0),
            total,
            max(1, self.memory_bytes - BLOCK_SERVER_BYTES) if self.memory_bytes else 0,
            self._measured[model],
            device,
            socket.gethostname(),
        )

    def _assign(self, message: LayerAssignment) -> LayerTraffic:
        prepared = self._prepared
        if prepared is None:
            raise ZrtError("bad_request", "PrepareLayers comes before LayerAssignment")
        layers = [_index(name) for name in message.layers]
        if not layers or sorted(set(layers)) != layers:
            raise ZrtError("bad_request", "layers: expected some, in ascending order")
        if prepared.random and message.model_hash:
            raise ZrtError("bad_request", "random weights are drawn from the config: they have no hash")
        store = None if prepared.random else LayerStore(self._cache, message.model_hash)
        self._unnamed.clear()
        self._store, self._layers = store, layers
        if self._held is not None and self._held_as == (prepared, layers, message.model_hash):
            self._held.close_all()  # it has them: of an earlier master, or of this one before it lost another worker
            return LayerAssignmentAck(False)
        self._held, self._held_as = None, None
        self.state = "loading"
        return LayerAssignmentAck(store is not None and not store.complete)

    def _take(self, message: ModelDataChunk) -> LayerTraffic:
        if self._store is None:
            raise ZrtError("bad_request", "ModelDataChunk: no assignment waits for data")
        if len(message.data) > MAX_CHUNK:
            raise ZrtError("too_large", f"a chunk of {len(message.data)} bytes, the limit is {MAX_CHUNK}")
        return ModelDataTaken(self._store.take(message.filename, message.offset, message.total_size, message.data))

    def _load(self) -> LayerTraffic:
        prepared = self._prepared
        if prepared is None or not self._layers:
            raise ZrtError("bad_request", "ModelDataDone: no assignment waits for data")
        if self._held is not None:
            return WorkerReady()
        spec = spec_from_config(parse_config(prepared.config_json))
        source: Checkpoint | RandomCheckpoint = RandomCheckpoint(spec)
        if self._store is not None:
            source = Checkpoint.of(self._store.files())
            if self._store.manifest is None or self._store.manifest.config != digest(prepared.config_json.encode()):
                raise ZrtError("bad_request", "the manifest is of another config.json than PrepareLayers")
        self._held = HeldLayers.load(
            spec,
            source,
            [(layer, layer) for layer in self._layers] if prepared.single else runs_of(self._layers),
            dtype=DTYPES[prepared.dtype],
            kv_bytes=prepared.kv_bytes,
            context=prepared.context,
            sessions=prepared.sessions,
            device=str(self._device),
        )
        self._held_as = prepared, self._layers, self._store.model_hash if self._store is not None else ""
        self.state = "ready"
        log.info("%s: holds layers %s", self.name, ", ".join(map(str, self._layers)))
        return WorkerReady()

    def _run(
        self, raw: RawTensor, entries: list[tuple[str, int, int]], steps: list[Step], peer: bytes, clock: "_Clock"
    ) -> LayerTraffic:
        held = self._loaded()
        layers = [_index(name) for name, _, _ in entries]
        if layers != [block for _, _, block in entries]:
            raise ZrtError("bad_request", "block_idx: expected the number in each layer's name")
        if len({index for _, index, _ in entries}) != 1:
            raise ZrtError("bad_request", "index_pos: expected the same one in each of one or more entries")
        shape = raw.shape
        if RAW_DTYPES[raw.dtype] not in _FLOATS or len(shape) != 3 or shape[0] != 1 or shape[2] != held.hidden:
            text = f"x: expected floats [1, n, {held.hidden}], got {RAW_DTYPES[raw.dtype]} {shape}"
            raise ZrtError("bad_request", text)
        if not shape[1]:
            raise ZrtError("bad_request", "x: expected at least one row")
        rows = as_dtype(rows_from_raw(raw), DTYPES[held.dtype])
        chain = held.chain(layers)
        if steps:
            if steps[0].seq_pos != entries[0][1]:
                raise ZrtError("bad_request", "index_pos: expected that of the first step")
            parts = [rows] if len(steps) == 1 else torch.split(rows, [step.n for step in steps])
            works = [Work(step.session, step.seq_pos, step.n, part) for step, part in zip(steps, parts, strict=True)]
        else:
            position = entries[0][1]
            works = [Work(("peer", peer), position, len(rows), rows, opens=0 if position else len(rows))]
            self._unnamed[peer] = time.monotonic()
        clock.started = time.perf_counter_ns()
        ran = held.run(chain, works)
        clock.ended = time.perf_counter_ns()
        if ran.output is None:
            if not steps:
                raise next(fault for fault in ran.faults if fault is not None)
            return StepFaults(ran.have, [fault.kind if fault is not None else "" for fault in ran.faults])
        answer = rows_to_raw(as_dtype(ran.output, RAW[raw.dtype]))
        return Tensor(answer.data, answer.dtype, answer.shape)

    def _forget(self, peer: Hashable) -> None:
        self._unnamed.pop(peer, None)
        if self._held is not None:
            self._held.close(("peer", peer))

    def _collect_idle(self) -> None:
        self.spawn(self._lane.run(self._collect), "collect")

    def _collect(self) -> None:
        """End the unnamed sessions of peers that went without a word."""
        limit = time.monotonic() - IDLE_S
        for peer in [peer for peer, last in self._unnamed.items() if last < limit]:
            self._forget(peer)

    def _info(self) -> WorkerInfo:
        held = self._held
        return WorkerInfo(
            version("zrt"),
            RAW_DTYPES[RAW.index(DTYPES[held.dtype])] if held is not None else "",
            platform.system().lower(),
            platform.machine(),
            self._device.type,
            self._device.index or 0,
            0,
        )


class _Clock:
    """When an operation came, and when the layers began and ended with it; nanoseconds."""

    __slots__ = ("came", "ended", "started")

    def __init__(self) -> None:
        self.came = self.started = self.ended = time.perf_counter_ns()

    def hop(self) -> HopTime:
        return HopTime((self.started - self.came) // 1000, (self.ended - self.started) // 1000)


def _error(error: ZrtError) -> WorkerError:
    return WorkerError(f"{error.kind}: {error.message}")


def _index(name: str) -> int:
    index = layer_index(name)
    if index is None:
        raise ZrtError("bad_request", f"could not find layer {name[:80]}")
    return index
