"""Attention of prompts on NVIDIA GPUs, in Triton: many tokens of a session at a time, straight from
its pages. Scores and sums are in float32, and each result is rounded once."""

import triton
import triton.language as tl

from zrt.runtime.compute.cuda.kernels.dense.dependent_launch import launch_dependents, wait


@triton.jit
def look(
    q,
    k_ptr,
    v_ptr,
    table_ptr,
    kv_head,
    position,
    low,
    high,
    end,
    scale,
    softcap,
    top,
    weight,
    total,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend from queries [n, PADDED] to tokens `low..high` of a history with `end` tokens, as far
    as the queries see them, and add to what was found before: for each query the greatest score (as
    a power of two), the sum of weights relative to it, and that of values."""
    d = tl.arange(0, PADDED)
    inside = (d < DIM)[None, :]
    for start in tl.range(low, high, TILE, num_stages=STAGES):
        t = start + tl.arange(0, TILE)
        held = t < end
        page = tl.load(table_ptr + t // PAGE, mask=held, other=0).to(tl.int64)
        at = ((page * PAGE + t % PAGE) * KV_HEADS + kv_head) * DIM
        k = tl.load(k_ptr + at[:, None] + d[None, :], mask=held[:, None] & inside, other=0.0)
        v = tl.load(v_ptr + at[:, None] + d[None, :], mask=held[:, None] & inside, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        if CAPPED:  # tanh(x) = 2 sigmoid(2x) - 1
            score = softcap * (2.0 / (1.0 + tl.exp(-2.0 * score * scale / softcap)) - 1.0)
            score = score * 1.4426950408889634
        else:
            score = score * (scale * 1.4426950408889634)
        if MASKED:
            seen = t[None, :] <= position[:, None]
            if WINDOW > 0:
                seen &= t[None, :] > position[:, None] - WINDOW
            score = tl.where(seen, score, float("-inf"))
        now = tl.maximum(top, tl.max(score, 1))
        base = now
        if MASKED:
            base = tl.where(now == float("-inf"), 0.0, now)  # 0 for a query that has seen nothing yet
        p = tl.exp2(score - base[:, None])
        fade = tl.exp2(top - base)
        weight = weight * fade + tl.sum(p, 1)
        total = total * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        top = now
    return top, weight, total


@triton.jit
def attend_tile(
    qkv_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    tile_ptr,
    out_ptr,
    part_ptr,
    stat_ptr,
    table_stride,
    scale,
    softcap,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    PAGE: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute the causal attention of one query head of up to QUERIES tokens that follow each other
    in a session, over one of SPLITS parts of its history.

    `tile` int32 [tiles, 4]: for each tile its first row in the batch, how many rows (0: there is
    nothing to do), that row's position in the session, and which of `table` is the session's. The
    last tiles are begun first: in a prompt they have the most to do. With one split it writes
    `out`; with several, float32 sums [row, head, split, dim] to `part`, if it has any, and
    (maximum, weight) to `stat`.
    """
    head = tl.program_id(0)
    at_tile = tile_ptr + (tl.num_programs(1) - 1 - tl.program_id(1)) * 4
    split = tl.program_id(2)
    kv_head = head // (HEADS // KV_HEADS)
    wait()
    launch_dependents()
    row = tl.load(at_tile).to(tl.int64)
    count = tl.load(at_tile + 1)
    first = tl.load(at_tile + 2)
    table = table_ptr + tl.load(at_tile + 3).to(tl.int64) * table_stride
    i = tl.arange(0, QUERIES)
    d = tl.arange(0, PADDED)
    mine = (i < count)[:, None] & (d < DIM)[None, :]
    position = first + i
    rows = row + i
    q_at = qkv_ptr + rows[:, None] * ((HEADS + 2 * KV_HEADS) * DIM) + head * DIM + d[None, :]
    q = tl.load(q_at, mask=mine, other=0.0)
    low = 0
    if WINDOW > 0:
        low = tl.maximum(first - WINDOW + 1, 0)
    end = tl.where(count > 0, first + count, low)
    chunk = tl.cdiv(tl.cdiv(end - low, SPLITS), TILE) * TILE
    low += split * chunk
    high = tl.minimum(low + chunk, end)
    whole = low  # what every query sees
    if WINDOW == 0:
        whole = low + tl.maximum(tl.minimum(high, first + 1) - low, 0) // TILE * TILE
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    weight = tl.zeros([QUERIES], tl.float32)
    total = tl.zeros([QUERIES, PADDED], tl.float32)
    if WINDOW == 0:
        top, weight, total = look(
            q, k_ptr, v_ptr, table, kv_head, position, low, whole, end, scale, softcap, top, weight, total,
            False, WINDOW, CAPPED, PAGE, TILE, KV_HEADS, DIM, PADDED, STAGES,
        )  # fmt: skip
    top, weight, total = look(
        q, k_ptr, v_ptr, table, kv_head, position, whole, high, end, scale, softcap, top, weight, total,
        True, WINDOW, CAPPED, PAGE, TILE, KV_HEADS, DIM, PADDED, STAGES,
    )  # fmt: skip
    if SPLITS == 1:
        out_at = out_ptr + rows[:, None] * (HEADS * DIM) + head * DIM + d[None, :]
        tl.store(out_at, (total / weight[:, None]).to(out_ptr.dtype.element_ty), mask=mine)
    else:
        at = (rows * HEADS + head) * SPLITS + split
        tl.store(part_ptr + at[:, None] * DIM + d[None, :], total, mask=mine & (low < high))
        tl.store(stat_ptr + at * 2, top, mask=i < count)
        tl.store(stat_ptr + at * 2 + 1, weight, mask=i < count)
