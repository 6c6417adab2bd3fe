"""A routed session as one stage sees it: where its results go, and at the last stage how far the
ring may run. Pure."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zrt.runtime.errors import ZrtError
from zrt.runtime.formatting import counted
from zrt.runtime.messages.control import Address
from zrt.runtime.messages.header import HopTime, Step
from zrt.runtime.messages.sessions import Open

if TYPE_CHECKING:
    from zrt.runtime.compute.sampler import Sampler


@dataclass(slots=True)
class StageSession:
    """A session's entry in a stage's table. `length` is the history's length as far as this stage
    knows; the last stage makes it grow, by what its `sampler` picks."""

    session: int
    epoch: int
    slot: int
    stage: int
    route: list[Address]
    length: int
    eos: frozenset[int]
    max_length: int
    credit: int
    gather: bool = False
    sampler: "Sampler | None" = None
    held: int | None = field(default=None)  # a token that waits for credit
    begun: bool = False  # the step after the token that is being picked is on its way already
    over: bool = False  # it was in vain, and is to be dropped

    @classmethod
    def opened(cls, message: Open) -> "StageSession":
        """Return the session that a message opens. ZrtError bad_request: the message does not make
        sense."""
        if not 0 <= message.stage < len(message.route):
            raise ZrtError("bad_request", f"open: stage {message.stage} is not on a route of {len(message.route)}")
        if message.length < 1:
            raise ZrtError("bad_request", f"open: length {message.length}, a history has at least one token")
        if message.tokens and len(message.tokens) != message.length:
            text = f"open: {counted(len(message.tokens), 'token')} for a history of length {message.length}"
            raise ZrtError("bad_request", text)
        return cls(
            message.session,
            message.epoch,
            message.slot,
            message.stage,
            message.route,
            message.length,
            frozenset(message.eos),
            message.max_length,
            message.credit,
            message.gather and message.stage == 0,
        )

    @property
    def before(self) -> Address:
        """The stage before this one; before the first comes the last, which closes the ring."""
        return self.route[self.stage - 1]

    @property
    def is_last(self) -> bool:
        return self.stage == len(self.route) - 1

    def ends(self, until: int) -> bool:
        """Return whether a step with this `until` goes no further than here."""
        return self.is_last or self.stage == until

    def samples(self, seq_pos: int, n: int, until: int) -> bool:
        """Return whether a step with these tokens is followed by a new token picked here: the step
        ends the history, and the whole route was meant."""
        return self.is_last and until == -1 and seq_pos + n == self.length

    @property
    def next(self) -> Address:
        """The stage after this one; after the last comes the first."""
        return self.route[(self.stage + 1) % len(self.route)]

    def begin_next(self) -> Step | None:
        """Return the ring's next step before its token, which is being picked, is known, if there
        will be one whatever token that is. The step is in vain only if generation ends."""
        length = self.length + 1
        if self.over or self.begun or length >= min(self.max_length, self.credit):
            return None
        self.begun = True
        return Step(self.session, self.epoch, length - 1, 1, self.slot)

    def failed(self) -> None:
        """Take it that no token was picked: a step that was begun for it is in vain."""
        self.begun, self.over = False, self.begun

    def sampled(self, token: int) -> Step | None:
        """Take the token picked here; return the ring's next step, unless it has begun, generation
        ends or credit ran out."""
        self.length += 1
        begun, self.begun = self.begun, False
        if token in self.eos or self.length >= self.max_length:
            self.over = begun
            return None
        if begun:
            return None
        self.held = token
        return self._release()

    def grant(self, upto: int, slot: int) -> tuple[int, Step] | None:
        """Take more credit, in this slot from now on; return the token and the step that waited for
        credit, if any."""
        self.credit = max(self.credit, upto)
        self.slot = slot
        token = self.held
        step = self._release() if token is not None else None
        return (token, step) if token is not None and step is not None else None

    def _release(self) -> Step | None:
        if self.length >= self.credit:
            return None
        self.held = None
        return Step(self.session, self.epoch, self.length - 1, 1, self.slot)

    def onward(self, step: Step, seq_pos: int, n: int, spent: HopTime) -> Step:
        """Return the step as it goes on from here: the tokens that ran, and the time they took."""
        return Step(step.session, step.epoch, seq_pos, n, step.slot, step.until, [*step.times, spent])
