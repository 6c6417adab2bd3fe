"""The combination of the parts of a history that several programs attended to, in Triton: the
second half of split-KV attention (flash decoding), for single tokens and for prompts."""

import triton
import triton.language as tl

from zrt.runtime.compute.cuda.kernels.dense.dependent_launch import launch_dependents, wait


@triton.jit
def combine(
    row_ptr,
    part_ptr,
    stat_ptr,
    out_ptr,
    SPLITS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    TILED: tl.constexpr,
):
    """Combine the parts that `attend` left of one head of one session, or `attend_tile` (TILED) of
    one row. `attend_tile` does not write parts that have no weight."""
    head = tl.program_id(0)
    session = tl.program_id(1)
    split = tl.arange(0, SPLITS)
    d = tl.arange(0, PADDED)
    inside = d < DIM
    launch_dependents()
    wait()
    row = tl.load(row_ptr + session).to(tl.int64)
    at = ((row if TILED else session) * HEADS + head) * SPLITS + split
    top = tl.load(stat_ptr + at * 2)
    weight = tl.load(stat_ptr + at * 2 + 1)
    there = inside[None, :]
    if TILED:
        there = there & (weight > 0)[:, None]
    part = tl.load(part_ptr + at[:, None] * DIM + d[None, :], mask=there, other=0.0)
    share = tl.exp2(top - tl.max(top, 0))
    result = tl.sum(part * share[:, None], 0) / tl.sum(share * weight, 0)
    tl.store(out_ptr + row * (HEADS * DIM) + head * DIM + d, result.to(out_ptr.dtype.element_ty), mask=inside)
