"""A session as the coordinator keeps it: token history, text, and the state machine. Pure: no
sockets, no clock. Only the methods here write a session.

The history is the truth: every stage's KV can be rebuilt from it, so a session outlives any process
that ran it.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.client import FinishReason
from zrt.runtime.messages.control import Address
from zrt.runtime.messages.sampling import Sampling, TokenLogprobs
from zrt.runtime.text.stop_strings import StopMatcher


class SessionState(StrEnum):
    TOKENISING = "tokenising"  # its prompt is a text yet
    QUEUED = "queued"  # not admitted yet
    PREFILL = "prefill"  # opened, the prompt is being run
    DECODING = "decoding"
    PREEMPTED = "preempted"  # back in the queue: a stage ran out of KV pages
    PARKED = "parked"  # its replica was drained and there is no other: nothing is held but the history
    WAITING = "waiting"  # no complete route: a stage is starting, loading or lost
    REPLAYING = "replaying"  # on a new route that is being filled from the history
    FINISHED = "finished"


_ANY_TIME = frozenset({SessionState.WAITING, SessionState.PARKED, SessionState.PREEMPTED, SessionState.FINISHED})
MOVES: dict[SessionState, frozenset[SessionState]] = {
    SessionState.TOKENISING: frozenset({SessionState.QUEUED, SessionState.FINISHED}),
    SessionState.QUEUED: _ANY_TIME | {SessionState.PREFILL},
    SessionState.PREEMPTED: _ANY_TIME | {SessionState.PREFILL, SessionState.REPLAYING},
    SessionState.PARKED: _ANY_TIME | {SessionState.PREFILL, SessionState.REPLAYING},
    SessionState.PREFILL: _ANY_TIME | {SessionState.PREFILL, SessionState.DECODING, SessionState.REPLAYING},
    SessionState.DECODING: _ANY_TIME | {SessionState.REPLAYING},
    SessionState.WAITING: _ANY_TIME | {SessionState.PREFILL, SessionState.REPLAYING},
    SessionState.REPLAYING: _ANY_TIME | {SessionState.DECODING, SessionState.REPLAYING},
    SessionState.FINISHED: frozenset(),
}


class TextStream(Protocol):
    """Turns ids into text that never changes afterwards."""

    def push(self, token: int) -> str: ...
    def finish(self) -> str: ...


@dataclass(frozen=True, slots=True)
class TextPiece:
    """What may be shown now: `index` counts the generated tokens before `token_ids`; `finish` is
    set on the last piece.

    `logprobs` has one entry a token, None if the session did not ask for them.
    """

    index: int
    text: str
    token_ids: list[int]
    finish: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None


@dataclass(slots=True)
class Session:
    """One generation, from the arrival of its request on. `tokens` (uint32) is the whole history
    (prompt, then generated), empty until the prompt is tokenised; `max_length` bounds its length,
    `eos` are the ids that end it."""

    id: int
    eos: frozenset[int]
    sampling: Sampling
    stops: StopMatcher
    state: SessionState = SessionState.TOKENISING
    tokens: "array[int]" = field(default_factory=lambda: array("I"))
    max_length: int = 0
    detokeniser: TextStream | None = None
    epoch: int = 0
    route: list[Address] = field(default_factory=list)
    slot: int = 0
    credit: int = 0
    prompt_tokens: int = 0
    reason: FinishReason | None = None
    _shown: int = field(init=False, default=0)
    _logprobs: list[TokenLogprobs] = field(init=False, default_factory=list)  # of the tokens not shown yet

    @property
    def completion_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def finished(self) -> bool:
        return self.state is SessionState.FINISHED

    def move(self, state: SessionState) -> None:
        """Go to another state. ZrtError internal: there is no such move from this one."""
        if state not in MOVES[self.state]:
            raise ZrtError("internal", f"session {self.id:016x} cannot go from {self.state} to {state}")
        self.state = state

    def begin(self, prompt: Sequence[int], max_length: int, detokeniser: TextStream | None) -> None:
        """Take the prompt, now that it is token ids; without a detokeniser the answer is ids
        alone."""
        self.move(SessionState.QUEUED)
        self.tokens = array("I", prompt)
        self.prompt_tokens = len(prompt)
        self.max_length = max_length
        self.detokeniser = detokeniser

    # ---- where it runs ---------------------------------------------------------------------------

    def begin_epoch(self) -> int:
        """Begin a new epoch, and return its number: what still runs under an older one is dead."""
        self.epoch += 1
        return self.epoch

    def reroute(self, route: Sequence[Address]) -> None:
        """Run on these replicas from now on, one a stage; none: nowhere."""
        self.route = list(route)

    def take_slot(self, slot: int) -> None:
        """Run in this micro-batch slot from now on."""
        self.slot = slot

    def extend_credit(self, tokens: int) -> None:
        """Let the ring produce so many tokens beyond the history as it is now."""
        self.credit = len(self.tokens) + tokens

    def preempt(self) -> None:
        """Stop running, to go back to the queue."""
        self.begin_epoch()
        self.move(SessionState.PREEMPTED)

    def park(self) -> None:
        """Stop running, to hold nothing but the history."""
        self.begin_epoch()
        self.move(SessionState.PARKED)

    # ---- its tokens ------------------------------------------------------------------------------

    def push(self, index: int, token: int, logprobs: TokenLogprobs | None = None) -> TextPiece | None:
        """Take the token that stands at history index `index`; return the piece that may be shown
        now, if any.

        A token the history already holds is ignored (a repeat). ZrtError kv_gap: the token is
        beyond the history's end, so something was lost.
        """
        if self.finished or index < len(self.tokens):
            return None
        if index > len(self.tokens):
            raise ZrtError("kv_gap", f"session {self.id:016x}: token {index} came, {len(self.tokens)} was awaited")
        self.tokens.append(token)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        if token in self.eos:
            return self.finish("stop")
        text = self._before_stop(self.detokeniser.push(token), token) if self.detokeniser else ""
        if self.stops.matched is not None:
            return self._end("stop", text)
        if len(self.tokens) >= self.max_length:
            return self.finish("length", text)
        return self._piece(text) if text or not self.detokeniser else None

    def finish(self, reason: FinishReason, text: str = "") -> TextPiece:
        """End the session, and return the last piece: what the detokeniser and the stop matcher
        still hold back, up to a stop in it."""
        if self.detokeniser and self.stops.matched is None:
            text += self._before_stop(self.detokeniser.finish())
            if self.stops.matched is None:
                text += self.stops.finish()
            elif reason == "length":
                reason = "stop"
        return self._end(reason, text)

    def _before_stop(self, text: str, token: int | None = None) -> str:
        """Return what of the text surely stands before any stop string; none is looked for in the
        text of the first `min_tokens` tokens."""
        return self.stops.push(text, token, look=self.completion_tokens > self.sampling.min_tokens)

    def _end(self, reason: FinishReason, text: str) -> TextPiece:
        self.move(SessionState.FINISHED)
        self.reason = reason
        return self._piece(text)

    def _piece(self, text: str) -> TextPiece:
        index, self._shown = self._shown, self.completion_tokens
        logprobs, self._logprobs = self._logprobs, []
        asked = self.sampling.logprobs is not None
        token_ids = self.tokens[self.prompt_tokens + index :].tolist()
        return TextPiece(index, text, token_ids, self.reason, logprobs if asked else None)


@dataclass(frozen=True, slots=True)
class ReplaySpan:
    """Tokens [start, stop) of the history, to be run from stage 0 through stage `until` (-1: the
    whole route, which samples)."""

    start: int
    stop: int
    until: int


def replay_spans(have: Sequence[int], length: int) -> list[ReplaySpan]:
    """Return what to send so that every stage holds the history and its last token is sampled from.

    `have[i]` is how many of the `length` tokens stage i holds. Stages behind the last one that
    lacks something keep their cache: the replay ends before them, and the last token alone takes
    the whole route.
    """
    last = length - 1
    held = [min(n, last) for n in have]
    start = min(held)
    lacking = [stage for stage, n in enumerate(held) if n < last]
    if not lacking or lacking[-1] == len(held) - 1:
        return [ReplaySpan(start, length, -1)]
    return [ReplaySpan(start, last, lacking[-1]), ReplaySpan(last, length, -1)]
