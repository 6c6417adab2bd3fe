"""A step of several tokens in a forward on a GPU: it gathers its pages and uses torch's own attention."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from zrt.runtime.compute.attention import AttentionSpec, capped_attention
from zrt.runtime.compute.batch import Step
from zrt.runtime.compute.paged_cache import PagedKVCache
from zrt.runtime.compute.shard import Shard
from zrt.runtime.compute.workspace import Views


class Prompt:
    """A step of several tokens: its part of the batch, and the pages of its history."""

    def __init__(
        self, shard: Shard, cache: PagedKVCache, attention: AttentionSpec, step: Step, views: Views, start: int
    ) -> None:
        spec, device = shard.spec, shard.device
        self._total = step.seq_pos + step.n
        count = -(-self._total // cache.page_tokens)
        self._pages = torch.from_numpy(cache.table(step.key)[:count]).to(device)
        rows = slice(start, start + step.n)
        heads = (step.n, spec.num_heads, spec.head_dim)
        self._queries = views.q[rows].view(heads).transpose(0, 1)[None]  # [1, heads, n, head_dim]
        self._out = views.attended[rows].view(heads)
        self._group = spec.num_heads // spec.num_kv_heads
        self._attention = attention
        self._masks: dict[int | None, Tensor | None] = {}
        for window in set(self._attention.windows):
            hides = window is not None and window < self._total
            if step.seq_pos == 0 and not hides and self._attention.softcap is None:
                self._masks[window] = None
                continue
            token = torch.arange(step.seq_pos, self._total, device=device)[:, None]
            seen = torch.arange(self._total, device=device)[None, :]
            hidden = seen > token
            if window is not None:
                hidden |= seen <= token - window
            self._masks[window] = torch.zeros(hidden.shape, dtype=shard.dtype, device=device).masked_fill_(
                hidden, float("-inf")
            )

    def attend(self, index: int, kv: Sequence[Tensor]) -> None:
        mask = self._masks[self._attention.windows[index]]
        keys, values = (self._history(part) for part in kv)
        scale, softcap = self._attention.scale, self._attention.softcap
        if softcap is None:
            out = scaled_dot_product_attention(
                self._queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale
            )
        else:
            out = capped_attention(self._queries, keys, values, mask, scale, softcap)
        self._out.copy_(out[0].transpose(0, 1))

    def _history(self, part: Tensor) -> Tensor:
        """Keys or values [1, heads, tokens, head_dim], those of each kv head repeated for its query heads."""
        held = part.index_select(0, self._pages).flatten(0, 1)[: self._total]  # [tokens, kv heads, head_dim]
        return held.transpose(0, 1).repeat_interleave(self._group, dim=0)[None]
