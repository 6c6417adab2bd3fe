"""Cake's messages with the documented names, and zrt's own in the same union: what a master and its
layer workers say.

Each is a MessagePack map whose `type` is the class name; Tensor and WorkerInfo carry their fields
flat beside it. A worker takes them from its master, in a multipart like any between zrt actors, or
bare from any peer, as a single frame. Cake's own bytes are in codecs/cake.py.

| to the worker | its answer | what it does |
| --- | --- | --- |
| Hello | WorkerInfo | who is there |
| SingleOp, Batch | Tensor | run layers over hidden states [1, n, hidden] |
| Goodbye | WorkerInfo | forget all KV of this peer |
| PrepareLayers | LayersPrepared | zrt: the model that the next LayerAssignment is of |
| LayerAssignment | LayerAssignmentAck | which layers to hold, of which weights |
| ModelDataChunk | ModelDataTaken | a byte range of a file; Cake does not answer it |
| ModelDataDone | WorkerReady | all files are complete: load the layers |
| OpenLayers | LayersOpened | zrt: begin a session, with the prefix that is cached |
| CloseLayers | LayersClosed | zrt: end one session |

WorkerError may answer any of them; its text reads `kind: message`. A Batch whose header names steps
may be answered by StepFaults. After an Ack that needs no data, ModelDataDone follows at once.
"""

from typing import Annotated, Final

from msgspec import Meta, Struct

from zrt.runtime.messages.header import U64

MOST_LAYERS: Final = 65_536
MAX_CHUNK: Final = 64 * 1024 * 1024
"""The most bytes of a ModelDataChunk's data."""
RAW_DTYPES: Final = ("U8", "U32", "I64", "BF16", "F16", "F32", "F64", "F8E4M3")
"""Names of a RawTensor's dtype tags, from 0."""
RAW_SIZES: Final = (1, 4, 8, 2, 2, 4, 8, 1)
"""Bytes per element of each of RAW_DTYPES."""

DtypeTag = Annotated[int, Meta(ge=0, le=255)]
Shape = Annotated[list[U64], Meta(max_length=64)]
LayerStep = tuple[str, U64, U64]
"""One layer of a Batch: layer name, index_pos, block_idx."""


class LayerMessage(Struct, tag_field="type", tag=True):
    """Base of the messages between a master and its layer workers."""


class RawTensor(Struct):
    """Numbers of `shape`, little-endian, the last dimension fastest; `dtype` is an index into
    RAW_DTYPES."""

    data: memoryview
    dtype: DtypeTag
    shape: Shape


# ---- Cake's --------------------------------------------------------------------------------------


class Hello(LayerMessage):
    """Request for the worker's WorkerInfo."""


class WorkerInfo(LayerMessage):
    """What a worker is. `dtype` is a name of RAW_DTYPES, `latency` milliseconds, measured by the
    master (its worker says 0). In Cake's bytes `latency` has 128 bits."""

    version: str
    dtype: str
    os: str
    arch: str
    device: str
    device_idx: U64
    latency: U64


class SingleOp(LayerMessage):
    """Request to run one layer, `model.layers.N`, over `x` [1, n, hidden] at positions from
    `index_pos` on. `block_idx` is N again."""

    layer_name: str
    x: RawTensor
    index_pos: U64
    block_idx: U64


class Batch(LayerMessage):
    """Request to run several layers, one after the other; all entries have the same index_pos.

    Where the header names steps, the rows of `x` are those of the steps in their order, and
    index_pos is that of the first step.
    """

    x: RawTensor
    batch: Annotated[list[LayerStep], Meta(max_length=MOST_LAYERS)]


class Tensor(LayerMessage):
    """Answer to SingleOp and Batch: a RawTensor of x's dtype and shape."""

    data: memoryview
    dtype: DtypeTag
    shape: Shape


class Goodbye(LayerMessage):
    """Request to forget all KV of this peer. Answered by WorkerInfo; the connection stays."""


class LayerAssignment(LayerMessage):
    """Request to hold layers: `layers` are names `model.layers.N`; `model_hash` names configuration
    and weights."""

    layers: Annotated[list[str], Meta(max_length=MOST_LAYERS)]
    model_hash: str


class LayerAssignmentAck(LayerMessage):
    """Answer to LayerAssignment. With `needs_data`, chunks are to follow."""

    needs_data: bool


class ModelDataChunk(LayerMessage):
    """Bytes of a file of `total_size` from `offset` on, at most MAX_CHUNK."""

    filename: str
    offset: U64
    total_size: U64
    data: memoryview


class ModelDataDone(LayerMessage):
    """End of the chunks: all files are complete."""


class WorkerReady(LayerMessage):
    """Answer to ModelDataDone: the layers are loaded."""


class WorkerError(LayerMessage):
    message: str


# ---- zrt's ---------------------------------------------------------------------------------------


class PrepareLayers(LayerMessage):
    """Model of the next LayerAssignment: the text of its config.json, the `dtype` to compute in, KV
    memory for the assigned layers in bytes, the longest session in tokens, and how many sessions
    are open at once. With `random`, weights are drawn from the config.

    Consecutive layers run together, so an operation names all of them; with `single` each may be
    named by itself.
    """

    config_json: str
    dtype: str
    kv_bytes: U64
    context: U64
    sessions: U64
    random: bool = False
    single: bool = False


class LayersPrepared(LayerMessage):
    """Answer to PrepareLayers: LayerAssignment may follow.

    For the worker's `device`, on `host`, it says the bytes of memory that layers could take now
    (including those of layers held, since others would take their place), and the bytes in all;
    `most_bytes` is the most that layers may take, 0 for no other limit. `layer_us` is the measured
    time of one token through one layer of this model, in microseconds.
    """

    free_bytes: U64 = 0
    total_bytes: U64 = 0
    most_bytes: U64 = 0
    layer_us: U64 = 0
    device: str = ""
    host: str = ""


class ModelDataTaken(LayerMessage):
    """Answer to ModelDataChunk: the chunk is in the file, which now holds `held` bytes from its
    start on."""

    held: U64


class OpenLayers(LayerMessage):
    """Request to make room for a session whose history has `length` tokens, the first `prompt` of
    them its prompt (0: all), in pages of these keys."""

    session: U64
    length: U64
    prompt: U64 = 0
    page_keys: list[U64] = []


class LayersOpened(LayerMessage):
    """Answer to OpenLayers: how many tokens of the session all layers hold."""

    have: U64


class CloseLayers(LayerMessage):
    """Request to end a session. Its full pages that have a key stay as cache; None: the keys that
    the session was opened with."""

    session: U64
    page_keys: list[U64] | None = None


class LayersClosed(LayerMessage):
    """Answer to CloseLayers: the session is not held any more, if it was."""


class StepFaults(LayerMessage):
    """Answer to a Batch of which nothing ran, since some steps cannot run: the error's kind of each
    step of the header, empty for steps that could run, and the number of tokens held of each step's
    session."""

    have: list[U64]
    faults: list[str]


LayerTraffic = (
    Hello
    | WorkerInfo
    | SingleOp
    | Batch
    | Tensor
    | Goodbye
    | LayerAssignment
    | LayerAssignmentAck
    | ModelDataChunk
    | ModelDataDone
    | WorkerReady
    | WorkerError
    | PrepareLayers
    | LayersPrepared
    | ModelDataTaken
    | OpenLayers
    | LayersOpened
    | CloseLayers
    | LayersClosed
    | StepFaults
)
"""Every message between a master and its layer workers."""


def layer_name(index: int) -> str:
    """Return the documented messages' name of a block: `model.layers.N`."""
    return f"model.layers.{index}"


def layer_index(name: str) -> int | None:
    """Return the block that a layer's name means, or None if it means none."""
    head, _, number = name.rpartition(".")
    if head != "model.layers" or not (number.isascii() and number.isdigit()) or str(int(number[:9])) != number:
        return None
    return int(number)
