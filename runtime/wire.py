"""Bytes <-> messages: the header frame, tensor frames, size limits, and bare single-frame messages.

Between zrt actors a message is `[header][body]` or `[header][body][data]`: header.py's array, the documented message (a MessagePack map, JSON
between a leader and its ranks), and tensor bytes from `INLINE` on as a frame of their own, with the body's `data` left empty. A bare message is
the body alone.
Every reader here takes whatever a peer sent and either returns a checked message or raises WireError, nothing else.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

from msgspec.msgpack import Decoder, Encoder
from msgspec.structs import replace

from zrt.runtime.codecs import Undecodable, helexa, kwaai
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.client import ClientEvent, ClientRequest
from zrt.runtime.messages.control import ControlMessage
from zrt.runtime.messages.header import PROTOCOL, Header
from zrt.runtime.messages.inference import InferenceRequest, InferenceResponse
from zrt.runtime.messages.layers import (
    RAW_DTYPES,
    RAW_SIZES,
    Batch,
    LayerMessage,
    LayerTraffic,
    ModelDataChunk,
    RawTensor,
    SingleOp,
    Tensor,
    WorkerInfo,
)
from zrt.runtime.messages.ranks import RankMessage, StepBatch, WorkerRequest, WorkerResponse
from zrt.runtime.refusal import WireError, bad_header, bad_tagged

if TYPE_CHECKING:
    from typing_extensions import Buffer

Body: TypeAlias = InferenceRequest | ControlMessage | WorkerRequest | WorkerResponse | LayerTraffic

INLINE: Final = 16 * 1024
"""Bytes of tensor data from which they travel as a frame of their own."""
MAX_FRAME: Final = 512 * 1024 * 1024
"""Bytes of one frame between actors, and of a bare inference message."""
MAX_CLIENT_FRAME: Final = 16 * 1024 * 1024
"""Bytes of one frame at the client endpoint, either way."""
MAX_HEADER: Final = 16 * 1024 * 1024
"""Bytes of a header frame, and of a control message."""
MAX_HOLLOW: Final = 1024 * 1024
"""Bytes of an inference message behind a header: its data is below INLINE, or in a frame of its own. Reading more, value by value, takes long."""
ELEMENT_BYTES: Final[dict[str, int]] = {"float32": 4, "bfloat16": 2, "float16": 2, "uint32": 4}
"""What `Header.dtype` may name. Token ids are uint32 (or unnamed), hidden states one of the floats; all little-endian."""
SCHEMAS: Final = ("inference", "control", "ranks", "layers")
"""What `Header.body` may name: `InferenceRequest`; one of `ControlMessage`, told apart by its `type`; or of `WorkerRequest`, in a reply of
`WorkerResponse`, by its `op`; or of `LayerTraffic`, by its `type`."""

_LAST_POSITION: Final = 2**32 - 1
_U64_MAX: Final = 2**64 - 1

_encoder: Final = Encoder()
_header: Final = Decoder(Header)
_control: Final[Decoder[ControlMessage]] = Decoder(ControlMessage)
_layers: Final[Decoder[LayerTraffic]] = Decoder(LayerTraffic)
_client: Final[Decoder[ClientRequest]] = Decoder(ClientRequest)
_event: Final[Decoder[ClientEvent]] = Decoder(ClientEvent)


# ---- between actors -------------------------------------------------------------------------------------------------


def encode(header: Header, body: Body) -> list[bytes | memoryview]:
    """The frames of one message; sets `header.body`. ZrtError too_large if a frame would exceed its limit.

    The first two are fresh; a data frame shares the memory of `body.data`, which stays untouched until it is sent.
    """
    frames: list[bytes | memoryview] = []
    if isinstance(body, InferenceRequest | StepBatch):
        data = memoryview(body.data)
        if data.nbytes >= INLINE:
            _room(data.nbytes, MAX_FRAME)
            body = replace(body, data=memoryview(b""))
            frames = [_octets(data)]
    if isinstance(body, LayerMessage):
        body, frames = _hollow(body)
    if isinstance(body, RankMessage):
        header.body = "ranks"
        written = helexa.write(body)
    elif isinstance(body, LayerMessage):
        header.body = "layers"
        written = _write_layers(body)
    else:
        header.body = "inference" if isinstance(body, InferenceRequest) else "control"
        written = _encoder.encode(body)
    head = _encoder.encode(header)
    _room(len(written), MAX_FRAME if header.body == "inference" else MAX_HEADER)
    _room(len(head), MAX_HEADER)
    return [head, written, *frames]


def decode(frames: "Sequence[Buffer]") -> tuple[Header, Body]:
    """One message of two or three frames. Its tensor data is a slice of the frame that carried it, not a copy.

    WireError bad_request: not decodable, another protocol version, or steps, shape, dtype and data that do not agree;
    unknown_op: no such schema or control message; too_large.
    """
    if not frames:
        raise WireError("bad_request", "a message has a header and a body frame, got none")
    header = _read_header(frames[0])
    try:
        return header, _read_body(header, frames)
    except WireError as error:
        error.header = header
        raise


def _read_header(frame: "Buffer") -> Header:
    try:
        header = _header.decode(_view(frame, MAX_HEADER))
    except (ValueError, RecursionError) as error:
        raise bad_header(error) from None
    if header.version != PROTOCOL:
        text = f"header.version: the sender speaks protocol {header.version}, this process {PROTOCOL}"
        raise WireError("bad_request", text, header=header)
    return header


def _read_body(header: Header, frames: "Sequence[Buffer]") -> Body:
    if header.body not in SCHEMAS:
        raise WireError("unknown_op", f"header.body: expected {', '.join(SCHEMAS)}, got {header.body!r}")
    if header.dtype and header.dtype not in ELEMENT_BYTES:
        raise WireError("bad_request", f"header.dtype: expected {', '.join(ELEMENT_BYTES)}, got {header.dtype!r}")
    for number, step in enumerate(header.steps):
        if step.seq_pos + step.n > _LAST_POSITION:
            text = f"header.steps[{number}]: expected seq_pos + n <= {_LAST_POSITION}, got {step.seq_pos} + {step.n}"
            raise WireError("bad_request", text)
    most = 2 if header.body == "control" else 3
    if not 2 <= len(frames) <= most:
        raise WireError("bad_request", f"{header.body}: expected 2 to {most} frames, got {len(frames)}")
    if header.body == "control":
        return _read_control(_view(frames[1], MAX_HEADER))
    if header.body == "ranks":
        return _read_ranks(header, frames)
    if header.body == "layers":
        return _read_layers(header, frames)
    request = _read_request(_view(frames[1], MAX_HOLLOW))
    if len(frames) == 3:
        _attach(request, frames[2])
    _check_steps(header, request)
    return request


def _read_ranks(header: Header, frames: "Sequence[Buffer]") -> WorkerRequest | WorkerResponse:
    body = _view(frames[1], MAX_HEADER)
    if header.reply and len(frames) == 2:
        return decode_rank_response(body)
    request = decode_rank_request(body)
    if len(frames) == 3:
        if not isinstance(request, StepBatch):
            raise WireError("bad_request", "a data frame goes with a step_batch alone")
        _attach(request, frames[2])
    return request


def _attach(request: InferenceRequest | StepBatch, data: "Buffer") -> None:
    if len(request.data) != 0:
        raise WireError("bad_request", "data: expected none in the body beside a data frame")
    request.data = _view(data, MAX_FRAME)


def _read_control(frame: memoryview) -> ControlMessage:
    try:
        return _control.decode(frame)
    except (ValueError, RecursionError) as error:
        raise bad_tagged("control", error, frame, ControlMessage) from None


def _read_request(frame: memoryview) -> InferenceRequest:
    try:
        return kwaai.read_request(frame)
    except Undecodable as error:
        raise WireError("bad_request", f"deserialise InferenceRequest: {error}") from None


def _check_steps(header: Header, request: InferenceRequest) -> None:
    """The tensor has one row a token, and the documented fields repeat the first step."""
    if not header.steps:
        raise WireError("bad_request", "header.steps: expected at least one beside an InferenceRequest")
    first = header.steps[0]
    if request.session_id != first.session or request.seq_pos != first.seq_pos:
        raise WireError("bad_request", "session_id, seq_pos: expected those of the first step")
    dtype = header.dtype
    if request.payload_type == "token_ids":
        dtype = dtype or "uint32"
    if not dtype or (dtype == "uint32") != (request.payload_type == "token_ids"):
        raise WireError("bad_request", f"header.dtype: {request.payload_type} cannot be {dtype or 'unnamed'}")
    rows = sum(step.n for step in header.steps)
    if header.handed is None:
        _check_tensor(request, dtype, rows)
        return
    _check_shape(request, rows)
    if len(request.data) or len(header.handed.rows) != len(header.steps):
        raise WireError("bad_request", "header.handed: expected no data beside it, and a row for each step")


def _check_tensor(request: InferenceRequest, dtype: str, rows: int) -> None:
    """The shape is that of so many rows, and `data` is as long as it says."""
    what, shape = _check_shape(request, rows), request.shape
    size = math.prod(shape) * ELEMENT_BYTES[dtype]
    if len(request.data) != size:
        text = f"decode {what}: data: expected {size} bytes for {dtype} of shape {shape}, got {len(request.data)}"
        raise WireError("bad_request", text)


def _check_shape(request: InferenceRequest, rows: int) -> str:
    """`shape` is [rows] for token ids, [1, rows, hidden] for hidden states; what they are called."""
    shape = request.shape
    if request.payload_type == "token_ids":
        what, fits, wanted = "token IDs", shape == [rows], f"[{rows}]"
    else:
        fits = len(shape) == 3 and shape[0] == 1 and shape[1] == rows and shape[2] > 0
        what, wanted = "hidden states", f"[1, {rows}, hidden]"
    if not fits:
        raise WireError("bad_request", f"decode {what}: shape: expected {wanted}, got {shape}")
    return what


# ---- bare inference messages ----------------------------------------------------------------------------------------


def decode_inference(frame: "Buffer") -> InferenceRequest:
    """A bare request: u32-LE token ids of shape [n], or f16-LE hidden states of shape [1, n, hidden], n >= 1.

    Whatever KwaaiNet's own decoder takes is taken (see codecs/kwaai.py), then shape, data and position are checked.
    WireError bad_request, too_large.
    """
    request = _read_request(_view(frame, MAX_FRAME))
    if request.payload_type == "token_ids":
        dtype, rows = "uint32", len(request.data) // ELEMENT_BYTES["uint32"]
    else:
        dtype, rows = "float16", request.shape[1] if len(request.shape) == 3 else 1
    _check_tensor(request, dtype, rows)
    if rows == 0:
        raise WireError("bad_request", "shape: expected at least one token, got none")
    if request.seq_pos + rows > _LAST_POSITION:
        raise WireError(
            "bad_request", f"seq_pos: expected seq_pos + n <= {_LAST_POSITION}, got {request.seq_pos} + {rows}"
        )
    return request


def encode_inference(request: InferenceRequest, *, array: bool = False) -> bytes:
    """A bare request, for a block server or a KwaaiNet node. Both read bin; `array` writes the documented integers.

    ZrtError too_large."""
    _room(memoryview(request.data).nbytes, MAX_FRAME)
    return _written(kwaai.write(request, array=array), MAX_FRAME)


def encode_response(response: InferenceResponse, *, array: bool = False) -> bytes:
    """A bare reply; `array` as in `encode_inference`. ZrtError too_large."""
    _room(memoryview(response.data).nbytes, MAX_FRAME)
    return _written(kwaai.write(response, array=array), MAX_FRAME)


def decode_response(frame: "Buffer") -> InferenceResponse:
    """A bare reply. `data` is a slice of the frame where it is bin; it is not compared with `shape`. WireError bad_request, too_large."""
    try:
        return kwaai.read_response(_view(frame, MAX_FRAME))
    except Undecodable as error:
        raise WireError("bad_request", f"deserialise InferenceResponse: {error}") from None


# ---- bare messages of TP ranks --------------------------------------------------------------------------------------


def decode_rank_request(frame: "Buffer") -> WorkerRequest:
    """WireError unknown_op (no such `op`), bad_request, too_large."""
    view = _view(frame, MAX_FRAME)
    try:
        return helexa.read_request(view)
    except Undecodable as error:
        raise _bad_op(error) from None


def decode_rank_response(frame: "Buffer") -> WorkerResponse:
    """As `decode_rank_request`."""
    view = _view(frame, MAX_FRAME)
    try:
        return helexa.read_response(view)
    except Undecodable as error:
        raise _bad_op(error) from None


def encode_rank(message: WorkerRequest | WorkerResponse) -> bytes:
    """A bare request or response. ZrtError too_large."""
    return _written(helexa.write(message), MAX_FRAME)


def _bad_op(error: Undecodable) -> WireError:
    return WireError("unknown_op" if isinstance(error, helexa.UnknownOp) else "bad_request", str(error))


# ---- messages of layer workers --------------------------------------------------------------------------------------


def encode_layers(message: LayerTraffic) -> bytes:
    """A bare message. ZrtError too_large."""
    return _written(_write_layers(message), MAX_FRAME)


def decode_layers(frame: "Buffer") -> LayerTraffic:
    """A bare message, whose tensor is as large as its shape says. WireError bad_request, unknown_op, too_large."""
    message = _read_layer_message(_view(frame, MAX_FRAME))
    _check_raw(message)
    return message


def raw_tensor(message: LayerTraffic) -> RawTensor | Tensor | None:
    """The tensor that a message carries."""
    match message:
        case SingleOp() | Batch():
            return message.x
        case Tensor():
            return message
        case _:
            return None


def _write_layers(message: LayerTraffic) -> bytes:
    if isinstance(message, WorkerInfo) and message.latency > _U64_MAX:
        message = replace(message, latency=_U64_MAX)
    return _encoder.encode(message)


def _hollow(message: LayerTraffic) -> "tuple[LayerTraffic, list[bytes | memoryview]]":
    """The message with its data in a frame of its own, where it is large."""
    carrier = message if isinstance(message, ModelDataChunk) else raw_tensor(message)
    if carrier is None or memoryview(carrier.data).nbytes < INLINE:
        return message, []
    data = memoryview(carrier.data)
    _room(data.nbytes, MAX_FRAME)
    return _with_data(message, memoryview(b"")), [_octets(data)]


def _with_data(message: LayerTraffic, data: memoryview) -> LayerTraffic:
    match message:
        case SingleOp():
            return replace(message, x=replace(message.x, data=data))
        case Batch():
            return replace(message, x=replace(message.x, data=data))
        case Tensor() | ModelDataChunk():
            return replace(message, data=data)
    return message


def _read_layers(header: Header, frames: "Sequence[Buffer]") -> LayerTraffic:
    message = _read_layer_message(_view(frames[1], MAX_HEADER))
    if len(frames) == 3:
        carrier = message if isinstance(message, ModelDataChunk) else raw_tensor(message)
        if carrier is None:
            raise WireError("bad_request", "a data frame goes with a tensor or a chunk alone")
        if len(carrier.data) != 0:
            raise WireError("bad_request", "data: expected none in the body beside a data frame")
        carrier.data = _view(frames[2], MAX_FRAME)
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
    """A known dtype, and as many bytes as the shape says."""
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


# ---- client messages ------------------------------------------------------------------------------------------------


def encode_client(request: ClientRequest) -> bytes:
    """ZrtError too_large, or bad_request: a text that is not Unicode (Python's strings may hold half a character)."""
    try:
        return _written(_encoder.encode(request), MAX_CLIENT_FRAME)
    except UnicodeEncodeError:
        raise ZrtError("bad_request", "the text cannot be written as UTF-8") from None


def decode_client(frame: "Buffer") -> ClientRequest:
    """WireError bad_request (names the field), unknown_op (no such `type`) or too_large, with the request's id where it can be read."""
    view = _view(frame, MAX_CLIENT_FRAME)
    try:
        return _client.decode(view)
    except (ValueError, RecursionError) as error:
        raise bad_tagged("request", error, view, ClientRequest) from None


def encode_event(event: ClientEvent) -> bytes:
    """ZrtError too_large."""
    return _written(_encoder.encode(event), MAX_CLIENT_FRAME)


def decode_event(frame: "Buffer") -> ClientEvent:
    """WireError as `decode_client`."""
    view = _view(frame, MAX_CLIENT_FRAME)
    try:
        return _event.decode(view)
    except (ValueError, RecursionError) as error:
        raise bad_tagged("event", error, view, ClientEvent) from None


# ---- helpers --------------------------------------------------------------------------------------------------------


def _octets(data: memoryview) -> memoryview:
    """The same memory as flat bytes."""
    if data.format == "B" and data.ndim == 1:
        return data
    return data.cast("B") if data.nbytes else memoryview(b"")


def _view(frame: "Buffer", limit: int) -> memoryview:
    view = _octets(memoryview(frame))
    if len(view) > limit:
        raise WireError("too_large", f"a frame of {len(view)} bytes, the limit is {limit}")
    return view


def _room(size: int, limit: int) -> None:
    if size > limit:
        raise ZrtError("too_large", f"a frame of {size} bytes, the limit is {limit}")


def _written(frame: bytes, limit: int) -> bytes:
    _room(len(frame), limit)
    return frame
