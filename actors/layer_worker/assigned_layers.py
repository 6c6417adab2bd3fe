"""The layers that a worker is assigned: their model, their numbers, their files, and the loaded
layers themselves. Used by the worker's executor; every call blocks."""

import logging
import socket
from collections.abc import Callable
from pathlib import Path

from zrt.actors.layer_worker.store import LayerStore
from zrt.runtime.cluster.layer_sharing import CUDA_SHARE, ranges
from zrt.runtime.cluster.memory import BLOCK_SERVER_BYTES
from zrt.runtime.compute.devices import device_memory
from zrt.runtime.compute.engine import given_back
from zrt.runtime.compute.layer_engine import LayerEngine, runs_of
from zrt.runtime.compute.layer_time import layer_time
from zrt.runtime.compute.loading import EngineOptions
from zrt.runtime.compute.tensors import DTYPES
from zrt.runtime.compute.weight_sources import Checkpoint, RandomCheckpoint
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.layers import (
    MAX_CHUNK,
    LayerAssignment,
    LayerAssignmentAck,
    LayersPrepared,
    LayerTraffic,
    ModelDataChunk,
    ModelDataTaken,
    PrepareLayers,
    WorkerReady,
    layer_index,
)
from zrt.runtime.messages.members import ActorState
from zrt.runtime.models.architecture.config_json import parse_config
from zrt.runtime.models.architecture.spec import spec_from_config
from zrt.runtime.models.checkpoint.layer_manifest import digest

log = logging.getLogger(__name__)


class AssignedLayers:
    """The layers that a worker is to hold, and those loaded (`held`). Pushed files are kept in
    `cache`; `memory_bytes` is the most the process may take, 0 for what there is. `moved` hears of
    the states loading and ready, and of blank where loading failed."""

    def __init__(self, cache: Path, device: str, memory_bytes: int, moved: Callable[[ActorState], None]) -> None:
        self.held: LayerEngine | None = None
        self._cache = cache
        self._device = device
        self._memory_bytes = memory_bytes
        self._moved = moved
        self._prepared: PrepareLayers | None = None
        self._layers: list[int] = []
        self._store: LayerStore | None = None
        self._held_as: tuple[PrepareLayers, list[int], str] | None = None
        self._measured: dict[tuple[str, str], int] = {}  # layer times, by config and dtype

    def loaded(self) -> LayerEngine:
        """Return the layers that are loaded. ZrtError model_not_loaded."""
        if self.held is None:
            raise ZrtError("model_not_loaded", "no layers are loaded: PrepareLayers and LayerAssignment come first")
        return self.held

    def prepare(self, message: PrepareLayers) -> LayerTraffic:
        """Take the model of the next assignment; measure one of its layers the first time. ZrtError
        bad_request, bad_model, unsupported."""
        if message.dtype not in DTYPES or message.dtype == "uint32":
            raise ZrtError("bad_request", f"dtype {message.dtype!r} is none of a model's")
        spec = spec_from_config(parse_config(message.config_json))
        free, total = device_memory(self._device)
        model = digest(message.config_json.encode()), message.dtype
        if model not in self._measured:
            self._measured[model] = layer_time(spec, DTYPES[message.dtype], self._device)
        self._prepared = message
        return LayersPrepared(
            free + given_back(self.held.engines if self.held is not None else (), self._device),
            total,
            max(1, self._memory_bytes - BLOCK_SERVER_BYTES) if self._memory_bytes else 0,
            self._measured[model],
            self._device,
            socket.gethostname(),
        )

    def assign(self, message: LayerAssignment) -> LayerTraffic:
        """Take the numbers of the layers to hold. Layers already held stay if numbers, weights and
        settings are the same; their sessions end."""
        prepared = self._prepared
        if prepared is None:
            raise ZrtError("bad_request", "PrepareLayers comes before LayerAssignment")
        layers = [layer_of(name) for name in message.layers]
        if not layers or sorted(set(layers)) != layers:
            raise ZrtError("bad_request", "layers: expected some, in ascending order")
        if prepared.random and message.model_hash:
            raise ZrtError("bad_request", "random weights are drawn from the config: they have no hash")
        self._store, self._layers = self._store_of(None if prepared.random else message.model_hash), layers
        if self.held is not None and self._held_as == (prepared, layers, message.model_hash):
            self.held.close_all()  # it has them: of an earlier master, or of this one before it lost another worker
            return LayerAssignmentAck(False)
        self.held, self._held_as = None, None
        self._moved("loading")
        return LayerAssignmentAck(self._store is not None and not self._store.complete)

    def _store_of(self, model_hash: str | None) -> LayerStore | None:
        """Return the store of this hash: the present one if it has that hash, since it knows which
        files it has checked."""
        store = self._store
        if store is not None and store.model_hash == model_hash:
            return store
        new = None if model_hash is None else LayerStore(self._cache, model_hash)
        self.close()
        return new

    def close(self) -> None:
        """Close the files that are being written."""
        if self._store is not None:
            self._store.close()

    def take(self, message: ModelDataChunk) -> LayerTraffic:
        """Take a chunk of a file. ZrtError as LayerStore.take."""
        if self._store is None:
            raise ZrtError("bad_request", "ModelDataChunk: no assignment waits for data")
        if len(message.data) > MAX_CHUNK:
            raise ZrtError("too_large", f"a chunk of {len(message.data)} bytes, the limit is {MAX_CHUNK}")
        return ModelDataTaken(self._store.take(message.filename, message.offset, message.total_size, message.data))

    def load(self) -> LayerTraffic:
        """Load the layers, once all files are there. ZrtError bad_request, and those of
        LayerStore.files and LayerEngine.load."""
        prepared = self._prepared
        if prepared is None or not self._layers:
            raise ZrtError("bad_request", "ModelDataDone: no assignment waits for data")
        if self.held is not None:
            return WorkerReady()
        try:
            self.held = self._read(prepared)
        except Exception as error:
            self._moved("blank")
            if self._store is not None and isinstance(error, ZrtError) and error.kind == "bad_model":
                self._store.files(anew=True)  # says so if they are not what was checked before
            raise
        self._held_as = prepared, self._layers, self._store.model_hash if self._store is not None else ""
        self._moved("ready")
        log.info("holds layers %s", ranges(self._layers))
        return WorkerReady()

    def _read(self, prepared: PrepareLayers) -> LayerEngine:
        spec = spec_from_config(parse_config(prepared.config_json))
        source: Checkpoint | RandomCheckpoint = RandomCheckpoint(spec)
        if self._store is not None:
            source = Checkpoint.of(self._store.files())
            if self._store.manifest is None or self._store.manifest.config != digest(prepared.config_json.encode()):
                raise ZrtError("bad_request", "the manifest is of another config.json than PrepareLayers")
        return LayerEngine.load(
            spec,
            source,
            [(layer, layer) for layer in self._layers] if prepared.single else runs_of(self._layers),
            options_of(prepared, self._device),
        )


def options_of(prepared: PrepareLayers, device: str) -> EngineOptions:
    """Return the settings of an engine on `device` for layers that a master prepares."""
    return EngineOptions(
        dtype=DTYPES[prepared.dtype],
        kv_bytes=prepared.kv_bytes,
        context=prepared.context,
        sessions=prepared.sessions,
        device=device,
        gpu_memory=1 - CUDA_SHARE,  # what plans leave alone, whatever a block server may take
    )


def layer_of(name: str) -> int:
    """Return the number in a layer's name. ZrtError bad_request: the name is no layer's."""
    index = layer_index(name)
    if index is None:
        raise ZrtError("bad_request", f"could not find layer {name[:80]}")
    return index
