"""Kernels that copy rows to memory of the host, and from there, with the words that say whether the
rows are void (channel.py).

A copy engine could do the copies, but each switch between it and the kernels costs microseconds,
and much more where several processes share the device.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["units", "voids"])
def leave(rows_ptr, place_ptr, units, void_ptr, voids, said_ptr, UNIT: tl.constexpr, TILE: tl.constexpr):
    """Copy `units` times UNIT numbers to `place`, a tile a program; write to `said` whether one of
    int32 `void` [voids] is not 0. The numbers of a unit are written as one where addresses permit:
    the host's memory takes small writes one by one."""
    if tl.program_id(0) == 0:
        void = 0
        for index in range(voids):
            void |= tl.load(void_ptr + index)
        tl.store(said_ptr, (void != 0).to(tl.int32))
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    known = at < units.to(tl.int64) * UNIT
    tl.store(place_ptr + at, tl.load(rows_ptr + at, mask=known), mask=known)


@triton.jit(do_not_specialize=["units"])
def take(place_ptr, to_ptr, units, broken_ptr, said_ptr, void_ptr, UNIT: tl.constexpr, TILE: tl.constexpr):
    """Copy `units` times UNIT numbers from `place`, a tile a program; write to `void` whether
    `broken` or `said` is not 0. Other devices write that memory: nothing of it is read from a
    cache."""
    if tl.program_id(0) == 0:
        void = tl.load(broken_ptr, cache_modifier=".cv") | tl.load(said_ptr, cache_modifier=".cv")
        tl.store(void_ptr, (void != 0).to(tl.int32))
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    known = at < units.to(tl.int64) * UNIT
    tl.store(to_ptr + at, tl.load(place_ptr + at, mask=known, cache_modifier=".cv"), mask=known)
