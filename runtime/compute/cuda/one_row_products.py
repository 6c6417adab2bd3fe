"""The products of one row on a GPU, for models of the plain kind: weights without bias, norms
before attention and MLP alone.

Each is a kernel that reads its weights at the speed of the memory, with norm, gate or residual
fused in (kernels/dense/gemv.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from zrt.runtime.compute.cuda.dense_launch import Product, one_row_product, shape_of
from zrt.runtime.compute.cuda.tuning import Tuning, worth_trying
from zrt.runtime.compute.decoder.linear import DenseLinear, Linear
from zrt.runtime.compute.decoder.shard import Block, Shard
from zrt.runtime.compute.decoder.tp_linear import Collectives, RowParallelLinear, VocabularyLinear
from zrt.runtime.compute.decoder.workspace import Views

Attend = Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Weights:
    """The weights of one block, [outputs, inputs] each; in a group, this rank's own."""

    attention_norm: Tensor
    qkv: Tensor
    o: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class PlainBlocks:
    """The blocks of a shard, made by `of`."""

    def __init__(self, weights: list[_Weights], eps: float, group: Collectives | None) -> None:
        """Choose a shape for each product. `_NotPlain`: the sizes do not suit the kernel."""
        self._weights = weights
        self._eps = eps
        self._group = group
        one = weights[0]
        self._qkv, self._o, self._down = (_shape(weight) for weight in (one.qkv, one.o, one.down))
        self._gate_up = _shape(one.gate_up, gate=True)

    @classmethod
    def of(cls, shard: Shard) -> "PlainBlocks | None":
        """Return the blocks of a shard, None where they are of another kind."""
        spec = shard.spec
        if spec.activation != "silu" or spec.residual_scale != 1 or spec.qk_norm == "width":
            return None
        try:
            return cls([_plain(block) for block in shard.blocks], spec.norm_eps, shard.group)
        except _NotPlain:
            return None

    def run(self, index: int, views: Views, attend: Attend) -> None:
        """Compute block `index` of the shard, in place on `views.hidden` [1, hidden]; `attend`
        computes the part between the products."""
        weights, hidden, eps = self._weights[index], views.hidden, self._eps
        one_row_product(hidden, weights.qkv, views.qkv, norm=weights.attention_norm, eps=eps, shape=self._qkv)
        attend()
        self._add(views.attended, weights.o, views, self._o)
        gated = views.gate_up[:, : weights.down.shape[1]]
        one_row_product(hidden, weights.gate_up, gated, norm=weights.mlp_norm, eps=eps, gate=True, shape=self._gate_up)
        self._add(gated, weights.down, views, self._down)

    def tune(self, tuning: Tuning) -> None:
        """Find the shapes that suit this card."""
        one, weights, adds = self._weights[0], self._weights, self._group is None
        self._qkv = _tuned(tuning, self._qkv, [each.qkv for each in weights], self._eps, norm=one.attention_norm)
        self._o = _tuned(tuning, self._o, [each.o for each in weights], self._eps, add=adds)
        gate_ups = [each.gate_up for each in weights]
        self._gate_up = _tuned(tuning, self._gate_up, gate_ups, self._eps, norm=one.mlp_norm, gate=True)
        self._down = _tuned(tuning, self._down, [each.down for each in weights], self._eps, add=adds)

    def _add(self, x: Tensor, weight: Tensor, views: Views, shape: Product) -> None:
        """Add a product, of which a group's ranks each have a summand, to the residual stream."""
        if self._group is None:
            one_row_product(x, weight, views.hidden, add=True, shape=shape)
            return
        one_row_product(x, weight, views.normed, shape=shape)
        self._group.all_reduce(views.normed)
        views.hidden.add_(views.normed)


class PlainHead:
    """The head of a shard with the norm before it, made by `of`."""

    def __init__(self, head: Linear, norm: Tensor, eps: float) -> None:
        """Choose the shape of the product. `_NotPlain`: the head has a bias, or its size does not
        suit the kernel."""
        self._weight = _weight(head)
        self._shape = _shape(self._weight)
        self._split = head if isinstance(head, VocabularyLinear) else None
        self._norm = norm
        self._eps = eps

    @classmethod
    def of(cls, shard: Shard) -> "PlainHead | None":
        """Return the head of a shard, None where there is none, or one of another kind."""
        if shard.head is None or shard.final_norm is None:
            return None
        try:
            return cls(shard.head, shard.final_norm, shard.spec.norm_eps)
        except _NotPlain:
            return None

    def write(self, hidden: Tensor, logits: Tensor) -> None:
        """Write the logits [1, vocab] of hidden states [1, hidden] before the norm; in a group, at
        the leader."""
        own = logits if self._split is None else logits.new_empty(1, len(self._weight))
        one_row_product(hidden, self._weight, own, norm=self._norm, eps=self._eps, shape=self._shape)
        if self._split is not None:
            self._split.collect(own, logits)

    def tune(self, tuning: Tuning) -> None:
        """Find the shape that suits this card."""
        self._shape = _tuned(tuning, self._shape, [self._weight], self._eps, norm=self._norm)


class _NotPlain(Exception):
    """A block or a head that the kernel of one row cannot compute."""


def _plain(block: Block) -> _Weights:
    """Return the weights of a block of the plain kind. Raises `_NotPlain`."""
    if block.attention_norm is None or block.mlp_norm is None:
        raise _NotPlain
    if block.attention_out_norm is not None or block.mlp_out_norm is not None:
        raise _NotPlain
    qkv, o, gate_up, down = (_weight(linear) for linear in (block.qkv, block.o, block.gate_up, block.down))
    return _Weights(block.attention_norm, qkv, o, block.mlp_norm, gate_up, down)


def _weight(linear: Linear) -> Tensor:
    """Return a weight without bias; for a rank, the rank's own part. Raises `_NotPlain`."""
    if isinstance(linear, RowParallelLinear):
        linear = linear.product
    elif isinstance(linear, VocabularyLinear):
        linear = linear.own
    if not isinstance(linear, DenseLinear) or linear.bias is not None:
        raise _NotPlain
    return linear.weight


def _shape(weight: Tensor, *, gate: bool = False) -> Product:
    """Return a shape for products with this weight. Raises `_NotPlain`."""
    shape = shape_of(weight.shape[1])
    if shape is None or weight.shape[0] % (shape.rows * (2 if gate else 1)):
        raise _NotPlain
    return shape


def _tuned(
    tuning: Tuning,
    shape: Product,
    weights: Sequence[Tensor],
    eps: float,
    *,
    norm: Tensor | None = None,
    gate: bool = False,
    add: bool = False,
) -> Product:
    """Return the shape that suits products with these weights; `shape`, their present one, where
    they are too small to tell."""
    one = weights[0]
    if not worth_trying(one):
        return shape
    x = one.new_zeros(1, one.shape[1])
    out = one.new_zeros(1, len(one) // (2 if gate else 1))

    def run(weight: Tensor, shape: Product) -> None:
        one_row_product(x, weight, out, norm=norm, eps=eps, gate=gate, add=add, shape=shape)

    words = [word for word, is_so in (("norm", norm is not None), ("gate", gate), ("add", add)) if is_so]
    return tuning.shape(" ".join(words), weights, run, gate=gate)
