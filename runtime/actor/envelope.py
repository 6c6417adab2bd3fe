"""What an actor's handlers get and return."""

from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeAlias, TypeVar

from zrt.runtime.messages.control import Control
from zrt.runtime.messages.header import Header, Step
from zrt.runtime.messages.inference import InferenceRequest
from zrt.runtime.messages.layers import LayerMessage
from zrt.runtime.messages.ranks import RankMessage
from zrt.runtime.wire.envelopes import Body


class Envelope(NamedTuple):
    """A message that arrived. `peer` is the sender's routing id at our mailbox, b"" for what came
    back over one of our links."""

    header: Header
    body: Body
    peer: bytes


class Bare(NamedTuple):
    """A single frame from a foreign or scripted peer. `echo`: an empty frame came before it (a REQ
    socket) and goes before each reply."""

    peer: bytes
    frame: bytes | memoryview
    echo: bool


class Reply(NamedTuple):
    """An answer whose header also carries `steps`."""

    body: Body
    steps: list[Step]


Answer: TypeAlias = Control | InferenceRequest | RankMessage | LayerMessage | Reply | None
_Body = TypeVar("_Body")
Handler: TypeAlias = Callable[[_Body, Envelope], Answer | Awaitable[Answer]]
"""A function of a message's body, of the type it was registered for, and the message's envelope;
returns the answer."""
