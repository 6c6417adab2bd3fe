"""Bare inference messages, and the checks of every inference message."""

import math
from typing import TYPE_CHECKING, Final

from zrt.runtime.messages.inference import InferenceRequest, InferenceResponse
from zrt.runtime.wire.codecs import Undecodable, kwaai
from zrt.runtime.wire.decode_errors import WireError
from zrt.runtime.wire.limits import MAX_FRAME, check_room, view_of, written

if TYPE_CHECKING:
    from typing_extensions import Buffer

ELEMENT_BYTES: Final[dict[str, int]] = {"float32": 4, "bfloat16": 2, "float16": 2, "uint32": 4}
"""The bytes of an element by its `Header.dtype`. Token ids are uint32 (or unnamed), hidden states
one of the floats; all little-endian."""
LAST_POSITION: Final = 2**32 - 1


def decode_inference(frame: "Buffer") -> InferenceRequest:
    """Return the bare request in a frame: u32-LE token ids of shape [n], or f16-LE hidden states of
    shape [1, n, hidden], n >= 1.

    Whatever KwaaiNet's own decoder accepts is accepted (see codecs/kwaai.py); then shape, data and
    position are checked. WireError bad_request, too_large.
    """
    request = read_request(view_of(frame, MAX_FRAME))
    if request.payload_type == "token_ids":
        dtype, rows = "uint32", len(request.data) // ELEMENT_BYTES["uint32"]
    else:
        dtype, rows = "float16", request.shape[1] if len(request.shape) == 3 else 1
    check_tensor(request, dtype, rows)
    if rows == 0:
        raise WireError("bad_request", "shape: expected at least one token, got none")
    if request.seq_pos + rows > LAST_POSITION:
        raise WireError(
            "bad_request", f"seq_pos: expected seq_pos + n <= {LAST_POSITION}, got {request.seq_pos} + {rows}"
        )
    return request


def encode_inference(request: InferenceRequest, *, array: bool = False) -> bytes:
    """Return a bare request as bytes, for a block server or a KwaaiNet node. Both read `data` as
    bin; `array` writes it as the documented integers.

    ZrtError too_large.
    """
    check_room(memoryview(request.data).nbytes, MAX_FRAME)
    return written(kwaai.write(request, array=array), MAX_FRAME)


def encode_response(response: InferenceResponse, *, array: bool = False) -> bytes:
    """Return a bare reply as bytes; `array` as in `encode_inference`. ZrtError too_large."""
    check_room(memoryview(response.data).nbytes, MAX_FRAME)
    return written(kwaai.write(response, array=array), MAX_FRAME)


def decode_response(frame: "Buffer") -> InferenceResponse:
    """Return the bare reply in a frame. `data` is a slice of the frame where it is bin; `data` is
    not compared with `shape`. WireError bad_request, too_large."""
    try:
        return kwaai.read_response(view_of(frame, MAX_FRAME))
    except Undecodable as error:
        raise WireError("bad_request", f"deserialise InferenceResponse: {error}") from None


def read_request(frame: memoryview) -> InferenceRequest:
    try:
        return kwaai.read_request(frame)
    except Undecodable as error:
        raise WireError("bad_request", f"deserialise InferenceRequest: {error}") from None


def check_tensor(request: InferenceRequest, dtype: str, rows: int) -> None:
    """Raise WireError bad_request unless the shape is that of `rows` rows and `data` is as long as
    the shape says."""
    what, shape = check_shape(request, rows), request.shape
    size = math.prod(shape) * ELEMENT_BYTES[dtype]
    if len(request.data) != size:
        text = f"decode {what}: data: expected {size} bytes for {dtype} of shape {shape}, got {len(request.data)}"
        raise WireError("bad_request", text)


def check_shape(request: InferenceRequest, rows: int) -> str:
    """Return what the rows are called in messages. WireError bad_request unless `shape` is [rows]
    for token ids, [1, rows, hidden] for hidden states."""
    shape = request.shape
    if request.payload_type == "token_ids":
        what, fits, wanted = "token IDs", shape == [rows], f"[{rows}]"
    else:
        fits = len(shape) == 3 and shape[0] == 1 and shape[1] == rows and shape[2] > 0
        what, wanted = "hidden states", f"[1, {rows}, hidden]"
    if not fits:
        raise WireError("bad_request", f"decode {what}: shape: expected {wanted}, got {shape}")
    return what
