"""The product of a weight with one row (GEMV), in Triton, with the operations around it fused in.

Sums are in float32, and each result is rounded once.
"""

import triton
import triton.language as tl

from zrt.runtime.compute.cuda.kernels.dense.dependent_launch import launch_dependents, wait


@triton.jit
def one_row_product(
    x_ptr,
    norm_ptr,
    weight_ptr,
    out_ptr,
    outputs,
    eps,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    NORM: tl.constexpr,
    GATE: tl.constexpr,
    ADD: tl.constexpr,
):
    """Compute the product with one row of x: ROWS outputs a program, each over all inputs, with the
    operations around it.

    NORM: the row is RMSNorm(x), whose scale is found beside the product and applied after it. GATE:
    the weight is [gate | up], and silu(gate) * up is the result. ADD: the result is added to `out`.
    """
    output = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, CHUNK)
    at = weight_ptr + output[:, None].to(tl.int64) * INPUTS + column[None, :]
    up_at = at + outputs.to(tl.int64) * INPUTS if GATE else at
    launch_dependents()
    next_weight = tl.load(at, eviction_policy="evict_first")
    if GATE:
        next_up = tl.load(up_at, eviction_policy="evict_first")
    wait()
    total = tl.zeros([ROWS, CHUNK], tl.float32)
    up_total = tl.zeros([ROWS, CHUNK], tl.float32)
    squares = tl.zeros([CHUNK], tl.float32)
    if ADD:
        before = tl.load(out_ptr + output).to(tl.float32)
    for index in tl.static_range(INPUTS // CHUNK):
        weight = next_weight
        if GATE:
            up = next_up
        if (index + 1) * CHUNK < INPUTS:
            next_weight = tl.load(at + (index + 1) * CHUNK, eviction_policy="evict_first")
            if GATE:
                next_up = tl.load(up_at + (index + 1) * CHUNK, eviction_policy="evict_first")
        x = tl.load(x_ptr + index * CHUNK + column).to(tl.float32)
        if NORM:
            squares += x * x
            x = x * tl.load(norm_ptr + index * CHUNK + column).to(tl.float32)
        total += weight.to(tl.float32) * x[None, :]
        if GATE:
            up_total += up.to(tl.float32) * x[None, :]
    result = tl.sum(total, 1)
    scale = 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / INPUTS + eps)
        result = result * scale
    if GATE:
        result = result / (1.0 + tl.exp(-result)) * (tl.sum(up_total, 1) * scale)
    if ADD:
        result += before
    tl.store(out_ptr + output, result.to(out_ptr.dtype.element_ty))
