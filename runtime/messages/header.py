"""The header frame: everything zrt adds to the documented schemas.

It travels as a msgpack array in the first frame of every multipart between zrt actors. Fields are
only ever appended, so that an older reader takes a newer header.
"""

from typing import Annotated, Final

from msgspec import Meta, Struct

PROTOCOL: Final = 1

U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
U64 = Annotated[int, Meta(ge=0)]
"""A whole number from 0; MessagePack itself has no integer from 2^64 on."""
Name = Annotated[str, Meta(max_length=64)]
"""An actor's name."""
Label = Annotated[str, Meta(max_length=1024)]
"""An endpoint, a host, a device, a reference: short enough to be kept and shown."""
MOST_STAGES: Final = 1024
"""The most stages of a route."""
MOST_STEPS: Final = 65_536
"""The most steps of one message: one per session, so far more than one stage holds."""


class HopTime(Struct, array_like=True, frozen=True):
    """What one stage spent on one step, in microseconds: waiting for its turn, and computing the
    turn. `encode` is the time it took to hand on the results of its previous turn (this step's own
    is not known when it leaves). `lent` is the part of `compute` that layer workers took, there and
    back."""

    queue: U64
    compute: U64
    encode: U64 = 0
    lent: U64 = 0


class Step(Struct, array_like=True):
    """One forward of `n` tokens of one session through one stage; the rows of the body's tensor
    follow the order of the steps.

    `until` is the index of the last stage the step visits (a replay ends where the history is no
    longer lacking); -1 is the whole route, whose last stage samples. `times` grows by one entry a
    stage.
    """

    session: U64
    epoch: U64
    seq_pos: U32
    n: Annotated[int, Meta(ge=1, le=2**32 - 1)]
    slot: U32 = 0
    until: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = -1
    times: Annotated[list[HopTime], Meta(max_length=MOST_STAGES)] = []


class HandedOver(Struct, array_like=True, frozen=True):
    """Rows that lie in the sender's memory, for a process of the same machine to read (see
    compute/shared_rows/channel.py).

    The memory is the file `fd` of process `pid`, whose inode is `inode`: `places` places of
    `place_bytes` each. The rows are in place `place` once the flag beside it says `turn`; `rows`
    says which row is each step's first, in the order of the header's steps. `number` counts the
    rows that were ever put there, from 1.
    """

    pid: U32
    fd: U32
    inode: U64
    places: U32
    place_bytes: U64
    place: U32
    turn: U32
    rows: Annotated[list[U32], Meta(max_length=MOST_STEPS)] = []
    number: U32 = 0


class Header(Struct, array_like=True):
    """The envelope of one message.

    `sender` and `incarnation` name the sending process; `to` is the incarnation that it believes it
    sends to (0: not known yet). `request` pairs a reply with its request (0: no reply expected);
    `reply` tells which of the two this message is. `silence_ms` is how long the sender still waits
    without a sign of life (0: it does not wait). It is never an absolute time, since clocks differ.
    `body` names the schema of the body (see wire.SCHEMAS), `dtype` the elements of its tensor data.
    `near` names the sender's machine, and offers to hand rows over in memory to a process on the
    same machine; `handed` says where the rows are that the body leaves out.
    """

    version: int
    sender: Name
    incarnation: U64
    to: U64 = 0
    request: U64 = 0
    reply: bool = False
    model: Label = ""
    silence_ms: U64 = 0
    body: Label = ""
    dtype: Label = ""
    steps: Annotated[list[Step], Meta(max_length=MOST_STEPS)] = []
    near: Label = ""
    handed: HandedOver | None = None
