"""What a turn is asked to do, and what it gives."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from torch import Tensor

from zrt.runtime.compute.handover import HandedRows, Outlet
from zrt.runtime.compute.sampling import Picked, Sampler
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.header import HandedOver


@dataclass(frozen=True, slots=True)
class Work:
    """One step of a turn: `rows` are token ids int64 [n] on the first stage, hidden states [n, hidden] elsewhere; on a GPU they may be ones
    that another process hands over.

    With a `sampler`, the last stage picks the token that follows the step's last one; with `logits`, it returns that position's logits.
    `best`: somebody else picks the token that follows, and takes the greatest logit's.
    A session that nobody opened is made where its first step, of `opens` tokens in all, begins.
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
    """What became of one step. `have` is what the stage holds afterwards. With a `fault` nothing of it happened.

    `first` is the step's first row in the turn's output, -1 if it has none. `picked` is the token that was asked for, or why there is none
    although the step ran.
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
    """`output`: hidden states [Σn, hidden] of the steps that ran, or float32 logits [k, vocab] of those that asked for them.

    `handed` says where the hidden states lie if they were handed over instead: the device may not have computed them yet. `lent_us` is what
    hops to layer workers took of the turn.
    """

    outcomes: list[Outcome]
    output: Tensor | None
    handed: HandedOver | None = None
    lent_us: int = 0


@dataclass(frozen=True, slots=True)
class Passing:
    """Where a turn's results go while it runs, on a GPU: hidden states to `outlet`, or the greatest logits' tokens, int64 [steps that ran].

    `begun` is told, in the lane, where the tokens will lie, before anybody knows them, and which of the turn's works they follow.
    """

    outlet: Outlet
    begun: Callable[[HandedOver, list[int]], None]
