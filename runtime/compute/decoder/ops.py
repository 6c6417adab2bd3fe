"""The parts of a block that differ between devices: the operations between its products (`Ops`),
and the attention of one forward (`Attention`).

A device's room implements both: cpu/cpu_ops.py and cpu/cpu_forward.py, cuda/cuda_ops.py and
cuda/eager_forward.py. The order in which a block calls them is in block_stack.py alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from zrt.runtime.compute.decoder.shard import Block
from zrt.runtime.compute.decoder.workspace import Views
from zrt.runtime.models.architecture.spec import BlockSpec, ModelSpec


class Ops(Protocol):
    """The operations on rows between the products of a block, for one dtype on one kind of device.
    All compute in float32 at least where transformers' models do, and round to the model's
    dtype."""

    def norm(self, x: Tensor, weight: Tensor, out: Tensor, scratch: Tensor | None = None) -> None:
        """Write RMSNorm of `x` over its last dimension to `out`, which may be `x`.

        `x`, `out` are [rows, width] and `weight` is [width]; on a CPU also [rows, heads, width],
        with `weight` [heads, width]. `scratch` is float32, of the shape of `x` with a last
        dimension of 1.
        """

    def gate(self, views: Views) -> None:
        """Compute activation(gate) * up in place of `views.gate`."""


class Attention(Protocol):
    """The attention of one forward, made for its steps and called once a block."""

    def __call__(self, index: int, block: Block) -> None:
        """Attend from `views.qkv` to `views.attended` in block `index` of the shard: norm each head
        where the model does that, rotate queries and keys, write keys and values to the cache."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The computation of a shard's attention. `windows` gives for each of its blocks how many
    tokens a token sees, itself included (None: all)."""

    windows: tuple[int | None, ...]
    scale: float
    softcap: float | None

    @classmethod
    def of(cls, spec: ModelSpec, blocks: Sequence[BlockSpec]) -> "AttentionSpec":
        """Return the attention of these blocks of a model."""
        return cls(tuple(block.window for block in blocks), spec.attention_scale, spec.attention_softcap)
