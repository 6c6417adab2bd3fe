"""Attention of one token a session, in Triton, straight from the session's pages.

Scores and sums are in float32, and each result is rounded once.
"""

import triton
import triton.language as tl

from zrt.runtime.compute.cuda.kernels.dense.dependent_launch import launch_dependents, wait


@triton.jit
def attend(
    qkv_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    length_ptr,
    row_ptr,
    out_ptr,
    part_ptr,
    stat_ptr,
    table_stride,
    scale,
    softcap,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute the attention of one token: a program does the query heads of one kv head over one of
    SPLITS parts of one session's history.

    With one split it writes `out`; with several, float32 sums [session, head, split, dim] to `part`
    and (maximum, weight) to `stat`.
    """
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    session = tl.program_id(2)
    group: tl.constexpr = HEADS // KV_HEADS
    wait()
    launch_dependents()
    length = tl.load(length_ptr + session)
    row = tl.load(row_ptr + session).to(tl.int64)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    chunk = tl.cdiv(tl.cdiv(length - first, SPLITS), TILE) * TILE
    low = first + split * chunk
    high = tl.minimum(low + chunk, length)
    g = tl.arange(0, GROUP)
    d = tl.arange(0, PADDED)
    inside = (d < DIM)[None, :]
    head = kv_head * group + g
    mine = (g < group)[:, None] & inside
    q = tl.load(qkv_ptr + row * ((HEADS + 2 * KV_HEADS) * DIM) + head[:, None] * DIM + d[None, :], mask=mine, other=0.0)
    top = tl.full([GROUP], float("-inf"), tl.float32)
    weight = tl.zeros([GROUP], tl.float32)
    total = tl.zeros([GROUP, PADDED], tl.float32)
    for start in tl.range(low, high, TILE, num_stages=STAGES):
        t = start + tl.arange(0, TILE)
        seen = t < high
        page = tl.load(table_ptr + session * table_stride + t // PAGE, mask=seen, other=0).to(tl.int64)
        at = ((page * PAGE + t % PAGE) * KV_HEADS + kv_head) * DIM
        k = tl.load(k_ptr + at[:, None] + d[None, :], mask=seen[:, None] & inside, other=0.0)
        v = tl.load(v_ptr + at[:, None] + d[None, :], mask=seen[:, None] & inside, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if CAPPED:  # tanh(x) = 2 sigmoid(2x) - 1
            score = softcap * (2.0 / (1.0 + tl.exp(-2.0 * score / softcap)) - 1.0)
        score = tl.where(seen[None, :], score * 1.4426950408889634, float("-inf"))
        now = tl.maximum(top, tl.max(score, 1))
        p = tl.exp2(score - now[:, None])
        fade = tl.exp2(top - now)
        weight = weight * fade + tl.sum(p, 1)
        total = total * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        top = now
    if SPLITS == 1:
        at = out_ptr + row * (HEADS * DIM) + head[:, None] * DIM + d[None, :]
        tl.store(at, (total / weight[:, None]).to(out_ptr.dtype.element_ty), mask=mine)
    else:
        at = (session * HEADS + head) * SPLITS + split
        tl.store(part_ptr + at[:, None] * DIM + d[None, :], total, mask=mine)
        tl.store(stat_ptr + at * 2, top, mask=g < group)
        tl.store(stat_ptr + at * 2 + 1, weight, mask=g < group)
