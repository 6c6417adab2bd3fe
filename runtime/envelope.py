"""What an actor's handlers get, and give."""

from typing import NamedTuple

from zrt.runtime.messages.header import Header, Step
from zrt.runtime.wire import Body


class Envelope(NamedTuple):
    """A message that arrived. `peer` is the sender's routing id at our mailbox, b"" for what came back over one of our links."""

    header: Header
    body: Body
    peer: bytes


class Bare(NamedTuple):
    """A single frame from a foreign or scripted peer. `echo`: an empty frame came before it (a REQ socket) and goes before each reply."""

    peer: bytes
    frame: bytes | memoryview
    echo: bool


class Reply(NamedTuple):
    """An answer whose header says more than whom it is for: `steps`."""

    body: Body
    steps: list[Step]
