"""Attention of a ragged batch on the CPU: every session attends to its own keys, in place in the
slab."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from zrt.runtime.compute.cpu import numba_runtime
from zrt.runtime.compute.cpu.decode_attention import DecodeAttention, DecodeStep
from zrt.runtime.compute.decoder.ops import AttentionSpec
from zrt.runtime.compute.decoder.workspace import Views
from zrt.runtime.compute.kv.slab_cache import SlabKVCache
from zrt.runtime.compute.turn import BatchStep


class RaggedAttention:
    """The attention of one forward: made once for its steps, called once a block.

    Query heads that share a kv head become the rows of one product (one token) or a batch over
    shared keys (several tokens), so keys and values are never repeated.
    """

    def __init__(
        self, spec: AttentionSpec, cache: SlabKVCache, steps: Sequence[BatchStep], positions: Tensor, views: Views
    ) -> None:
        by_kernel = len(steps) > 1 and numba_runtime.take(cache.slab)
        self._segments: list[_Segment] = []
        singles: list[tuple[int, BatchStep]] = []
        start = 0
        for step in steps:
            if by_kernel and step.n == 1:
                singles.append((start, step))
            else:
                self._segments.append(_Segment(spec, cache, step, views, start))
            start += step.n
        self._decodes = _decodes(spec, cache, singles, views) if singles else None
        self._places: tuple[Tensor, Tensor] | None = None
        if len(self._segments) == len(steps) > 1:
            self._kv = views.kv
            self._places = torch.tensor([cache.row(step.key) for step in steps for _ in range(step.n)]), positions
            self._by_token = cache.slab.permute(1, 0, 4, 2, 3, 5).unbind(
                0
            )  # per block [sessions, context, 2, kv heads, head_dim]

    def __call__(self, block: int) -> None:
        """Write the batch's keys and values to the cache, then attend: from `views.queries` and
        `views.kv` to `views.attended`.

        `block` counts within the shard.
        """
        if self._decodes is not None:
            self._decodes[block](block)
        if self._places is not None:
            self._by_token[block].index_put_(self._places, self._kv)
        for segment in self._segments:
            if self._places is None:
                segment.write(block)
            segment.attend(block)


def _decodes(
    spec: AttentionSpec, cache: SlabKVCache, steps: Sequence[tuple[int, BatchStep]], views: Views
) -> list[DecodeAttention]:
    """Return for each block the attention of all steps of one token, which are given with their
    rows in the batch."""

    def through(window: int | None) -> DecodeAttention:
        places = [
            DecodeStep(
                cache.row(step.key), step.seq_pos, 0 if window is None else max(0, step.seq_pos + 1 - window), row
            )
            for row, step in steps
        ]
        return DecodeAttention(cache.slab, places, views.qkv, views.attended, scale=spec.scale, softcap=spec.softcap)

    made = {window: through(window) for window in set(spec.windows)}
    return [made[window] for window in spec.windows]


class _Segment:
    """One step's part of the batch and of the cache. All views of a forward are made here, none in
    its blocks."""

    def __init__(self, spec: AttentionSpec, cache: SlabKVCache, step: BatchStep, views: Views, start: int) -> None:
        """Make the views. `start` is the step's first row in the batch."""
        rows = slice(start, start + step.n)
        queries, out = views.queries[rows], views.attended_heads[rows]  # [n, kv heads, group, head_dim]
        row = cache.slab[cache.row(step.key)]  # [blocks, 2, kv heads, context, head_dim]
        self._kv = views.kv_by_head[:, :, rows]
        self._fresh = row[:, :, :, step.seq_pos : step.seq_pos + step.n].unbind(
            0
        )  # per block [2, kv heads, n, head_dim]
        group = 1 if step.n == 1 else queries.shape[2]
        if step.n == 1:  # [1, kv heads, group, head_dim]: the group as the rows of one product
            self._queries, self._out = queries, out
        else:  # [group, kv heads, n, head_dim]
            self._queries, self._out = queries.permute(2, 1, 0, 3), out.permute(2, 1, 0, 3)
        self._scale = spec.scale
        self._softcap = spec.softcap
        causal = spec.softcap is None
        pasts = {window: _Past(row, step, window, group, queries.dtype, causal=causal) for window in set(spec.windows)}
        self._pasts = [pasts[window] for window in spec.windows]

    def write(self, block: int) -> None:
        """Write the step's keys and values to the cache."""
        self._fresh[block].copy_(self._kv)

    def attend(self, block: int) -> None:
        past = self._pasts[block]
        keys, values = past.keys[block], past.values[block]
        if self._softcap is None:
            attended = scaled_dot_product_attention(
                self._queries, keys, values, attn_mask=past.mask, is_causal=past.causal, scale=self._scale
            )
        else:
            attended = capped_attention(self._queries, keys, values, past.mask, self._scale, self._softcap)
        self._out.copy_(attended)


class _Past:
    """The keys and values, of every block, that a step sees through one window, and the mask of
    which of its tokens sees which of them."""

    def __init__(
        self, row: Tensor, step: BatchStep, window: int | None, group: int, dtype: torch.dtype, *, causal: bool
    ) -> None:
        """Make the views and the mask. `row` is [blocks, 2, kv heads, context, head_dim]. `causal`:
        the attention applies the plain causal mask itself."""
        total = step.seq_pos + step.n
        first = 0 if window is None else max(0, step.seq_pos + 1 - window)
        past = row[:, :, None, :, first:total].expand(-1, -1, group, -1, -1, -1)
        self.keys = past[:, 0].unbind(0)  # per block [group, kv heads, total - first, head_dim]
        self.values = past[:, 1].unbind(0)
        hides = window is not None and window < total  # some token does not see all tokens before it
        self.causal = causal and step.n > 1 and step.seq_pos == 0 and not hides
        self.mask: Tensor | None = None  # [n, total - first]
        if step.n > 1 and not self.causal:
            self.mask = torch.full((step.n, total - first), float("-inf"), dtype=dtype).triu_(step.seq_pos + 1 - first)
            if hides and window is not None:
                self.mask += torch.full_like(self.mask, float("-inf")).tril_(step.seq_pos - window - first)


def capped_attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, softcap: float
) -> Tensor:
    """Return attention whose scores are squeezed into (-softcap, softcap); the softmax is in
    float32, everything else in the dtype of `queries`."""
    scores = torch.matmul(queries, keys.transpose(-1, -2)).mul_(scale)
    scores.div_(softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores.add_(mask)
    return torch.matmul(scores.softmax(dim=-1, dtype=torch.float32).to(queries.dtype), values)
