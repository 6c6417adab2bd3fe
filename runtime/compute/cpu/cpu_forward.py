"""The forward of one shard over a ragged batch on a CPU."""

from collections.abc import Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from zrt.runtime.compute.cpu.cpu_ops import CpuOps
from zrt.runtime.compute.cpu.ragged_attention import RaggedAttention
from zrt.runtime.compute.decoder.block_stack import BlockStack
from zrt.runtime.compute.decoder.decoder import Decoder
from zrt.runtime.compute.decoder.ops import AttentionSpec
from zrt.runtime.compute.decoder.rope import rotaries
from zrt.runtime.compute.decoder.shard import Block, Shard
from zrt.runtime.compute.decoder.workspace import Views, Workspace
from zrt.runtime.compute.kv.slab_cache import SlabKVCache
from zrt.runtime.compute.shared_rows.channel import Rows
from zrt.runtime.compute.turn import BatchStep, Picking
from zrt.runtime.errors import ZrtError

Angles = tuple[Tensor, Tensor] | None
"""The cos and sin of one block, two [rows, 1, dim]; None where the block rotates nothing."""


def cpu_decoder(shard: Shard, cache: SlabKVCache) -> Decoder:
    """Return the decoder of a shard on a CPU."""
    return Decoder(shard, cache, CpuForward(shard, cache))


class CpuForward:
    """A shard's forward with keys and values in the slab of `cache`; `cache` is None where the
    shard has no blocks."""

    best: Final = None
    void: Final = None

    def __init__(self, shard: Shard, cache: SlabKVCache | None) -> None:
        spec = shard.spec
        blocks = spec.blocks[shard.first : shard.last + 1]
        self._shard = shard
        self._cache = cache
        self._ops = CpuOps(shard.dtype, spec.norm_eps, is_silu=spec.activation == "silu")
        self._stack = BlockStack(shard, self._ops)
        self._workspace = Workspace(spec, shard.dtype)
        self._attention = AttentionSpec.of(spec, blocks)
        self._rotaries, self._rotary_of = rotaries(blocks, 0 if cache is None else cache.context, shard.dtype)

    def run(self, steps: Sequence[BatchStep], x: Rows, picking: Picking) -> Tensor:
        """Compute one turn, as `Decoder.forward`; the caller picks the tokens."""
        if not isinstance(x, Tensor):
            raise ZrtError("internal", "rows that lie on a GPU cannot be taken by a CPU")
        views = self._workspace.views(len(x))
        self._stack.embed(x, views.hidden)
        if self._cache is not None:
            self._stack.run(views, self._attention_of(steps, views, self._cache))
        if self._shard.head is None:
            return views.hidden.clone()
        return self._stack.logits(views.hidden[_asked(steps)])

    def end(self) -> None:
        """Do nothing: a CPU's forward holds nothing of a group."""

    def _attention_of(self, steps: Sequence[BatchStep], views: Views, cache: SlabKVCache) -> "partial[None]":
        """Return the attention of these steps."""
        positions = torch.tensor(
            [position for step in steps for position in range(step.seq_pos, step.seq_pos + step.n)]
        )
        lengths = positions + 1
        if any(step.rope_length for step in steps):
            known = torch.tensor([step.rope_length for step in steps for _ in range(step.n)])
            lengths = torch.maximum(lengths, known)
        turned = [rotary.at(positions, lengths) for rotary in self._rotaries]
        angles = [None if which is None else turned[which] for which in self._rotary_of]
        return partial(self._attend, views, angles, RaggedAttention(self._attention, cache, steps, positions, views))

    def _attend(
        self, views: Views, angles: Sequence[Angles], attention: RaggedAttention, index: int, block: Block
    ) -> None:
        """Attend in one block (see `decoder.ops.Attention`)."""
        if block.qk_norm is not None:
            self._ops.norm(views.qk, block.qk_norm, views.qk, views.qk_scale)
        turned = angles[index]
        if turned is not None:
            self._ops.rotate(views, *turned)
        attention(index)


def _asked(steps: Sequence[BatchStep]) -> Tensor:
    """Return the rows of the batch whose logits are asked for, int64."""
    rows, end = [], 0
    for step in steps:
        end += step.n
        if step.logits:
            rows.append(end - 1)
    return torch.tensor(rows, dtype=torch.int64)
