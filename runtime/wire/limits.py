"""The limits on the size of frames, and the checks of every reader and writer."""

from typing import TYPE_CHECKING, Final

from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.inference import InferenceRequest
from zrt.runtime.messages.ranks import StepBatch
from zrt.runtime.wire.decode_errors import WireError

if TYPE_CHECKING:
    from typing_extensions import Buffer

INLINE: Final = 16 * 1024
"""The bytes of tensor data from which on the data travels as a frame of its own."""
MAX_FRAME: Final = 512 * 1024 * 1024
"""The most bytes of one frame between actors, and of a bare inference message."""
MAX_CLIENT_FRAME: Final = 16 * 1024 * 1024
"""The most bytes of one frame at the client endpoint, either way."""
MAX_HEADER: Final = 16 * 1024 * 1024
"""The most bytes of a header frame, and of a control message."""
MAX_HOLLOW: Final = 1024 * 1024
"""The most bytes of an inference message behind a header: its data is below INLINE, or in a frame
of its own. Reading more, value by value, takes long."""


def octets(data: memoryview) -> memoryview:
    """Return the memory of `data` as flat bytes."""
    if data.format == "B" and data.ndim == 1:
        return data
    return data.cast("B") if data.nbytes else memoryview(b"")


def view_of(frame: "Buffer", limit: int) -> memoryview:
    """Return a received frame as flat bytes. WireError too_large."""
    view = octets(memoryview(frame))
    if len(view) > limit:
        raise WireError("too_large", f"a frame of {len(view)} bytes, the limit is {limit}")
    return view


def check_room(size: int, limit: int) -> None:
    """Raise ZrtError too_large if a frame of `size` bytes, which is to be sent, exceeds `limit`."""
    if size > limit:
        raise ZrtError("too_large", f"a frame of {size} bytes, the limit is {limit}")


def written(frame: bytes, limit: int) -> bytes:
    check_room(len(frame), limit)
    return frame


def attach(request: InferenceRequest | StepBatch, data: "Buffer") -> None:
    """Give a request the data that came in a frame of its own. WireError bad_request: the request
    has data already; too_large."""
    if len(request.data) != 0:
        raise WireError("bad_request", "data: expected none in the body beside a data frame")
    request.data = view_of(data, MAX_FRAME)
