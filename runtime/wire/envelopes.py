"""Messages between actors: a header, a body of one of four schemas, and maybe a data frame."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

from msgspec.msgpack import Decoder, Encoder
from msgspec.structs import replace

from zrt.runtime.messages.control import Done, Failed
from zrt.runtime.messages.header import PROTOCOL, Header
from zrt.runtime.messages.inference import InferenceRequest
from zrt.runtime.messages.layers import LayerMessage, LayerTraffic
from zrt.runtime.messages.members import MemberMessage
from zrt.runtime.messages.ranks import RankMessage, StepBatch, WorkerRequest, WorkerResponse
from zrt.runtime.messages.sessions import SessionMessage
from zrt.runtime.wire.codecs import helexa
from zrt.runtime.wire.decode_errors import WireError, bad_header, bad_tagged
from zrt.runtime.wire.inference import ELEMENT_BYTES, LAST_POSITION, check_shape, check_tensor, read_request
from zrt.runtime.wire.layers import hollow, read_layers, write_layers
from zrt.runtime.wire.limits import INLINE, MAX_FRAME, MAX_HEADER, MAX_HOLLOW, attach, check_room, octets, view_of
from zrt.runtime.wire.ranks import read_ranks

if TYPE_CHECKING:
    from typing_extensions import Buffer

ControlMessage: TypeAlias = Done | Failed | MemberMessage | SessionMessage
Body: TypeAlias = InferenceRequest | ControlMessage | WorkerRequest | WorkerResponse | LayerTraffic

SCHEMAS: Final = ("inference", "control", "ranks", "layers")
"""The values of `Header.body`, for: an `InferenceRequest`; a `ControlMessage`, told apart by its
`type`; a `WorkerRequest`, in a reply a `WorkerResponse`, by its `op`; a `LayerTraffic` message, by
its `type`."""

_encoder: Final = Encoder()
_header: Final = Decoder(Header)
_control: Final[Decoder[ControlMessage]] = Decoder(ControlMessage)


def encode(header: Header, body: Body) -> list[bytes | memoryview]:
    """Return the frames of one message, and set `header.body`. ZrtError too_large if a frame would
    exceed its limit.

    The first two frames are new bytes; a data frame shares the memory of `body.data`, which must
    not change until the frame is sent.
    """
    frames: list[bytes | memoryview] = []
    if isinstance(body, InferenceRequest | StepBatch):
        data = memoryview(body.data)
        if data.nbytes >= INLINE:
            check_room(data.nbytes, MAX_FRAME)
            body = replace(body, data=memoryview(b""))
            frames = [octets(data)]
    if isinstance(body, LayerMessage):
        body, frames = hollow(body)
    if isinstance(body, RankMessage):
        header.body = "ranks"
        written = helexa.write(body)
    elif isinstance(body, LayerMessage):
        header.body = "layers"
        written = write_layers(body)
    else:
        header.body = "inference" if isinstance(body, InferenceRequest) else "control"
        written = _encoder.encode(body)
    head = _encoder.encode(header)
    check_room(len(written), MAX_FRAME if header.body == "inference" else MAX_HEADER)
    check_room(len(head), MAX_HEADER)
    return [head, written, *frames]


def decode(frames: "Sequence[Buffer]") -> tuple[Header, Body]:
    """Return a message's header and body from its two or three frames. Tensor data is a slice of
    the frame that carried it, not a copy.

    WireError bad_request: not decodable, another protocol version, or steps, shape, dtype and data
    that do not agree; unknown_op: no such schema or control message; too_large.
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
        header = _header.decode(view_of(frame, MAX_HEADER))
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
        if step.seq_pos + step.n > LAST_POSITION:
            text = f"header.steps[{number}]: expected seq_pos + n <= {LAST_POSITION}, got {step.seq_pos} + {step.n}"
            raise WireError("bad_request", text)
    most = 2 if header.body == "control" else 3
    if not 2 <= len(frames) <= most:
        raise WireError("bad_request", f"{header.body}: expected 2 to {most} frames, got {len(frames)}")
    if header.body == "control":
        return _read_control(view_of(frames[1], MAX_HEADER))
    if header.body == "ranks":
        return read_ranks(header, frames)
    if header.body == "layers":
        return read_layers(header, frames)
    request = read_request(view_of(frames[1], MAX_HOLLOW))
    if len(frames) == 3:
        attach(request, frames[2])
    _check_steps(header, request)
    return request


def _read_control(frame: memoryview) -> ControlMessage:
    try:
        return _control.decode(frame)
    except (ValueError, RecursionError) as error:
        raise bad_tagged("control", error, frame, ControlMessage) from None


def _check_steps(header: Header, request: InferenceRequest) -> None:
    """Raise WireError bad_request unless the tensor has one row a token and the documented fields
    repeat the first step."""
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
        check_tensor(request, dtype, rows)
        return
    check_shape(request, rows)
    if len(request.data) or len(header.handed.rows) != len(header.steps):
        raise WireError("bad_request", "header.handed: expected no data beside it, and a row for each step")
