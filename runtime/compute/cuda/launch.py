"""The Triton kernels in Python's clothes: shapes and launch parameters for tensors of a GPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from zrt.runtime.compute.cuda.kernels import triton_kernels as kernels
from zrt.runtime.compute.cuda.kernels.attention import paged_prompt
from zrt.runtime.compute.cuda.kernels.dense.dependent_launch import DEPENDENT
from zrt.runtime.compute.decoder.attention import AttentionSpec
from zrt.runtime.models.architecture.spec import ModelSpec

ATTENTION_TILE: Final = 64
LATENT_TILE: Final = 32
"""Tokens of history a program looks at together: where bandwidth counts, and where latency does."""
MAX_SPLITS: Final = 32
LATENT_SPLITS: Final = 16
"""From so many parts on, latency counts."""
HEADS_TOGETHER: Final = 8
MANY_ROWS: Final = 128
"""Heads of a row that a program places together; of fewer rows one, where latency counts."""
MIXED_SPLITS: Final = 8
MIXED_PARTS: Final = 512
"""Of each history, and in all, for decodes beside prompts: most rows are padding then, and the
others need them."""
PROMPT_SPLITS: Final = (4, 8)
PROMPT_PARTS: Final = 1 << 15
"""Of each history of a prompt, from how many on it is worth it and at most; and in all, times
heads: where there are few tokens, multiprocessors have nothing to do without."""
QUERY_TILE: Final = 64
"""Tokens of a prompt that a program attends with; of float32 half as many."""
PROMPT_TILE_BYTES: Final = 1 << 14
"""Keys that a program looks at together then."""
STAGES: Final = 3
"""How far loads go ahead in the loop over a history; each stage is less than a tile, since the
page's number is loaded before it."""
SHARED_SPARE: Final = 12 << 10
"""What a program needs of its multiprocessor's memory beside its queries and a tile of keys and
values."""
GATE_TILE: Final = 1024
BEST_TILE: Final = 4096


def _power(number: int, least: int = 1) -> int:
    """The least power of two that is not below either."""
    return max(least, 1 << max(0, number - 1).bit_length())


def norm_rows(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """RMSNorm of x [rows, width] into `out`, which may be `x`; rows may lie apart, their numbers
    not."""
    rows, width = x.shape
    kernels.norm_rows[(rows,)](
        x,
        weight,
        out,
        x.stride(0),
        out.stride(0),
        eps,
        width,
        _power(width),
        num_warps=8 if width > 1024 else 4,
        launch_pdl=DEPENDENT,
    )


def gate_rows(gate_up: Tensor, is_silu: bool) -> None:
    """gate = activation(gate) * up, in place of contiguous [rows, 2 x width]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    grid = (rows, -(-width // GATE_TILE))
    kernels.gate_rows[grid](gate_up, width, GATE_TILE, is_silu, num_warps=4, launch_pdl=DEPENDENT)


@dataclass(frozen=True, slots=True)
class Product:
    """How `one_row_product` runs: outputs a program, inputs a chunk, warps."""

    rows: int
    chunk: int
    warps: int


def shape_of(inputs: int) -> Product | None:
    """What was found fastest on Hopper for a product of so many inputs; None where its chunk does
    not divide them."""
    return Product(4, 1024, 4) if inputs % 1024 == 0 else None


def one_row_product(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gate: bool = False,
    add: bool = False,
    shape: Product,
) -> None:
    """x [1, inputs], weight [outputs, inputs] (with `gate` [2 x outputs, inputs]) into `out` [1,
    outputs]; see the kernel."""
    outputs, inputs = weight.shape[0] // (2 if gate else 1), weight.shape[1]
    kernels.one_row_product[(outputs // shape.rows,)](
        x,
        weight if norm is None else norm,
        weight,
        out,
        outputs,
        eps,
        inputs,
        shape.rows,
        shape.chunk,
        norm is not None,
        gate,
        add,
        num_warps=shape.warps,
        launch_pdl=DEPENDENT,
    )


def best(logits: Tensor) -> Tensor:
    """Of each row of logits [rows, vocab] the greatest and its token, the first if there are
    several: float64 [2, rows]."""
    rows, width = logits.shape
    tiles = -(-width // BEST_TILE)
    tops = torch.empty(rows, tiles, device=logits.device)
    indices = torch.empty(rows, tiles, dtype=torch.int32, device=logits.device)
    result = torch.empty(2, rows, dtype=torch.float64, device=logits.device)
    kernels.best_of_tile[(rows, tiles)](logits, tops, indices, width, BEST_TILE, num_warps=8, launch_pdl=DEPENDENT)
    kernels.best_of_row[(rows,)](tops, indices, result, tiles, _power(tiles), num_warps=1, launch_pdl=DEPENDENT)
    return result


class Heads:
    """What a shard's attention does to the rows of one batch, with the scratch it needs."""

    def __init__(self, spec: ModelSpec, attention: AttentionSpec, page_tokens: int, device: torch.device) -> None:
        self._spec = spec
        self._attention = attention
        self._page_tokens = page_tokens
        self._padded = _power(spec.head_dim, 16)
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
        """Norm and rotate queries in place in `qkv` [rows, (heads + 2 x kv heads) x head_dim], keys
        and values into `kv` at `slots` [rows]."""
        spec = self._spec
        cos, sin = (qkv, qkv) if angles is None else angles
        heads = spec.num_heads + 2 * spec.num_kv_heads
        together = HEADS_TOGETHER if len(qkv) >= MANY_ROWS else 1
        kernels.place_heads[(len(qkv), -(-heads // together))](
            qkv,
            qkv if norm is None else norm,
            cos,
            sin,
            slots,
            *kv,
            eps,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            self._padded,
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
        """Attention of the batch's rows numbered `rows` int32 [n], each one token of a history of
        `lengths` tokens (itself included), int32 [n], in pages `tables` int32 [n, pages]; into the
        same rows of `out` [batch, heads x head_dim]. `mixed`: beside prompts."""
        spec, count = self._spec, len(rows)
        splits = max(1, MAX_SPLITS // _power(count))  # of each history, so that all multiprocessors have work
        if mixed:
            splits = max(splits, min(MIXED_SPLITS, MIXED_PARTS // _power(count)))
        is_long = splits < LATENT_SPLITS
        group = _power(spec.num_heads // spec.num_kv_heads, 16)
        tile = self._tile(group, ATTENTION_TILE if is_long else LATENT_TILE, qkv.dtype)
        window = self._attention.windows[block]
        softcap = self._attention.softcap
        kernels.attend[(spec.num_kv_heads, splits, count)](
            qkv,
            *kv,
            tables,
            lengths,
            rows,
            out,
            self._parts,
            self._stats,
            tables.stride(0),
            self._attention.scale,
            softcap or 0.0,
            window or 0,
            softcap is not None,
            self._page_tokens,
            tile,
            splits,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            self._padded,
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
        """Attention of the batch's rows numbered `rows` int32 [n], those of steps of several
        tokens, which are cut into `tiles` int32 [tiles, 4] (see triton_prompt) of at most
        `query_tile` rows, in pages `tables` int32 [steps, pages]; into the same rows of `out`."""
        spec = self._spec
        least, most = PROMPT_SPLITS
        splits = min(most, PROMPT_PARTS // (_power(len(out)) * _power(spec.num_heads)))
        if splits < least:
            splits = 1
        queries = query_tile(qkv.dtype)
        tile = min(ATTENTION_TILE, PROMPT_TILE_BYTES // (self._padded * qkv.dtype.itemsize))
        tile = self._tile(queries, max(16, tile), qkv.dtype)
        window, softcap = self._attention.windows[block], self._attention.softcap
        paged_prompt.attend_tile[(spec.num_heads, len(tiles), splits)](
            qkv,
            *kv,
            tables,
            tiles,
            out,
            self._parts,
            self._stats,
            tables.stride(0),
            self._attention.scale,
            softcap or 0.0,
            window or 0,
            softcap is not None,
            self._page_tokens,
            queries,
            tile,
            splits,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            self._padded,
            STAGES,
            num_warps=4,
            launch_pdl=DEPENDENT,
        )
        if splits > 1:
            self._combine(rows, splits, out, tiled=True)

    def _tile(self, queries: int, most: int, dtype: torch.dtype) -> int:
        """So many tokens of history as a multiprocessor has room for."""
        row = self._padded * dtype.itemsize
        while most > 16 and (queries + 2 * most) * row > self._shared - SHARED_SPARE:
            most //= 2
        return most

    def _combine(self, rows: Tensor, splits: int, out: Tensor, *, tiled: bool) -> None:
        spec = self._spec
        kernels.combine[(spec.num_heads, len(rows))](
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
    """The most rows of a tile of `attend_prompts`."""
    return QUERY_TILE if dtype.itemsize == 2 else QUERY_TILE // 2
