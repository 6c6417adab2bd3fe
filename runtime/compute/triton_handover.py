"""Kernels that copy rows to memory of the host, and from there, with the words that say whether they are void (handover.py).

A copy engine would do the copies, but each hand of work between it and the kernels costs microseconds, and much more where several processes share
the device.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count", "voids"])
def leave(rows_ptr, place_ptr, count, void_ptr, voids, said_ptr, TILE: tl.constexpr):
    """`count` numbers to `place`, a tile a program; to `said` whether one of int32 `void` [voids] is not 0."""
    if tl.program_id(0) == 0:
        void = 0
        for index in range(voids):
            void |= tl.load(void_ptr + index)
        tl.store(said_ptr, (void != 0).to(tl.int32))
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    tl.store(place_ptr + at, tl.load(rows_ptr + at, mask=at < count), mask=at < count)


@triton.jit(do_not_specialize=["count"])
def take(place_ptr, to_ptr, count, broken_ptr, said_ptr, void_ptr, TILE: tl.constexpr):
    """`count` numbers from `place`, a tile a program; to `void` whether `broken` or what was said with them is not 0. Others write that memory:
    nothing of it is read from a cache."""
    if tl.program_id(0) == 0:
        void = tl.load(broken_ptr, cache_modifier=".cv") | tl.load(said_ptr, cache_modifier=".cv")
        tl.store(void_ptr, (void != 0).to(tl.int32))
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    tl.store(to_ptr + at, tl.load(place_ptr + at, mask=at < count, cache_modifier=".cv"), mask=at < count)
