"""Launches of the attention kernels over a paged KV cache, as functions of tensors on a GPU: grids
and launch parameters are chosen here."""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from zrt.runtime.compute.cuda.dense_launch import power_of_two
from zrt.runtime.compute.cuda.kernels.attention import combine, paged_decode, paged_prompt, place_heads
from zrt.runtime.compute.cuda.kernels.dense.dependent_launch import DEPENDENT
from zrt.runtime.compute.decoder.ops import AttentionSpec
from zrt.runtime.models.architecture.spec import ModelSpec

ATTENTION_TILE: Final = 64
LATENT_TILE: Final = 32
"""Tokens of history that a program looks at together: ATTENTION_TILE where bandwidth counts,
LATENT_TILE where latency does."""
MAX_SPLITS: Final = 32
LATENT_SPLITS: Final = 16
"""Parts that a history is cut into: MAX_SPLITS at most; from LATENT_SPLITS on latency counts."""
HEADS_TOGETHER: Final = 8
MANY_ROWS: Final = 128
"""A program places HEADS_TOGETHER heads of a row from MANY_ROWS rows on; with fewer rows it places
one, since latency counts."""
MIXED_SPLITS: Final = 8
MIXED_PARTS: Final = 512
"""Parts of each history (MIXED_SPLITS) and in all (MIXED_PARTS) for decodes beside prompts: most
rows are padding then, and the rows that are not need the parts."""
PROMPT_SPLITS: Final = (4, 8)
PROMPT_PARTS: Final = 1 << 15
"""Parts of each history of a prompt (PROMPT_SPLITS: the fewest that are worth it, and the most),
and parts in all times heads (PROMPT_PARTS): where there are few tokens, multiprocessors would be
idle otherwise."""
QUERY_TILE: Final = 64
"""Tokens of a prompt that a program attends with; in float32 half as many."""
PROMPT_TILE_BYTES: Final = 1 << 14
"""Bytes of keys that a program looks at together when it attends with a prompt's tokens."""
STAGES: Final = 3
"""Stages by which loads go ahead in the loop over a history; each stage is less than a tile, since
the page's number is loaded before it."""
SHARED_SPARE: Final = 12 << 10
"""Bytes that a program needs of its multiprocessor's shared memory beside its queries and a tile of
keys and values."""


class PagedAttention:
    """The attention of a shard's blocks over pages of `page_tokens` tokens, with the scratch memory
    that it needs on `device`."""

    def __init__(self, spec: ModelSpec, attention: AttentionSpec, page_tokens: int, device: torch.device) -> None:
        self._spec = spec
        softcap = attention.softcap
        self._sees = [
            (attention.scale, softcap or 0.0, window or 0, softcap is not None, page_tokens)
            for window in attention.windows
        ]
        """The arguments that the kernels of decodes and of prompts share, for each block."""
        self._padded = power_of_two(spec.head_dim, 16)
        self._sizes = spec.num_heads, spec.num_kv_heads, spec.head_dim, self._padded
        parts = max(PROMPT_PARTS, MIXED_PARTS * spec.num_heads)
        self._parts = torch.empty(parts * spec.head_dim, device=device)
        self._stats = torch.empty(parts * 2, device=device)
        self._shared = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor

    def place(
        self,
        qkv: Tensor,
        norm: Tensor | None,
        eps: float,
        angles: tuple[Tensor, Tensor] | None,
        slots: Tensor,
        kv: Sequence[Tensor],
    ) -> None:
        """Norm and rotate the heads of `qkv` [rows, (heads + 2 x kv heads) x head_dim]: queries in
        place, keys and values into `kv`, two [pages, page_tokens, kv heads, head_dim], at `slots`
        int64 [rows]. `norm` is [heads + kv heads, head_dim], `angles` are two [rows, rope_dim];
        either is None where the model has none."""
        spec = self._spec
        cos, sin = (qkv, qkv) if angles is None else angles
        heads = spec.num_heads + 2 * spec.num_kv_heads
        together = HEADS_TOGETHER if len(qkv) >= MANY_ROWS else 1
        place_heads.place_heads[(len(qkv), -(-heads // together))](
            qkv,
            qkv if norm is None else norm,
            cos,
            sin,
            slots,
            *kv,
            eps,
            *self._sizes,
            spec.rope_dim,
            norm is not None,
            angles is not None,
            together,
            num_warps=1 if together == 1 and self._padded <= 128 else 4,
            launch_pdl=DEPENDENT,
        )

    def attend(
        self,
        block: int,
        qkv: Tensor,
        kv: Sequence[Tensor],
        tables: Tensor,
        lengths: Tensor,
        rows: Tensor,
        out: Tensor,
        *,
        mixed: bool = False,
    ) -> None:
        """Attend from the rows of `qkv` numbered `rows` int32 [n], each one token of a history of
        `lengths` tokens (itself included), int32 [n], in pages `tables` int32 [n, pages]; write to
        the same rows of `out` [batch, heads x head_dim]. `mixed`: the batch holds prompts as
        well."""
        spec, count = self._spec, len(rows)
        splits = max(1, MAX_SPLITS // power_of_two(count))  # of each history, so that all multiprocessors work
        if mixed:
            splits = max(splits, min(MIXED_SPLITS, MIXED_PARTS // power_of_two(count)))
        is_long = splits < LATENT_SPLITS
        group = power_of_two(spec.num_heads // spec.num_kv_heads, 16)
        tile = self._tile(group, ATTENTION_TILE if is_long else LATENT_TILE, qkv.dtype)
        paged_decode.attend[(spec.num_kv_heads, splits, count)](
            qkv,
            *kv,
            tables,
            lengths,
            rows,
            out,
            self._parts,
            self._stats,
            tables.stride(0),
            *self._sees[block],
            tile,
            splits,
            *self._sizes,
            group,
            STAGES if is_long else 2,
            num_warps=4 if is_long else 1,
            launch_pdl=DEPENDENT,
        )
        if splits > 1:
            self._combine(rows, splits, out, tiled=False)

    def attend_prompts(
        self,
        block: int,
        qkv: Tensor,
        kv: Sequence[Tensor],
        tables: Tensor,
        tiles: Tensor,
        rows: Tensor,
        out: Tensor,
    ) -> None:
        """Attend from the rows of `qkv` numbered `rows` int32 [n], those of steps of several
        tokens, which are cut into `tiles` int32 [tiles, 4] (as `attend_tile` takes them) of at most
        `query_tile` rows, in pages `tables` int32 [steps, pages]; write to the same rows of
        `out` [batch, heads x head_dim]."""
        spec = self._spec
        least, most = PROMPT_SPLITS
        splits = min(most, PROMPT_PARTS // (power_of_two(len(out)) * power_of_two(spec.num_heads)))
        if splits < least:
            splits = 1
        queries = query_tile(qkv.dtype)
        tile = min(ATTENTION_TILE, PROMPT_TILE_BYTES // (self._padded * qkv.dtype.itemsize))
        tile = self._tile(queries, max(16, tile), qkv.dtype)
        paged_prompt.attend_tile[(spec.num_heads, len(tiles), splits)](
            qkv,
            *kv,
            tables,
            tiles,
            out,
            self._parts,
            self._stats,
            tables.stride(0),
            *self._sees[block],
            queries,
            tile,
            splits,
            *self._sizes,
            STAGES,
            num_warps=4,
            launch_pdl=DEPENDENT,
        )
        if splits > 1:
            self._combine(rows, splits, out, tiled=True)

    def _tile(self, queries: int, most: int, dtype: torch.dtype) -> int:
        """Return how many tokens of history, at most `most`, a multiprocessor has room for."""
        row = self._padded * dtype.itemsize
        while most > 16 and (queries + 2 * most) * row > self._shared - SHARED_SPARE:
            most //= 2
        return most

    def _combine(self, rows: Tensor, splits: int, out: Tensor, *, tiled: bool) -> None:
        """Combine the parts of each row's history in `out`."""
        spec = self._spec
        combine.combine[(spec.num_heads, len(rows))](
            rows,
            self._parts,
            self._stats,
            out,
            splits,
            spec.num_heads,
            spec.head_dim,
            self._padded,
            tiled,
            num_warps=4,
            launch_pdl=DEPENDENT,
        )


def query_tile(dtype: torch.dtype) -> int:
    """Return the most rows of a tile of `attend_prompts`."""
    return QUERY_TILE if dtype.itemsize == 2 else QUERY_TILE // 2
