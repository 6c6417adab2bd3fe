"""Messages of clients, and the events sent to them."""

from typing import TYPE_CHECKING, Final

from msgspec.msgpack import Decoder, Encoder

from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.client import ClientEvent, ClientRequest
from zrt.runtime.wire.decode_errors import bad_tagged
from zrt.runtime.wire.limits import MAX_CLIENT_FRAME, view_of, written

if TYPE_CHECKING:
    from typing_extensions import Buffer

_encoder: Final = Encoder()
_client: Final[Decoder[ClientRequest]] = Decoder(ClientRequest)
_event: Final[Decoder[ClientEvent]] = Decoder(ClientEvent)


def encode_client(request: ClientRequest) -> bytes:
    """Return a client's request as bytes. ZrtError too_large; bad_request: a text is not Unicode
    (Python's strings may hold half a character)."""
    try:
        return written(_encoder.encode(request), MAX_CLIENT_FRAME)
    except UnicodeEncodeError:
        raise ZrtError("bad_request", "the text cannot be written as UTF-8") from None


def decode_client(frame: "Buffer") -> ClientRequest:
    """Return the request in a frame. WireError bad_request (names the field), unknown_op (no such
    `type`) or too_large, with the request's id where it can be read."""
    view = view_of(frame, MAX_CLIENT_FRAME)
    try:
        return _client.decode(view)
    except (ValueError, RecursionError) as error:
        raise bad_tagged("request", error, view, ClientRequest) from None


def encode_event(event: ClientEvent) -> bytes:
    """Return an event as bytes. ZrtError too_large."""
    return written(_encoder.encode(event), MAX_CLIENT_FRAME)


def decode_event(frame: "Buffer") -> ClientEvent:
    """Return the event in a frame. WireError as for `decode_client`."""
    view = view_of(frame, MAX_CLIENT_FRAME)
    try:
        return _event.decode(view)
    except (ValueError, RecursionError) as error:
        raise bad_tagged("event", error, view, ClientEvent) from None
