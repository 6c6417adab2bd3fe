"""What a turn is asked to do, and what it gives."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor

from zrt.runtime.compute.sampler import Picked, Sampler
from zrt.runtime.compute.shared_rows.channel import HandedRows, Outlet
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.header import HandedOver


@dataclass(frozen=True, slots=True)
class Work:
    """One step of a turn: `rows` are token ids int64 [n] on the first stage, hidden states [n,
    hidden] elsewhere; on a GPU they may be ones that another process hands over.

    With a `sampler`, the last stage picks the token that follows the step's last one; with
    `logits`, it returns that position's logits. `best`: somebody else picks the token that follows,
    and takes the greatest logit's. A session that nobody opened is made where its first step, of
    `opens` tokens in all, begins.
    """

    key: Hashable
    seq_pos: int
    n: int
    rows: Tensor | HandedRows
    sampler: Sampler | None = None
    logits: bool = False
    opens: int = 0
    best: bool = False

    @property
    def held(self) -> Tensor:
        """The rows, where nobody hands over any."""
        assert isinstance(self.rows, Tensor)
        return self.rows

    @property
    def takes_best(self) -> bool:
        """Whether the greatest logit's token is all that is asked for."""
        return self.best or (self.sampler is not None and self.sampler.greedy and self.sampler.plain)

    @property
    def takes_pick(self) -> bool:
        """Whether a token is all that is asked for, and one that a device can pick."""
        return self.best or (self.sampler is not None and self.sampler.plain)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one step. `have` is what the stage holds afterwards. With a `fault` nothing of
    it happened.

    `first` is the step's first row in the turn's output, -1 if it has none. `picked` is the token
    that was asked for, or why there is none although the step ran.
    """

    have: int
    fault: ZrtError | None = None
    first: int = -1
    picked: Picked | ZrtError | None = None

    @property
    def failure(self) -> ZrtError | None:
        """Why the session does not get on."""
        return self.picked if isinstance(self.picked, ZrtError) else self.fault


@dataclass(frozen=True, slots=True)
class TurnResult:
    """`output`: hidden states [Σn, hidden] of the steps that ran, or float32 logits [k, vocab] of
    those that asked for them.

    `handed` says where the hidden states lie if they were handed over instead: the device may not
    have computed them yet. `lent_us` is what hops to layer workers took of the turn.
    """

    outcomes: list[Outcome]
    output: Tensor | None
    handed: HandedOver | None = None
    lent_us: int = 0


@dataclass(frozen=True, slots=True)
class Passing:
    """Where a turn's results go while it runs, on a GPU: hidden states to `outlet`, or the greatest
    logits' tokens, int64 [steps that ran].

    `begun` is told, in the executor, where the tokens will lie, before anybody knows them, and
    which of the turn's works they follow.
    """

    outlet: Outlet
    begun: Callable[[HandedOver, list[int]], None]


@dataclass(frozen=True, slots=True)
class BatchStep:
    """The forward of tokens `[seq_pos, seq_pos + n)` of one session. On the last stage `logits`
    asks for those of its last token.

    `rope_length` is the session's `ModelSpec.rope_length`; 0 fits a session that began with no more
    tokens than its model's rope was made for.
    """

    key: Hashable
    seq_pos: int
    n: int
    logits: bool = True
    rope_length: int = 0


def session_name(key: Hashable) -> str:
    """A session as people are shown it: those that a coordinator counts in 16 hexadecimal digits,
    those of bare peers as they are kept."""
    return f"{key:016x}" if isinstance(key, int) else repr(key)


@dataclass(frozen=True, slots=True)
class Picking:
    """What the caller of a forward does with its logits. `alone`: nothing, but take what the device
    picks from them.

    `draw` says of each row how that is done (Sampler.knobs); empty: all are greedy. `begun` is
    given the tokens, int64 [rows] on the device, before anybody knows them, if they alone are taken
    and if that is possible. `asked` is called when the device has been told all of this turn.
    """

    alone: bool = False
    draw: Sequence[tuple[float, ...]] = ()
    begun: Callable[[Tensor], None] | None = None
    asked: Callable[[], None] | None = None


LOGITS = Picking()
"""The caller picks."""
