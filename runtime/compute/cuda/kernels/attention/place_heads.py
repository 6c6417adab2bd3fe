"""The preparation of heads for attention, in Triton: queries and keys normed and rotated, keys and
values written to the pool of pages.

Each number is computed in float32 and rounded once.
"""

import triton
import triton.language as tl

from zrt.runtime.compute.cuda.kernels.dense.dependent_launch import launch_dependents, wait


@triton.jit
def place_heads(
    qkv_ptr,
    norm_ptr,
    cos_ptr,
    sin_ptr,
    slot_ptr,
    k_ptr,
    v_ptr,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    NORM: tl.constexpr,
    ROTATE: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Norm and rotate TOGETHER heads of one row of [q | k | v]: queries in place, keys and values
    into the pool at the row's slot."""
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER))[:, None]
    d = tl.arange(0, PADDED)[None, :]
    inside = (head < HEADS + 2 * KV_HEADS) & (d < DIM)
    turned = inside & (head < HEADS + KV_HEADS)  # q and k
    half: tl.constexpr = ROPE_DIM // 2
    rotated = d < ROPE_DIM
    other = tl.where(rotated, (d + half) % ROPE_DIM if ROTATE else d, d)
    wait()
    launch_dependents()
    at = qkv_ptr + row * ((HEADS + 2 * KV_HEADS) * DIM) + head * DIM
    x = tl.load(at + d, mask=inside, other=0.0).to(tl.float32)
    slot = tl.load(slot_ptr + row)
    result = x
    if ROTATE:
        y = tl.load(at + other, mask=turned, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
        result = x * scale * tl.load(norm_ptr + head * DIM + d, mask=turned, other=0.0).to(tl.float32)
        if ROTATE:
            y = y * scale * tl.load(norm_ptr + head * DIM + other, mask=turned, other=0.0).to(tl.float32)
    if ROTATE:
        cos = tl.load(cos_ptr + row * ROPE_DIM + d, mask=rotated, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + row * ROPE_DIM + d, mask=rotated, other=0.0).to(tl.float32)
        result = result * cos + y * sin
    result = tl.where(turned, result, x).to(qkv_ptr.dtype.element_ty)
    tl.debug_barrier()  # other threads have read the numbers that this thread writes
    tl.store(at + d, result, mask=turned & (head < HEADS))
    place = slot * KV_HEADS + head - HEADS
    tl.store(k_ptr + place * DIM + d, result, mask=turned & (head >= HEADS))
    tl.store(v_ptr + (place - KV_HEADS) * DIM + d, result, mask=inside & (head >= HEADS + KV_HEADS))
