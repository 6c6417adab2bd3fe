"""Kernels of the decoder on NVIDIA GPUs, in Triton. Each computes in float32 and rounds its result
once.

All take part in programmatic dependent launch (dependent_launch.py).
"""

import triton
import triton.language as tl

from zrt.runtime.compute.cuda.kernels.dense.dependent_launch import launch_dependents, wait


@triton.jit
def norm_rows(x_ptr, weight_ptr, out_ptr, x_stride, out_stride, eps, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """RMSNorm of one row a program; `out` may be `x`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    wait()
    launch_dependents()
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    tl.store(out_ptr + row * out_stride + column, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gate_rows(gate_up_ptr, WIDTH: tl.constexpr, TILE: tl.constexpr, SILU: tl.constexpr):
    """gate = activation(gate) * up in rows [gate | up]; a program does TILE numbers of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < WIDTH
    wait()
    launch_dependents()
    at = gate_up_ptr + row * (2 * WIDTH) + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        gate = gate / (1.0 + tl.exp(-gate))
    else:  # GELU by tanh: x * sigmoid(2 u) is x * (1 + tanh(u)) / 2
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate = gate / (1.0 + tl.exp(-2.0 * inner))
    tl.store(at, (gate * up).to(gate_up_ptr.dtype.element_ty), mask=inside)


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
    tl.debug_barrier()  # other threads have read what this one writes
    tl.store(at + d, result, mask=turned & (head < HEADS))
    place = slot * KV_HEADS + head - HEADS
    tl.store(k_ptr + place * DIM + d, result, mask=turned & (head >= HEADS))
    tl.store(v_ptr + (place - KV_HEADS) * DIM + d, result, mask=inside & (head >= HEADS + KV_HEADS))


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
    """Attention of one token: a program does the query heads of one kv head over one of SPLITS
    parts of one session's history.

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
    """The parts that `attend` left of one head of one session, or `attend_tile` (TILED) of one row,
    put together. The latter does not write parts that have no weight."""
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
    """A product with one row of x: ROWS outputs a program, each over all inputs, with what stands
    around it.

    NORM: of RMSNorm(x), whose scale is found beside the product and applied after it. GATE: the
    weight is [gate | up], and silu(gate) * up comes out. ADD: to what is in `out`.
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


@triton.jit
def best_of_tile(logits_ptr, top_ptr, index_ptr, width, TILE: tl.constexpr):
    """The greatest logit of one tile of one row, and the first token that has it; not a number if
    any of them is not."""
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
    """Of one row's tiles: float64 best [2, rows], the greatest logit and its token."""
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
