"""Messages about sessions on a route: opened, credited and closed by the coordinator; sampled,
filled and failed by stages.

The steps themselves are `InferenceRequest`s (inference.py).
"""

from typing import Annotated

from msgspec import Meta, Struct

from zrt.runtime.messages.control import Address, Control, Fault
from zrt.runtime.messages.header import MOST_STAGES, U32, U64, HopTime
from zrt.runtime.messages.sampling import Sampling, TokenLogprobs


class SampledToken(Struct, array_like=True):
    """One token that the last stage picked, at history index `index`; `times` are its step's, one
    entry per stage.

    `logprobs` is there if the session asked for log-probabilities.
    """

    session: U64
    epoch: U64
    index: U64
    token: U32
    times: list[HopTime] = []
    logprobs: TokenLogprobs | None = None


class Sampled(Control):
    """Tokens picked in one turn of the last stage."""

    tokens: list[SampledToken]


class Filled(Control):
    """Notice that stage `stage` has run a replay, or a chunk of a prompt, up to `upto` tokens."""

    session: U64
    epoch: U64
    stage: int
    upto: U64


class StepFailed(Control):
    """Notice that a step could not be run. With `kv_gap`, `have` is how many tokens the stage
    holds: the coordinator replays from there."""

    session: U64
    epoch: U64
    stage: int
    have: U64
    fault: Fault


class Open(Control):
    """Request to adopt this epoch of a session before any of its steps; the reply is `Opened`.

    `route` are the replicas in stage order and `stage` the receiver's place in it. `length` is the
    number of tokens the history has now, `prompt_length` how many of them are the prompt, and
    `page_keys` name its full pages (see page_keys.py). With `gather` the first stage runs its steps
    together with those of its slot that are on their way. Only the last stage is told the token
    ids, where generation stops (`eos`: the ids that end it; `max_length`: the history's largest
    length), how to sample, and `credit`: the history length up to which the ring may run unasked.
    """

    session: U64
    epoch: U64
    slot: U64
    stage: int
    route: Annotated[list[Address], Meta(max_length=MOST_STAGES)]
    length: U64
    page_keys: list[U64] = []
    prompt_length: U64 = 0
    gather: bool = False
    tokens: list[U32] = []
    eos: list[U32] = []
    max_length: U64 = 0
    credit: U64 = 0
    sampling: Sampling = Sampling()


class Opened(Control):
    """Answer to Open: how many tokens of the session's history the stage holds."""

    have: U64


class Credit(Control):
    """Permission for the ring to grow the history up to `upto` tokens, from now on in micro-batch
    `slot`."""

    session: U64
    epoch: U64
    upto: U64
    slot: U64 = 0


class Close(Control):
    """Request to free what the receiver holds of the session; unknown sessions are ignored. Epochs
    older than `epoch` are dead afterwards.

    `page_keys` name the full pages of its history: held pages stay as cache for sessions with an
    equal prefix.
    """

    session: U64
    epoch: U64
    page_keys: list[U64] = []


class HandOver(Control):
    """Notice from a block server to the previous one on a route: with `takes`, rows for the sender
    may lie in memory from now on, as the receiver offered (`Header.near`); without it, they are to
    come as bytes again."""

    takes: bool = True


SessionMessage = Sampled | Filled | StepFailed | Open | HandOver | Opened | Credit | Close
