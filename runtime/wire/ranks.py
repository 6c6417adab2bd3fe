"""Messages of tensor-parallel ranks, as JSON."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from zrt.runtime.messages.header import Header
from zrt.runtime.messages.ranks import StepBatch, WorkerRequest, WorkerResponse
from zrt.runtime.wire.codecs import Undecodable, helexa
from zrt.runtime.wire.decode_errors import WireError
from zrt.runtime.wire.limits import MAX_FRAME, MAX_HEADER, attach, view_of, written

if TYPE_CHECKING:
    from typing_extensions import Buffer


def decode_rank_request(frame: "Buffer") -> WorkerRequest:
    """Return the request in a frame. WireError unknown_op (no such `op`), bad_request,
    too_large."""
    view = view_of(frame, MAX_FRAME)
    try:
        return helexa.read_request(view)
    except Undecodable as error:
        raise _bad_op(error) from None


def decode_rank_response(frame: "Buffer") -> WorkerResponse:
    """Return the response in a frame. WireError as for `decode_rank_request`."""
    view = view_of(frame, MAX_FRAME)
    try:
        return helexa.read_response(view)
    except Undecodable as error:
        raise _bad_op(error) from None


def encode_rank(message: WorkerRequest | WorkerResponse) -> bytes:
    """Return a bare request or response as bytes. ZrtError too_large."""
    return written(helexa.write(message), MAX_FRAME)


def _bad_op(error: Undecodable) -> WireError:
    return WireError("unknown_op" if isinstance(error, helexa.UnknownOp) else "bad_request", str(error))


def read_ranks(header: Header, frames: "Sequence[Buffer]") -> WorkerRequest | WorkerResponse:
    body = view_of(frames[1], MAX_HEADER)
    if header.reply and len(frames) == 2:
        return decode_rank_response(body)
    request = decode_rank_request(body)
    if len(frames) == 3:
        if not isinstance(request, StepBatch):
            raise WireError("bad_request", "a data frame goes with a step_batch alone")
        attach(request, frames[2])
    return request
