"""The orders of a turn, and its results."""

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor

from zrt.runtime.compute.sampler import Picked, Sampler, pick
from zrt.runtime.compute.shared_rows.channel import HandedRows, Outlet
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.header import HandedOver


@dataclass(frozen=True, slots=True)
class Work:
    """One step of a turn: `rows` are token ids int64 [n] on the first stage, hidden states [n,
    hidden] elsewhere; on a GPU another process may hand them over.

    With a `sampler`, the last stage picks the token that follows the step's last one; with
    `logits`, it returns that position's logits. `best`: the token that follows is picked elsewhere,
    as the greatest logit's. A session that is not open yet is made where its first step, of `opens`
    tokens in all, begins.
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
        """Return the rows, where they are not handed over by another process."""
        assert isinstance(self.rows, Tensor)
        return self.rows

    @property
    def asks(self) -> bool:
        """Return whether the logits after the step's last token are asked for."""
        return self.sampler is not None or self.logits

    @property
    def takes_best(self) -> bool:
        """Return whether only the greatest logit's token is asked for."""
        return self.best or (self.sampler is not None and self.sampler.greedy and self.sampler.plain)

    @property
    def takes_pick(self) -> bool:
        """Return whether only a token is asked for, and a device can pick it."""
        return self.best or (self.sampler is not None and self.sampler.plain)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one step. `have` is the number of tokens that the stage holds afterwards. With
    a `fault` the step had no effect.

    `first` is the step's first row in the turn's output, -1 if it has none. `picked` is the token
    that was asked for, or why there is none although the step ran.
    """

    have: int
    fault: ZrtError | None = None
    first: int = -1
    picked: Picked | ZrtError | None = None

    @property
    def failure(self) -> ZrtError | None:
        """Return the error that ends the session's generation, if any."""
        return self.picked if isinstance(self.picked, ZrtError) else self.fault


@dataclass(frozen=True, slots=True)
class TurnResult:
    """The results of a turn. `output`: hidden states [Σn, hidden] of the steps that ran, or float32
    logits [k, vocab] of those that asked for logits.

    `handed` says where the hidden states lie if they were handed over instead: the device may not
    have computed them yet. `lent_us` is the part of the turn's time, in microseconds, that hops to
    layer workers took.
    """

    outcomes: list[Outcome]
    output: Tensor | None
    handed: HandedOver | None = None
    lent_us: int = 0


@dataclass(frozen=True, slots=True)
class Passing:
    """Where a turn's results go while it runs, on a GPU: hidden states to `outlet`, or the tokens
    of the greatest logits, int64 [steps that ran].

    `begun` is told, in the executor, where the tokens will lie, before they are known, and which of
    the turn's works they follow.
    """

    outlet: Outlet
    begun: Callable[[HandedOver, list[int]], None]


@dataclass(frozen=True, slots=True)
class BatchStep:
    """The forward of tokens `[seq_pos, seq_pos + n)` of one session. On the last stage `logits`
    asks for the logits of its last token.

    `rope_length` is the session's `ModelSpec.rope_length`; 0 fits a session that began with no more
    tokens than its model's rope was made for.
    """

    key: Hashable
    seq_pos: int
    n: int
    logits: bool = True
    rope_length: int = 0


@dataclass(frozen=True, slots=True)
class AdmittedSteps:
    """The steps of a turn that can run, with their works and the works' places in the turn, and the
    faults of the others by place."""

    steps: list[BatchStep]
    ran: list[Work]
    places: list[int]
    faults: dict[int, ZrtError]

    def outcomes(
        self,
        works: Sequence[Work],
        have: Callable[[Hashable], int],
        lost: Collection[int],
        picked: Sequence[Picked | ZrtError] | None,
    ) -> list[Outcome]:
        """Return the outcome of each work of the turn. `have` tells the tokens held of a session,
        `lost` are the ids of works whose rows never came, `picked` are the tokens of the works with
        a sampler; None where the output is hidden states."""
        outcomes, tokens, row = [], iter(picked or ()), 0
        for index, work in enumerate(works):
            if index in self.faults:
                outcomes.append(Outcome(have(work.key), self.faults[index]))
                continue
            rows = work.n if picked is None else int(work.asks)
            token = next(tokens) if work.sampler and picked is not None else None
            if id(work) in lost:
                fault = ZrtError("stage_lost", "the stage before is gone, and the rows it was to hand over with it")
                outcomes.append(Outcome(have(work.key), fault))
            else:
                outcomes.append(Outcome(work.seq_pos + work.n, None, row if rows else -1, token))
            row += rows
        return outcomes


def pick_tokens(
    ran: Sequence[Work], output: Tensor, vocab: int, best: Tensor | None, *, drawn: bool
) -> list[Picked | ZrtError]:
    """Pick the token of each work that has a sampler. `output` are the logits [k, vocab or more] of
    the works that ask for any; `best` and `drawn` are as `sampler.pick` has them."""
    asking = [work for work in ran if work.asks]
    rows = [row for row, work in enumerate(asking) if work.sampler]
    if not rows:
        return []
    samplers = [work.sampler for work in asking if work.sampler]
    positions = [work.seq_pos + work.n for work in asking if work.sampler]
    logits = output[:, :vocab]  # a head may be padded
    if len(rows) == len(asking):
        return pick(logits, samplers, positions, best, drawn=drawn)
    return pick(logits[rows], samplers, positions)


@dataclass(frozen=True, slots=True)
class Picking:
    """How the caller of a forward uses its logits. `alone`: only through the tokens that the device
    picks from them.

    `draw` says for each row how its token is picked (Sampler.knobs); empty: all rows are greedy.
    `begun` is given the tokens, int64 [rows] on the device, before they are known to the host, if
    only they are taken and if that is possible. `asked` is called when the device has been given
    all work of this turn.
    """

    alone: bool = False
    draw: Sequence[tuple[float, ...]] = ()
    begun: Callable[[Tensor], None] | None = None
    asked: Callable[[], None] | None = None


LOGITS = Picking()
"""The picking of a caller that takes the logits and picks by itself."""
