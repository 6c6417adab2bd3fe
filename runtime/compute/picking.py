"""What becomes of a forward's logits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Picking:
    """What the caller of a forward does with its logits. `alone`: nothing, but take what the device picks from them.

    `draw` says of each row how that is done (Sampler.knobs); empty: all are greedy. `begun` is given the tokens, int64 [rows] on the device,
    before anybody knows them, if they alone are taken and if that is possible. `asked` is called when the device has been told all of this turn.
    """

    alone: bool = False
    draw: Sequence[tuple[float, ...]] = ()
    begun: Callable[[Tensor], None] | None = None
    asked: Callable[[], None] | None = None


LOGITS = Picking()
"""The caller picks."""
