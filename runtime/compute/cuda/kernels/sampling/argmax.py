"""The greatest logit of each row and its token, in Triton: first of each tile, then of the row."""

import triton
import triton.language as tl

from zrt.runtime.compute.cuda.kernels.dense.dependent_launch import launch_dependents, wait


@triton.jit
def best_of_tile(logits_ptr, top_ptr, index_ptr, width, TILE: tl.constexpr):
    """Find the greatest logit of one tile of one row, and the first token that has it; not a number
    if any logit is not a number."""
    row = tl.program_id(0)
    tile = tl.program_id(1)
    token = tile * TILE + tl.arange(0, TILE)
    wait()
    launch_dependents()
    logits = tl.load(logits_ptr + row.to(tl.int64) * width + token, mask=token < width, other=float("-inf"))
    logits = logits.to(tl.float32)
    top = tl.max(logits, 0)
    index = tl.min(tl.where(logits == top, token, 2147483647), 0)
    broken = tl.max((logits != logits).to(tl.int32), 0)
    at = row * tl.num_programs(1) + tile
    tl.store(top_ptr + at, tl.where(broken > 0, float("nan"), top))
    tl.store(index_ptr + at, index)


@triton.jit
def best_of_row(top_ptr, index_ptr, best_ptr, tiles, PADDED: tl.constexpr):
    """Write float64 best [2, rows] from one row's tiles: the greatest logit and its token."""
    row = tl.program_id(0)
    tile = tl.arange(0, PADDED)
    inside = tile < tiles
    wait()
    launch_dependents()
    tops = tl.load(top_ptr + row * tiles + tile, mask=inside, other=float("-inf"))
    indices = tl.load(index_ptr + row * tiles + tile, mask=inside, other=2147483647)
    top = tl.max(tops, 0)
    index = tl.min(tl.where(tops == top, indices, 2147483647), 0)
    broken = tl.max((tops != tops).to(tl.int32), 0)
    tl.store(best_ptr + row, tl.where(broken > 0, float("nan"), top).to(tl.float64))
    tl.store(best_ptr + tl.num_programs(0) + row, tl.where(index < 2147483647, index, 0).to(tl.float64))
