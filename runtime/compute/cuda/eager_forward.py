"""The forward of one shard on a GPU, launched kernel by kernel: eagerly, or while a CUDA graph is
captured."""

from functools import partial

from torch import Tensor

from zrt.runtime.compute.cuda.attention_launch import PagedAttention
from zrt.runtime.compute.cuda.cuda_ops import CudaOps
from zrt.runtime.compute.cuda.inputs import Buffers, Inputs, Size
from zrt.runtime.compute.cuda.one_row_products import PlainBlocks, PlainHead
from zrt.runtime.compute.cuda.tuning import Tuning
from zrt.runtime.compute.decoder.block_stack import BlockStack
from zrt.runtime.compute.decoder.ops import AttentionSpec
from zrt.runtime.compute.decoder.rope import rotaries
from zrt.runtime.compute.decoder.shard import Block, Shard
from zrt.runtime.compute.decoder.workspace import Views, Workspace
from zrt.runtime.compute.kv.paged_cache import PagedKVCache


class EagerForward:
    """A shard and its paged cache, computed on its device alone: nothing is asked of the host once
    `inputs` are sent.

    At one row the products are kernels that read weights at the speed of the memory, with norms,
    gate and residual fused in, where the model's blocks are of the plain kind.
    """

    def __init__(self, shard: Shard, cache: PagedKVCache) -> None:
        spec, device = shard.spec, shard.device
        blocks = spec.blocks[shard.first : shard.last + 1]
        self.shard = shard
        self.workspace = Workspace(spec, shard.dtype, device)
        self._cache = cache
        self._eps = spec.norm_eps
        self._rotaries, self._rotary_of = rotaries(blocks, cache.context, shard.dtype)
        self._stack = BlockStack(shard, CudaOps(spec.norm_eps, is_silu=spec.activation == "silu"))
        self._attention = PagedAttention(spec, AttentionSpec.of(spec, blocks), cache.page_tokens, device)
        self._kv = [tuple(block.unbind(0)) for block in cache.pool.unbind(0)]
        self._plain = PlainBlocks.of(shard)
        self._plain_head = PlainHead.of(shard)

    @property
    def is_plain(self) -> bool:
        """Whether one row goes through the kernels of one row."""
        return self._plain is not None

    def tune(self, tuning: Tuning) -> None:
        """Find the shapes of the one-row products that suit this card."""
        if self._plain is not None:
            self._plain.tune(tuning)
        if self._plain_head is not None:
            self._plain_head.tune(tuning)

    def inputs(self, size: Size, buffers: Buffers | None = None) -> Inputs:
        """Return inputs for batches that `size` holds, in `buffers` or in buffers of their own."""
        return Inputs(self.shard, self._cache, self._rotaries, size, buffers)

    def input_bytes(self, size: Size) -> int:
        """Return how many bytes of buffers the inputs of this size need."""
        return Inputs.nbytes(self.shard, self._cache, self._rotaries, size)

    def blocks(self, inputs: Inputs, views: Views) -> None:
        """Compute all blocks, from the tokens or hidden states of `inputs` to `views.hidden`."""
        self._stack.embed(inputs.device.x, views.hidden)
        attend = partial(self._attend, inputs, views)
        if self._plain is None or len(views.hidden) > 1:
            self._stack.run(views, attend)
            return
        for index, block in enumerate(self.shard.blocks):
            self._plain.run(index, views, partial(attend, index, block))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits float32 [rows, vocab] of hidden states [rows, hidden], which are
        written over."""
        plain = self._plain_head if len(hidden) == 1 else None
        return self._stack.logits(hidden, None if plain is None else plain.write)

    def _attend(self, inputs: Inputs, views: Views, index: int, block: Block) -> None:
        """Attend in one block (see `decoder.ops.Attention`): rows of one token through one kernel,
        longer steps through another."""
        there, kv = inputs.device, self._kv[index]
        which = self._rotary_of[index]
        angles = None if which is None else there.angles[which]
        self._attention.place(views.qkv, block.qk_norm, self._eps, angles, there.slots, kv)
        singles, prompts = there.singles, there.prompts
        mixed = len(prompts.tiles) > 0
        if len(singles.rows):
            where = singles.tables, singles.lengths, singles.rows
            self._attention.attend(index, views.qkv, kv, *where, views.attended, mixed=mixed)
        if mixed:
            several = prompts.tables, prompts.tiles, prompts.rows
            self._attention.attend_prompts(index, views.qkv, kv, *several, views.attended)
