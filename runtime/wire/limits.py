"""How large frames may be, and what every reader and writer checks of them."""

from typing import TYPE_CHECKING, Final

from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.inference import InferenceRequest
from zrt.runtime.messages.ranks import StepBatch
from zrt.runtime.wire.decode_errors import WireError

if TYPE_CHECKING:
    from typing_extensions import Buffer

INLINE: Final = 16 * 1024
"""Bytes of tensor data from which they travel as a frame of their own."""
MAX_FRAME: Final = 512 * 1024 * 1024
"""Bytes of one frame between actors, and of a bare inference message."""
MAX_CLIENT_FRAME: Final = 16 * 1024 * 1024
"""Bytes of one frame at the client endpoint, either way."""
MAX_HEADER: Final = 16 * 1024 * 1024
"""Bytes of a header frame, and of a control message."""
MAX_HOLLOW: Final = 1024 * 1024
"""Bytes of an inference message behind a header: its data is below INLINE, or in a frame of its
own. Reading more, value by value, takes long."""


def octets(data: memoryview) -> memoryview:
    """Return the same memory as flat bytes."""
    if data.format == "B" and data.ndim == 1:
        return data
    return data.cast("B") if data.nbytes else memoryview(b"")


def view_of(frame: "Buffer", limit: int) -> memoryview:
    """Return a frame that came, as flat bytes. WireError too_large."""
    view = octets(memoryview(frame))
    if len(view) > limit:
        raise WireError("too_large", f"a frame of {len(view)} bytes, the limit is {limit}")
    return view


def check_room(size: int, limit: int) -> None:
    """Of a frame that is to be sent. ZrtError too_large."""
    if size > limit:
        raise ZrtError("too_large", f"a frame of {size} bytes, the limit is {limit}")


def written(frame: bytes, limit: int) -> bytes:
    check_room(len(frame), limit)
    return frame


def attach(request: InferenceRequest | StepBatch, data: "Buffer") -> None:
    """Give a request the data that came in a frame of its own. WireError."""
    if len(request.data) != 0:
        raise WireError("bad_request", "data: expected none in the body beside a data frame")
    request.data = view_of(data, MAX_FRAME)
