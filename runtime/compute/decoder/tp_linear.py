"""The products that a rank of a tensor-parallel group computes otherwise than a whole shard: their
results are summed or gathered over the ranks.

A block stays in step with the other ranks by two sums: after the o product and after the down
product. Everything between is a rank's own.
"""

from typing import Final, Protocol

import torch
from torch import Tensor

from zrt.runtime.compute.decoder.linear import Linear
from zrt.runtime.errors import ZrtError
from zrt.runtime.models.architecture.spec import ModelSpec

LEADER: Final = 0


class Collectives(Protocol):
    """The operations that the ranks of a group do together; every rank calls the same operations in
    the same order with tensors of the same shape."""

    rank: int
    world: int

    def all_reduce(self, x: Tensor) -> None:
        """Replace the contiguous `x` by its sum over all ranks."""

    def gather(self, x: Tensor) -> Tensor | None:
        """Return each rank's contiguous `x`, [world, *x.shape], at the leader; None at the other
        ranks."""

    def broadcast(self, x: Tensor) -> None:
        """Replace the contiguous `x` by the leader's values at all ranks."""


class RowParallelLinear:
    """A product of which each rank holds some of the inputs: the ranks' results are summed."""

    def __init__(self, product: Linear, group: Collectives) -> None:
        self.product = product
        self._group = group

    def write(self, x: Tensor, out: Tensor) -> None:
        self.product.write(x, out)
        self._group.all_reduce(out)

    def add(self, x: Tensor, out: Tensor) -> None:
        summand = torch.empty_like(out)
        self.write(x, summand)
        out.add_(summand)

    def rows(self, ids: Tensor, out: Tensor) -> None:
        raise ZrtError("internal", "a weight whose columns are on several ranks has no rows to look up")


class VocabularyLinear:
    """Embedding or head, of which rank r holds the r-th run of `count` rows of the vocabulary.

    When used as a head it gives the leader all logits, less the padding; at the other ranks `out`
    is left alone.
    """

    def __init__(self, own: Linear, count: int, group: Collectives) -> None:
        self.own = own
        self._count = count
        self._group = group

    def write(self, x: Tensor, out: Tensor) -> None:
        logits = torch.empty(len(x), self._count, dtype=out.dtype, device=out.device)
        self.own.write(x, logits)
        self.collect(logits, out)

    def collect(self, logits: Tensor, out: Tensor) -> None:
        """Write all logits to `out` at the leader, from each rank's own [rows, count]."""
        parts = self._group.gather(logits)
        if parts is not None:
            out.copy_(parts.transpose(0, 1).flatten(1)[:, : out.shape[1]])

    def add(self, x: Tensor, out: Tensor) -> None:
        logits = torch.zeros_like(out)
        self.write(x, logits)
        out.add_(logits)

    def rows(self, ids: Tensor, out: Tensor) -> None:
        """Write the rows of these ids to `out`, exactly: all summands but one are 0."""
        own = ids - self._group.rank * self._count
        elsewhere = (own < 0) | (own >= self._count)
        self.own.rows(own.masked_fill(elsewhere, 0), out)
        out.masked_fill_(elsewhere.unsqueeze(1), 0)
        self._group.all_reduce(out)


class NormsOverRanks:
    """RMSNorm of q and of k over all their heads at once, of which each rank has some: only the
    sums of squares are exchanged."""

    def __init__(self, spec: ModelSpec, group: Collectives, device: torch.device) -> None:
        """Count the numbers that each norm runs over, on all ranks. `spec` is this rank's."""
        self._eps = spec.norm_eps
        self._group = group
        q, k = (heads * group.world * spec.head_dim for heads in (spec.num_heads, spec.num_kv_heads))
        # A kv head that several ranks hold is summed as often as it is counted.
        self._counts = torch.tensor([[q, k]], dtype=torch.float32, device=device)

    def __call__(self, q: Tensor, q_weight: Tensor, k: Tensor, k_weight: Tensor) -> None:
        """Norm q and k in place, as `rms_norm`: q [rows, q width], k [rows, k width]."""
        wide = q.float(), k.float()
        squares = torch.stack([x.square().sum(-1) for x in wide], dim=1)  # float32 [rows, 2]
        self._group.all_reduce(squares)
        scales = (squares / self._counts).add_(self._eps).rsqrt_()
        for x, own, weight, scale in zip(
            (q, k), wide, (q_weight, k_weight), scales.unsqueeze(2).unbind(1), strict=True
        ):
            if weight.dtype == x.dtype:
                x.copy_(own.mul(scale))
                x.mul_(weight)
            else:
                x.copy_(own.mul(scale).mul_(weight))
