"""Kernels that find where top-k, top-p and min-p cut off logits on NVIDIA GPUs, in Triton:
sampler.restrict for all rows at once, without a sort.

A restriction is a cut: the greatest logit such that the tokens not below it weigh enough. For top-k
every token weighs 1, and k is enough; for top-p a token weighs its probability. A bracket of cuts
is narrowed, `lo <= cut < hi`: each launch weighs CUTS places inside it, every tile of the row for
itself, and the next launch begins by putting the tiles together. Then the few tokens still in the
bracket are collected, and one program a row bisects among them. Where too many are left it bisects
among the whole row, which is slow, and equally right.

Cuts are images: logits as integers of the same order. Masses are float64, relative to the greatest
logit. Sums have a fixed order, so that a row's token depends only on the row.

A state is RECORD numbers a row, float64: lo, hi, the weight from hi on, the weight that is enough,
the greatest logit (not a number if nothing is to be drawn), and from CUTS on the places that were
weighed. A part is PART numbers a tile, float64: the weights from each place to hi, and the greatest
and the least image in the bracket. Knobs are KNOBS numbers a row, float64: temperature, top_k,
top_p, min_p and a number in [0, 1).
"""

import triton
import triton.language as tl

from zrt.runtime.compute.cuda.kernels.dense.dependent_launch import launch_dependents, wait

CUTS = tl.constexpr(16)
RECORD = tl.constexpr(32)
PART = tl.constexpr(18)
KNOBS = tl.constexpr(5)
SEGMENT = tl.constexpr(128)
"""The most tokens of one tile that are collected."""
BOTTOM = tl.constexpr(-2139095040)
"""The image of the least finite number: logits that are ruled out altogether are below it."""
FAR = tl.constexpr(1 << 40)
"""An image beyond all others."""
REACH = tl.constexpr(64.0)
"""The distance of the first places below the greatest logit, in units of temperature for masses;
each place is half as far as the one before."""


@triton.jit
def _image(x):
    """Return float32 as int32 in the same order."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)  # the two zeros are equal
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _logit(image):
    """Return the float32 that `_image` was made from."""
    bits = image.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def mass_of(x, top, temperature):
    """Return the probability of tokens as float64, but for a factor that all tokens of the row
    share."""
    return tl.exp((x.to(tl.float64) - top) * tl.minimum(1.0 / temperature, 1e300))


@triton.jit
def _weight(x, inside, top, temperature, MASS: tl.constexpr):
    """Return the weight of each of x that is inside, else 0."""
    if MASS:
        return tl.where(inside, mass_of(x, top, temperature), 0.0)
    else:
        return inside.to(tl.int32)


@triton.jit
def greatest_of(top_ptr, row, tiles, PADDED: tl.constexpr):
    """Return the greatest logit of the row as float64; not a number if any logit is not."""
    tile = tl.arange(0, PADDED)
    tops = tl.load(top_ptr + row * tiles + tile, mask=tile < tiles, other=float("-inf"))
    broken = tl.max((tops != tops).to(tl.int32), 0) > 0
    return tl.where(broken, float("nan"), tl.max(tops, 0)).to(tl.float64)


@triton.jit
def load_tile(logits_ptr, row, tile, width, wanted, TILE: tl.constexpr):
    """Load the logits of one tile, or only minus infinity if the tile is not wanted."""
    token = tile * TILE + tl.arange(0, TILE)
    return tl.load(logits_ptr + row.to(tl.int64) * width + token, mask=(token < width) & wanted, other=float("-inf"))


@triton.jit
def _load_state(state_ptr, row):
    at = state_ptr + row * RECORD
    lo = tl.load(at).to(tl.int64)
    hi = tl.load(at + 1).to(tl.int64)
    return lo, hi, tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)


@triton.jit
def _store_state(state_ptr, row, lo, hi, above, enough, top):
    at = state_ptr + row * RECORD
    tl.store(at, lo.to(tl.float64))
    tl.store(at + 1, hi.to(tl.float64))
    tl.store(at + 2, above)
    tl.store(at + 3, enough)
    tl.store(at + 4, top)


@triton.jit
def _narrowed(
    before_ptr, part_ptr, knob_ptr, row, tiles, IS_SECOND: tl.constexpr, MASS: tl.constexpr, PADDED: tl.constexpr
):
    """Return the row's state, updated by the weights of the previous launch."""
    lo, hi, above, enough, top = _load_state(before_ptr, row)
    if hi - lo > 1:
        slot = tl.arange(0, CUTS)
        tile = tl.arange(0, PADDED)
        at = part_ptr + (row * tiles + tile) * PART
        weights = tl.sum(tl.load(at[:, None] + slot[None, :], mask=(tile < tiles)[:, None], other=0.0), 0)
        greatest = tl.max(tl.load(at + CUTS, mask=tile < tiles, other=-FAR), 0).to(tl.int64)
        least = tl.min(tl.load(at + CUTS + 1, mask=tile < tiles, other=FAR), 0).to(tl.int64)
        cuts = tl.load(before_ptr + row * RECORD + CUTS + slot).to(tl.int64)
        if IS_SECOND:  # the first place that was weighed is where the bracket began
            total = tl.sum(tl.where(slot == 0, weights, 0.0), 0)
            if MASS:
                enough = tl.maximum(tl.load(knob_ptr + row * KNOBS + 2) * total, 1e-300)
            else:
                enough = tl.minimum(tl.load(knob_ptr + row * KNOBS + 1), total)
        holds = above + weights >= enough
        lo = tl.maximum(tl.max(tl.where(holds, cuts, lo), 0), least)
        hi = tl.minimum(tl.min(tl.where(holds, hi, cuts), 0), greatest + 1)
        above += tl.max(tl.where(holds, 0.0, weights), 0)
    return lo, hi, above, enough, top


@triton.jit
def narrow(
    logits_ptr,
    top_ptr,
    knob_ptr,
    before_ptr,
    before_part_ptr,
    state_ptr,
    part_ptr,
    width,
    tiles,
    STEP: tl.constexpr,
    MASS: tl.constexpr,
    TILE: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Weigh CUTS places of the bracket in one tile of one row. STEP counts from 0; the first step
    of all needs no previous state."""
    row = tl.program_id(0)
    tile = tl.program_id(1)
    wait()
    launch_dependents()
    temperature = tl.load(knob_ptr + row * KNOBS)
    if STEP > 0:
        lo, hi, above, enough, top = _narrowed(
            before_ptr, before_part_ptr, knob_ptr, row, tiles, STEP == 1, MASS, PADDED
        )
    elif MASS:
        lo, hi, above, enough, top = _load_state(before_ptr, row)
    else:
        top = greatest_of(top_ptr, row, tiles, PADDED)
        top_k = tl.load(knob_ptr + row * KNOBS + 1)
        is_drawn = (temperature > 0) & (tl.abs(top) < float("inf"))
        lo = tl.full([], BOTTOM, tl.int64)
        end = tl.where(is_drawn, _image(top.to(tl.float32)), 0).to(tl.int64) + 1
        hi = tl.where(is_drawn & (top_k > 0) & (top_k < width), end, lo + 1)
        above = tl.full([], 0.0, tl.float64)
        enough = above
        top = tl.where(is_drawn, top, float("nan"))
    if tile == 0:
        _store_state(state_ptr, row, lo, hi, above, enough, top)
    if hi - lo > 1:
        slot = tl.arange(0, CUTS)
        if STEP == 0:
            unit = temperature if MASS else 1.0
            place = top - unit * REACH / (1 << slot).to(tl.float64)
        else:
            first = _logit(lo).to(tl.float64)
            place = first + (_logit(hi - 1).to(tl.float64) - first) * ((slot + 1).to(tl.float64) / (CUTS + 1))
        cuts = tl.minimum(tl.maximum(_image(place.to(tl.float32)).to(tl.int64), lo), hi - 1)
        if STEP == 0:
            cuts = tl.where(slot == 0, lo, cuts)
        if tile == 0:
            tl.store(state_ptr + row * RECORD + CUTS + slot, cuts.to(tl.float64))
        cuts = cuts.to(tl.int32)
        wanted = _image(tl.load(top_ptr + row * tiles + tile)) >= lo
        x = load_tile(logits_ptr, row, tile, width, wanted, TILE)
        image = _image(x)
        inside = (image >= lo) & (image < hi)
        at = part_ptr + (row * tiles + tile) * PART
        if tl.max(inside.to(tl.int32), 0) > 0:
            weight = _weight(x, inside, top, temperature, MASS)
            for index in tl.static_range(CUTS):
                cut = tl.sum(tl.where(slot == index, cuts, 0), 0)
                tl.store(at + index, tl.sum(tl.where(image >= cut, weight, 0), 0).to(tl.float64))
            tl.store(at + CUTS, tl.max(tl.where(inside, image, -2147483648), 0).to(tl.float64))
            tl.store(at + CUTS + 1, tl.min(tl.where(inside, image, 2147483647), 0).to(tl.float64))
        else:
            tl.store(at + slot, tl.zeros([CUTS], tl.float64))
            tl.store(at + CUTS, -FAR)
            tl.store(at + CUTS + 1, FAR)


@triton.jit
def collect(
    logits_ptr,
    top_ptr,
    knob_ptr,
    before_ptr,
    before_part_ptr,
    state_ptr,
    segment_ptr,
    count_ptr,
    width,
    tiles,
    MASS: tl.constexpr,
    TILE: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Write the images of one tile that are still in the bracket, as many as a segment has room
    for, and how many there are."""
    row = tl.program_id(0)
    tile = tl.program_id(1)
    wait()
    launch_dependents()
    lo, hi, above, enough, top = _narrowed(before_ptr, before_part_ptr, knob_ptr, row, tiles, False, MASS, PADDED)
    if tile == 0:
        _store_state(state_ptr, row, lo, hi, above, enough, top)
    if hi - lo > 1:
        at = row * tiles + tile
        x = load_tile(logits_ptr, row, tile, width, _image(tl.load(top_ptr + at)) >= lo, TILE)
        image = _image(x)
        inside = (image >= lo) & (image < hi)
        count = tl.sum(inside.to(tl.int32), 0)
        tl.store(count_ptr + at, count)
        if count > 0:
            place = tl.cumsum(inside.to(tl.int32), 0) - 1
            tl.store(segment_ptr + at * SEGMENT + place, image, mask=inside & (place < SEGMENT))


@triton.jit
def settle(
    logits_ptr,
    top_ptr,
    knob_ptr,
    before_ptr,
    segment_ptr,
    count_ptr,
    state_ptr,
    width,
    tiles,
    MASS: tl.constexpr,
    TILE: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Find the cut of one row. After top-k comes the bracket of top-p; after top-p, `lo` is
    replaced by how far below the greatest logit a token may be."""
    row = tl.program_id(0)
    wait()
    launch_dependents()
    temperature = tl.load(knob_ptr + row * KNOBS)
    lo, hi, above, enough, top = _load_state(before_ptr, row)
    if hi - lo > 1:
        tile = tl.arange(0, PADDED)
        counts = tl.load(count_ptr + row * tiles + tile, mask=tile < tiles, other=0)
        if tl.max(counts, 0) <= SEGMENT:
            place = tl.arange(0, SEGMENT)
            inside = place[None, :] < counts[:, None]
            at = (row * tiles + tile) * SEGMENT
            image = tl.load(segment_ptr + at[:, None] + place[None, :], mask=inside, other=0)
            weight = _weight(_logit(image), inside, top, temperature, MASS)
            while hi - lo > 1:
                middle = lo + (hi - lo) // 2
                total = tl.sum(tl.sum(tl.where(image >= middle, weight, 0), 1), 0).to(tl.float64)
                holds = above + total >= enough
                lo = tl.where(holds, middle, lo)
                hi = tl.where(holds, hi, middle)
        else:
            end = hi
            while hi - lo > 1:
                middle = lo + (hi - lo) // 2
                total = tl.full([], 0.0, tl.float64)
                for index in range(tiles):
                    if _image(tl.load(top_ptr + row * tiles + index)) >= middle:
                        x = load_tile(logits_ptr, row, index, width, True, TILE)
                        image = _image(x)
                        inside = (image >= middle) & (image < end)
                        total += tl.sum(_weight(x, inside, top, temperature, MASS), 0).to(tl.float64)
                holds = above + total >= enough
                lo = tl.where(holds, middle, lo)
                hi = tl.where(holds, hi, middle)
    if MASS:
        min_p = tl.load(knob_ptr + row * KNOBS + 3)
        least = tl.where(min_p > 0, tl.log(tl.maximum(min_p, 1e-300)) * temperature, float("-inf"))
        tl.store(state_ptr + row * RECORD, tl.maximum(_logit(lo).to(tl.float64) - top, least))
        tl.store(state_ptr + row * RECORD + 4, top)
    else:
        is_cut = (top == top) & (tl.load(knob_ptr + row * KNOBS + 2) < 1)
        end = tl.where(is_cut, _image(top.to(tl.float32)).to(tl.int64), lo) + 1
        _store_state(state_ptr, row, lo, end, tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64), top)
