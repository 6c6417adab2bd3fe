"""Messages of layer workers."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from msgspec.msgpack import Decoder, Encoder
from msgspec.structs import replace

from zrt.runtime.messages.header import Header
from zrt.runtime.messages.layers import (
    RAW_DTYPES,
    RAW_SIZES,
    Batch,
    LayerTraffic,
    ModelDataChunk,
    RawTensor,
    SingleOp,
    Tensor,
    WorkerInfo,
)
from zrt.runtime.wire.decode_errors import WireError, bad_tagged
from zrt.runtime.wire.limits import INLINE, MAX_FRAME, MAX_HEADER, check_room, octets, view_of, written

if TYPE_CHECKING:
    from typing_extensions import Buffer

_U64_MAX: Final = 2**64 - 1
_encoder: Final = Encoder()
_layers: Final[Decoder[LayerTraffic]] = Decoder(LayerTraffic)


def encode_layers(message: LayerTraffic) -> bytes:
    """Return a bare message as bytes. ZrtError too_large."""
    return written(write_layers(message), MAX_FRAME)


def decode_layers(frame: "Buffer") -> LayerTraffic:
    """Return the bare message in a frame, whose tensor must be as large as its shape says.
    WireError bad_request, unknown_op, too_large."""
    message = _read_layer_message(view_of(frame, MAX_FRAME))
    _check_raw(message)
    return message


def raw_tensor(message: LayerTraffic) -> RawTensor | Tensor | None:
    """Return the tensor that a message carries; None if it carries none."""
    match message:
        case SingleOp() | Batch():
            return message.x
        case Tensor():
            return message
        case _:
            return None


def write_layers(message: LayerTraffic) -> bytes:
    if isinstance(message, WorkerInfo) and message.latency > _U64_MAX:
        message = replace(message, latency=_U64_MAX)
    return _encoder.encode(message)


def hollow(message: LayerTraffic) -> "tuple[LayerTraffic, list[bytes | memoryview]]":
    """Return the message and its data frames: data of INLINE bytes or more moves to a frame of its
    own."""
    carrier = message if isinstance(message, ModelDataChunk) else raw_tensor(message)
    if carrier is None or memoryview(carrier.data).nbytes < INLINE:
        return message, []
    data = memoryview(carrier.data)
    check_room(data.nbytes, MAX_FRAME)
    return _with_data(message, memoryview(b"")), [octets(data)]


def _with_data(message: LayerTraffic, data: memoryview) -> LayerTraffic:
    match message:
        case SingleOp():
            return replace(message, x=replace(message.x, data=data))
        case Batch():
            return replace(message, x=replace(message.x, data=data))
        case Tensor() | ModelDataChunk():
            return replace(message, data=data)
    return message


def read_layers(header: Header, frames: "Sequence[Buffer]") -> LayerTraffic:
    message = _read_layer_message(view_of(frames[1], MAX_HEADER))
    if len(frames) == 3:
        carrier = message if isinstance(message, ModelDataChunk) else raw_tensor(message)
        if carrier is None:
            raise WireError("bad_request", "a data frame goes with a tensor or a chunk alone")
        if len(carrier.data) != 0:
            raise WireError("bad_request", "data: expected none in the body beside a data frame")
        carrier.data = view_of(frames[2], MAX_FRAME)
    raw = _check_raw(message)
    if header.steps and isinstance(message, SingleOp | Batch):
        rows = sum(step.n for step in header.steps)
        if raw is None or len(raw.shape) != 3 or raw.shape[1] != rows:
            raise WireError("bad_request", f"x.shape: expected [1, {rows}, hidden], got {raw.shape if raw else None}")
    return message


def _read_layer_message(frame: memoryview) -> LayerTraffic:
    try:
        return _layers.decode(frame)
    except (ValueError, RecursionError) as error:
        raise bad_tagged("layers", error, frame, LayerTraffic) from None


def _check_raw(message: LayerTraffic) -> RawTensor | Tensor | None:
    """Return the message's tensor, if it has one. WireError bad_request: an unknown dtype, or not
    as many bytes as the shape says."""
    raw = raw_tensor(message)
    if raw is None:
        return None
    if raw.dtype >= len(RAW_DTYPES):
        raise WireError("bad_request", f"dtype: unknown dtype tag: {raw.dtype}")
    size = math.prod(raw.shape) * RAW_SIZES[raw.dtype]
    if len(raw.data) != size:
        text = f"data: expected {size} bytes for {RAW_DTYPES[raw.dtype]} of shape {raw.shape}, got {len(raw.data)}"
        raise WireError("bad_request", text)
    return raw
