"""Attention of a ragged batch on the CPU: every session attends to its own keys, in place in the slab."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from zrt.runtime.compute.batch import Step
from zrt.runtime.compute.kv_cache import KVCache
from zrt.runtime.compute.spec import ModelSpec


class RaggedAttention:
    """The attention of one forward: made once for its steps, called once a block.

    Query heads that share a kv head become the rows of one product (one token) or a batch over shared keys (several), so keys and
    values are never repeated.
    """

    def __init__(self, spec: ModelSpec, cache: KVCache, steps: Sequence[Step], positions: Tensor) -> None:
        self._heads = spec.num_heads
        self._kv_heads = spec.num_kv_heads
        self._slab = cache.slab
        self._segments = [_Segment(cache, step) for step in steps]
        rows = [cache.row(step.key) for step in steps for _ in range(step.n)]
        self._tokens = (torch.tensor(rows), positions)

    def __call__(self, block: int, heads: Tensor) -> Tensor:
        """Write this batch's keys and values, then attend.

        `block` counts within the shard. `heads` [rows, heads + 2 x kv heads, head_dim] holds queries, keys and values, already rotated.
        Returns [rows, heads x head_dim].
        """
        rows, _, head_dim = heads.shape
        self._write(block, heads[:, self._heads :].unflatten(1, (2, self._kv_heads)))
        queries = heads[:, : self._heads].unflatten(1, (self._kv_heads, -1))
        if rows == 1:
            return self._segments[0].attend_one(block, queries[0]).reshape(1, -1)
        out = torch.empty(queries.shape, dtype=heads.dtype)
        start = 0
        for segment in self._segments:
            stop = start + segment.n
            if segment.n == 1:
                out[start] = segment.attend_one(block, queries[start])[0]
            else:
                out[start:stop] = segment.attend_many(block, queries[start:stop])
            start = stop
        return out.view(rows, self._heads * head_dim)

    def _write(self, block: int, kv: Tensor) -> None:
        """Put kv [rows, 2, kv heads, head_dim] in its places."""
        if len(self._segments) == 1:
            self._segments[0].fresh[block].copy_(kv.permute(1, 2, 0, 3))
        else:
            self._slab[:, block].permute(0, 3, 1, 2, 4).index_put_(self._tokens, kv)


class _Segment:
    """One step's view of the cache. A batch holds few, so what can be made once is made here rather than in each block."""

    def __init__(self, cache: KVCache, step: Step) -> None:
        row = cache.slab[cache.row(step.key)]
        total = step.seq_pos + step.n
        self.n = step.n
        self.fresh = row[:, :, :, step.seq_pos : total].unbind(0)  # per block [2, kv heads, n, head_dim]
        self._past = row[:, :, None, :, :total].flatten(0, 1).unbind(0)  # k, v of each block in turn, [1, kv heads, total, head_dim]
        self._causal = step.n > 1 and step.seq_pos == 0
        self._mask: Tensor | None = None
        if step.n > 1 and not self._causal:
            # Token i of the step sees the past and the step up to itself.
            hidden = torch.full((step.n, total), float("-inf"), dtype=cache.slab.dtype)
            self._mask = hidden.triu_(step.seq_pos + 1)

    def attend_one(self, block: int, queries: Tensor) -> Tensor:
        """queries [kv heads, group, head_dim] of one token -> [1, kv heads, group, head_dim]; it sees every key."""
        return scaled_dot_product_attention(queries.unsqueeze(0), self._past[2 * block], self._past[2 * block + 1])

    def attend_many(self, block: int, queries: Tensor) -> Tensor:
        """queries [n, kv heads, group, head_dim] -> the same shape."""
        group = queries.shape[2]
        keys = self._past[2 * block].expand(group, -1, -1, -1)
        values = self._past[2 * block + 1].expand(group, -1, -1, -1)
        attended = scaled_dot_product_attention(
            queries.permute(2, 1, 0, 3), keys, values, attn_mask=self._mask, is_causal=self._causal
        )
        return attended.permute(2, 1, 0, 3)
