"""The order of a shard's forward, on whatever device: embedding, blocks, norm and head.

The order of casts follows transformers' models, so that float32 agrees to 1e-4 and bfloat16 to
rounding: norms in float32, cos and sin in the model's dtype, every other operation rounded to the
model's dtype. An operation that a model lacks costs nothing.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from zrt.runtime.compute.decoder.linear import Linear
from zrt.runtime.compute.decoder.ops import Attention, Ops
from zrt.runtime.compute.decoder.shard import Block, Shard
from zrt.runtime.compute.decoder.tp_linear import NormsOverRanks
from zrt.runtime.compute.decoder.workspace import Views


class BlockStack:
    """A shard computed by the operations of its device. Keeps no state from one forward to the
    next."""

    def __init__(self, shard: Shard, ops: Ops) -> None:
        spec, group = shard.spec, shard.group
        self.shard = shard
        self._norm, self._gate = ops.norm, ops.gate
        self._wide_norms = None if group is None else NormsOverRanks(spec, group, shard.device)
        self._residual_scale = spec.residual_scale
        self._adds = group is None and spec.residual_scale == 1
        """Whether a product can be added to the residual stream as it is computed."""
        scale = spec.embedding_scale
        self._embedding_scale = float(torch.tensor(scale).to(shard.dtype)) if spec.embedding_scale_rounds else scale

    def embed(self, x: Tensor, hidden: Tensor) -> None:
        """Write to `hidden` [rows, hidden] the input of the first block: the embedding of token ids
        `x` int64 [rows] on the first stage, else the hidden states `x` themselves."""
        embedding = self.shard.embedding
        if embedding is None:
            hidden.copy_(x)
            return
        embedding.rows(x, hidden)
        if self._embedding_scale != 1:
            hidden.mul_(self._embedding_scale)

    def run(self, views: Views, attend: Attention) -> None:
        """Compute all blocks, in place on `views.hidden`."""
        for index, block in enumerate(self.shard.blocks):
            self._block(index, block, views, attend)

    def logits(self, hidden: Tensor, head: Callable[[Tensor, Tensor], None] | None = None) -> Tensor:
        """Return the logits float32 [rows, vocab] of hidden states [rows, hidden], which are
        written over. `head(hidden, logits)` computes norm and head where there is a faster way."""
        shard = self.shard
        logits = torch.empty(len(hidden), shard.spec.vocab_size, dtype=shard.dtype, device=hidden.device)
        if len(hidden):
            (head or self._head)(hidden, logits)
        return self._final(logits)

    def _block(self, index: int, block: Block, views: Views, attend: Attention) -> None:
        """Compute one block, in place on `views.hidden`."""
        block.qkv.write(self._normed(block.attention_norm, views), views.qkv)
        if block.q_norm is not None and block.k_norm is not None:
            if self._wide_norms is not None:
                self._wide_norms(views.q, block.q_norm, views.k, block.k_norm)
            else:
                self._norm(views.q, block.q_norm, views.q, views.scale)
                self._norm(views.k, block.k_norm, views.k, views.scale)
        attend(index, block)
        self._add(block.o, views.attended, block.attention_out_norm, views)
        block.gate_up.write(self._normed(block.mlp_norm, views), views.gate_up)
        self._gate(views)
        self._add(block.down, views.gate, block.mlp_out_norm, views)

    def _normed(self, norm: Tensor | None, views: Views) -> Tensor:
        """Return the residual stream as the next product takes it: normed, where the model norms
        there."""
        if norm is None:
            return views.hidden
        self._norm(views.hidden, norm, views.normed, views.scale)
        return views.normed

    def _add(self, product: Linear, x: Tensor, norm: Tensor | None, views: Views) -> None:
        """Add a product to the residual stream, normed and scaled where the model does that."""
        if norm is None and self._adds:
            product.add(x, views.hidden)
            return
        product.write(x, views.normed)
        if norm is not None:
            self._norm(views.normed, norm, views.normed, views.scale)
        if self._residual_scale != 1:
            views.normed.mul_(self._residual_scale)
        views.hidden.add_(views.normed)

    def _head(self, hidden: Tensor, logits: Tensor) -> None:
        """Write the head's output [rows, vocab] to `logits`; `hidden` is normed in place."""
        shard = self.shard
        assert shard.final_norm is not None
        assert shard.head is not None
        self._norm(hidden, shard.final_norm, hidden)
        shard.head.write(hidden, logits)

    def _final(self, logits: Tensor) -> Tensor:
        """Return the head's output, which is written over, in float32: divided and capped where the
        model does that."""
        spec = self.shard.spec
        if spec.logits_divisor != 1:
            logits.div_(spec.logits_divisor)
        if spec.logits_softcap is not None:
            logits.div_(spec.logits_softcap).tanh_().mul_(spec.logits_softcap)
        return logits.float()
