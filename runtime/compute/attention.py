"""Attention of a ragged batch on the CPU: every session attends to its own keys, in place in the slab."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from zrt.runtime.compute.batch import Step
from zrt.runtime.compute.kv_cache import KVCache
from zrt.runtime.compute.workspace import Views


class RaggedAttention:
    """The attention of one forward: made once for its steps, called once a block.

    Query heads that share a kv head become the rows of one product (one token) or a batch over shared keys (several tokens), so keys and
    values are never repeated.
    """

    def __init__(self, cache: KVCache, steps: Sequence[Step], positions: Tensor, views: Views) -> None:
        self._kv = views.kv
        self._kv_by_head = views.kv_by_head
        self._segments: list[_Segment] = []
        start = 0
        for step in steps:
            rows = slice(start, start + step.n)
            self._segments.append(_Segment(cache, step, views.queries[rows], views.attended_heads[rows]))
            start += step.n
        self._places: tuple[Tensor, Tensor] | None = None
        if len(steps) > 1:
            self._places = torch.tensor([cache.row(step.key) for step in steps for _ in range(step.n)]), positions
            self._by_token = cache.slab.permute(1, 0, 4, 2, 3, 5).unbind(
                0
            )  # per block [sessions, context, 2, kv heads, head_dim]

    def __call__(self, block: int) -> None:
        """Write the batch's keys and values to the cache, then attend: from `views.queries` and `views.kv` to `views.attended`.

        `block` counts within the shard.
        """
        if self._places is None:
            self._segments[0].fresh[block].copy_(self._kv_by_head)
        else:
            self._by_token[block].index_put_(self._places, self._kv)
        for segment in self._segments:
            segment.attend(block)


class _Segment:
    """One step's part of the batch and of the cache. All views of a forward are made here, none in its blocks."""

    def __init__(self, cache: KVCache, step: Step, queries: Tensor, out: Tensor) -> None:
        """`queries` and `out` are [n, kv heads, group, head_dim]."""
        total = step.seq_pos + step.n
        row = cache.slab[cache.row(step.key)]  # [blocks, 2, kv heads, context, head_dim]
        self.fresh = row[:, :, :, step.seq_pos : total].unbind(0)  # per block [2, kv heads, n, head_dim]
        group = 1 if step.n == 1 else queries.shape[2]
        past = row[:, :, None, :, :total].expand(-1, -1, group, -1, -1, -1)
        self._keys = past[:, 0].unbind(0)  # per block [group, kv heads, total, head_dim]
        self._values = past[:, 1].unbind(0)
        if step.n == 1:  # [1, kv heads, group, head_dim]: the group as the rows of one product, which sees every key
            self._queries, self._out = queries, out
        else:  # [group, kv heads, n, head_dim]
            self._queries, self._out = queries.permute(2, 1, 0, 3), out.permute(2, 1, 0, 3)
        self._causal = step.n > 1 and step.seq_pos == 0
        self._mask: Tensor | None = None
        if step.n > 1 and step.seq_pos > 0:  # token i sees the past and the step up to itself
            self._mask = torch.full((step.n, total), float("-inf"), dtype=queries.dtype).triu_(step.seq_pos + 1)

    def attend(self, block: int) -> None:
        self._out.copy_(
            scaled_dot_product_attention(
                self._queries, self._keys[block], self._values[block], attn_mask=self._mask, is_causal=self._causal
            )
        )
