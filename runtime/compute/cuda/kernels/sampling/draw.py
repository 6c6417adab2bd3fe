"""Kernels that draw tokens from logits on NVIDIA GPUs, in Triton: the second half of
sampler.Sampler.pick, once thresholds.py has found which tokens are kept.

A token is the inverse of the cumulative distribution at the row's number, in the order of ids:
first its tile is found, then its place there.
"""

import triton
import triton.language as tl

from zrt.runtime.compute.cuda.kernels.dense.dependent_launch import launch_dependents, wait
from zrt.runtime.compute.cuda.kernels.sampling.thresholds import KNOBS, RECORD, greatest_of, load_tile, mass_of


@triton.jit
def weigh(logits_ptr, top_ptr, knob_ptr, state_ptr, mass_ptr, width, tiles, TILE: tl.constexpr):
    """Write the float64 mass [rows, tiles] of the tokens that may be drawn."""
    row = tl.program_id(0)
    tile = tl.program_id(1)
    wait()
    launch_dependents()
    temperature = tl.load(knob_ptr + row * KNOBS)
    least = tl.load(state_ptr + row * RECORD)
    top = tl.load(state_ptr + row * RECORD + 4)
    at = row * tiles + tile
    if tl.load(top_ptr + at).to(tl.float64) - top >= least:
        x = load_tile(logits_ptr, row, tile, width, True, TILE)
        mass = mass_of(x, top, temperature)
        tl.store(mass_ptr + at, tl.sum(tl.where(x.to(tl.float64) - top >= least, mass, 0.0), 0))
    else:
        tl.store(mass_ptr + at, tl.full([], 0.0, tl.float64))


@triton.jit
def choose(
    logits_ptr,
    top_ptr,
    index_ptr,
    knob_ptr,
    state_ptr,
    mass_ptr,
    result_ptr,
    width,
    tiles,
    TILE: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Write float64 result [2, rows] for one row: the greatest logit and the token where the
    cumulative distribution passes the row's number."""
    row = tl.program_id(0)
    wait()
    launch_dependents()
    temperature = tl.load(knob_ptr + row * KNOBS)
    best = greatest_of(top_ptr, row, tiles, PADDED)
    tile = tl.arange(0, PADDED)
    if (temperature > 0) & (tl.abs(best) < float("inf")):
        masses = tl.load(mass_ptr + row * tiles + tile, mask=tile < tiles, other=0.0)
        goal = tl.load(knob_ptr + row * KNOBS + 4) * tl.sum(masses, 0)
        some = masses > 0
        passed = tl.min(tl.where(some & (tl.cumsum(masses, 0) > goal), tile, PADDED), 0)
        mine = tl.minimum(passed, tl.max(tl.where(some, tile, 0), 0))
        before = tl.sum(tl.where(tile < mine, masses, 0.0), 0)
        x = load_tile(logits_ptr, row, mine, width, True, TILE)
        top = tl.load(state_ptr + row * RECORD + 4)
        kept = x.to(tl.float64) - top >= tl.load(state_ptr + row * RECORD)
        mass = tl.where(kept, mass_of(x, top, temperature), 0.0)
        token = tl.arange(0, TILE)
        at = tl.min(tl.where(kept & (before + tl.cumsum(mass, 0) > goal), token, TILE), 0)
        at = tl.minimum(at, tl.max(tl.where(kept, token, 0), 0))
        picked = mine * TILE + at
    else:
        tops = tl.load(top_ptr + row * tiles + tile, mask=tile < tiles, other=float("-inf"))
        indices = tl.load(index_ptr + row * tiles + tile, mask=tile < tiles, other=2147483647)
        first = tl.min(tl.where(tops.to(tl.float64) == best, indices, 2147483647), 0)
        picked = tl.where(tl.abs(best) < float("inf"), first, 0)
    tl.store(result_ptr + row, best)
    tl.store(result_ptr + tl.num_programs(0) + row, picked.to(tl.float64))
