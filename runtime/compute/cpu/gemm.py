"""The GEMM of activations with packed weights on the CPU, float32.

A weight [out, in] is packed into panels of `LANES` outputs, each [in, LANES], so that a vector
register holds the sums of one row for all outputs of a panel, and nothing is added across a
register at the end. A tile of rows x two panels keeps its sums in registers while the panels are
read; meanwhile the next panels are prefetched into the cache, so that memory and arithmetic work at
the same time (the scheme of Goto and van de Geijn, doi 10.1145/1356052.1356053, without its packing
of activations). Every sum runs over the inputs in order: a row's result is the same, bit by bit,
whatever other rows there are.

All products of a token in a 135M-parameter model's 30 blocks, ms on two AVX-512 cores, MKL with
plain weights and this module: 1 row 21 and 20; 4: 38 and 23; 8: 49 and 24; 16: 49 and 31; 32: 57
and 45; 128: 121 and 114; 512: 384 and 410.
"""

import ctypes
from typing import Any, Final

import torch
from torch import Tensor

from zrt.runtime.compute.cpu.numba_runtime import (
    FAST,
    LANES,
    cgutils,
    intrinsic,
    ir,
    kernel,
    njit,
    run,
    take,
    take_next,
    types,
)

UNROLL: Final = 4
ROWS: Final = 96
"""Rows whose activations stay in the cache while all panels are read."""
AHEAD: Final = 4096
"""Bytes that the product of one row prefetches weights ahead: the processor's own prefetcher does
not look beyond the page that it reads (measured on two cores: 4 to 8 % less time than without, and
less of what was in the cache is evicted)."""
PACKED_AT_ONCE: Final = 1 << 16
"""Numbers that are held twice while a weight is packed in place."""

_I8, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
_VECTOR: Final = ir.VectorType(_F32, LANES)


def _tile(rows: int, panels: int, fetched: tuple[int, ...] = (), ahead: int = 0) -> Any:
    """Return a native function: out = start + x wᵀ for this many rows and panels. `fetched` are
    those of the next panels to prefetch into the cache; `ahead`: prefetch the weights this many
    bytes further on.

    Addresses and strides are in bytes: w, bytes of a panel, x, its row stride, inputs, start, its
    row stride, its panel stride, out, its row stride.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def tile(
        typing: Any,
        w: Any,
        panel: Any,
        x: Any,
        x_stride: Any,
        k: Any,
        start: Any,
        start_stride: Any,
        start_panel: Any,
        out: Any,
        out_stride: Any,
    ) -> Any:
        signature = types.void(*[types.int64] * 10)

        def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _lower_tile(builder, args, rows, panels, fetched, ahead)
            return context.get_dummy_value()

        return signature, lower

    return tile


def _lower_tile(b: Any, args: Any, rows: int, panels: int, fetched: tuple[int, ...], ahead: int) -> None:
    """Emit the tile's instructions: a loop over the inputs with rows x panels sums in registers."""
    w, panel, x, x_stride, k, start, start_stride, start_panel, out, out_stride = args
    fma = cgutils.get_or_insert_function(b.module, ir.FunctionType(_VECTOR, [_VECTOR] * 3), f"llvm.fma.v{LANES}f32")
    fetch = cgutils.get_or_insert_function(
        b.module, ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32]), "llvm.prefetch.p0i8"
    )

    def at(base: Any, *offsets: tuple[Any, int]) -> Any:
        for stride, count in offsets:
            base = b.add(base, b.mul(stride, _I64(count))) if count else base
        return base

    def load(address: Any, kind: Any) -> Any:
        return b.load(b.inttoptr(address, kind.as_pointer()), align=4)

    def splat(number: Any) -> Any:
        undefined = ir.Constant(_VECTOR, ir.Undefined)
        first = b.insert_element(undefined, number, _I32(0))
        return b.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES))

    tile = [(row, column) for row in range(rows) for column in range(panels)]
    w_panels = [at(w, (panel, column)) for column in range(panels)]
    called = [at(w, (panel, panels + column)) for column in fetched]
    if ahead:
        called += [b.add(address, _I64(ahead)) for address in w_panels]
    x_rows = [at(x, (x_stride, row)) for row in range(rows)]
    begins = [load(at(start, (start_stride, row), (start_panel, column)), _VECTOR) for row, column in tile]
    before, loop, after = b.block, b.append_basic_block("inputs"), b.append_basic_block("store")
    b.branch(loop)
    b.position_at_end(loop)
    i = b.phi(_I64)
    i.add_incoming(_I64(0), before)
    carried = [b.phi(_VECTOR) for _ in tile]
    sums = list(carried)
    x_at, w_at = b.mul(i, _I64(4)), b.mul(i, _I64(4 * LANES))
    for step in range(UNROLL):
        for address in called:
            line = b.inttoptr(b.add(b.add(address, w_at), _I64(4 * LANES * step)), _I8.as_pointer())
            b.call(fetch, [line, _I32(0), _I32(2), _I32(1)])  # for reading, into the second-level cache, data
        weights = [load(b.add(b.add(address, w_at), _I64(4 * LANES * step)), _VECTOR) for address in w_panels]
        inputs = [splat(load(b.add(b.add(address, x_at), _I64(4 * step)), _F32)) for address in x_rows]
        sums = [b.call(fma, [weights[column], inputs[row], sums[n]]) for n, (row, column) in enumerate(tile)]
    following = b.add(i, _I64(UNROLL))
    i.add_incoming(following, loop)
    for phi, begin, total in zip(carried, begins, sums, strict=True):
        phi.add_incoming(begin, before)
        phi.add_incoming(total, loop)
    b.cbranch(b.icmp_signed("<", following, k), loop, after)
    b.position_at_end(after)
    for (row, column), total in zip(tile, sums, strict=True):
        address = b.add(at(out, (out_stride, row)), _I64(4 * LANES * column))
        b.store(total, b.inttoptr(address, _VECTOR.as_pointer()), align=4)


_MOST: Final = (
    12 if LANES == 16 else 6
)  # rows of the largest tile: its sums, two weights and an input fill the registers
_HALF: Final = 8 if LANES == 16 else 4
_tile_most, _tile_half, _tile_4, _tile_2 = (_tile(rows, 2) for rows in (_MOST, _HALF, 4, 2))
_tile_1 = _tile(1, 2, ahead=AHEAD)
_tile_both, _tile_left, _tile_right = (_tile(_HALF, 2, fetched) for fetched in ((0, 1), (0,), (1,)))
_tile_4_single, _tile_1_single = _tile(4, 1), _tile(1, 1)


@njit(**FAST)  # type: ignore[untyped-decorator]
def _pair(w: Any, panel: Any, x: Any, xs: Any, k: Any, start: Any, ss: Any, sp: Any, out: Any, os: Any, n: Any) -> None:
    """Compute two panels, `n` rows. The first tiles prefetch the next two panels."""
    r = 0
    if n == _HALF:
        _tile_both(w, panel, x, xs, k, start, ss, sp, out, os)
        r = _HALF
    elif n >= 2 * _HALF:
        _tile_left(w, panel, x, xs, k, start, ss, sp, out, os)
        _tile_right(w, panel, x + _HALF * xs, xs, k, start + _HALF * ss, ss, sp, out + _HALF * os, os)
        r = 2 * _HALF
    while n - r >= _MOST:
        _tile_most(w, panel, x + r * xs, xs, k, start + r * ss, ss, sp, out + r * os, os)
        r += _MOST
    while n - r >= _HALF:
        _tile_half(w, panel, x + r * xs, xs, k, start + r * ss, ss, sp, out + r * os, os)
        r += _HALF
    while n - r >= 4:
        _tile_4(w, panel, x + r * xs, xs, k, start + r * ss, ss, sp, out + r * os, os)
        r += 4
    while n - r >= 2:
        _tile_2(w, panel, x + r * xs, xs, k, start + r * ss, ss, sp, out + r * os, os)
        r += 2
    if n > r:
        _tile_1(w, panel, x + r * xs, xs, k, start + r * ss, ss, sp, out + r * os, os)


@njit(**FAST)  # type: ignore[untyped-decorator]
def _single(
    w: Any, panel: Any, x: Any, xs: Any, k: Any, start: Any, ss: Any, sp: Any, out: Any, os: Any, n: Any
) -> None:
    """Compute the last panel of an odd number, `n` rows."""
    r = 0
    while n - r >= 4:
        _tile_4_single(w, panel, x + r * xs, xs, k, start + r * ss, ss, sp, out + r * os, os)
        r += 4
    while n > r:
        _tile_1_single(w, panel, x + r * xs, xs, k, start + r * ss, ss, sp, out + r * os, os)
        r += 1


@kernel
def _product(job: Any) -> None:
    """Compute the next parts of a job until none is left. `job`: counter, panels, panels a part
    (even), rows, then the arguments of a tile, strides in bytes."""
    panels, part, n, w, panel, x, xs, k = job[1], job[2], job[3], job[4], job[5], job[6], job[7], job[8]
    start, ss, sp, out, os = job[9], job[10], job[11], job[12], job[13]
    while True:
        first = take_next(job) * part
        if first >= panels:
            break
        last = min(panels, first + part)
        for r in range(0, n, ROWS):
            rows = min(ROWS, n - r)
            xr, sr, outr = x + r * xs, start + r * ss, out + r * os
            for p in range(first, last - 1, 2):
                _pair(w + p * panel, panel, xr, xs, k, sr + p * sp, ss, sp, outr + p * 4 * LANES, os, rows)
            if (last - first) % 2 == 1:
                p = last - 1
                _single(w + p * panel, panel, xr, xs, k, sr + p * sp, ss, sp, outr + p * 4 * LANES, os, rows)


_PRODUCT: Final = _product.address
_Job: Final = ctypes.c_int64 * 14
_NOTHING: Final = torch.zeros(LANES)


def packs(weight: Tensor) -> bool:
    """Return whether a weight [out, in] can be packed, except for the outputs beyond the last whole
    panel."""
    return take(weight) and weight.is_contiguous() and weight.shape[0] >= LANES and weight.shape[1] % UNROLL == 0


def pack(weight: Tensor) -> Tensor:
    """Pack a weight [out, in] in place, as far as it has whole panels; return a view [panels, in,
    LANES]."""
    outs, k = weight.shape
    panels = weight[: outs // LANES * LANES].view(-1, LANES, k)
    packed = panels.view(-1, k, LANES)
    step = max(1, PACKED_AT_ONCE // (LANES * k))
    for first in range(0, len(packed), step):
        packed[first : first + step] = panels[first : first + step].clone().transpose(1, 2)
    return packed


def product(x: Tensor, packed: Tensor, bias: Tensor | None, out: Tensor, *, add: bool) -> None:
    """Compute out = x wᵀ + bias, or out += x wᵀ (without bias). `x` [n, in], `out` [n, panels x
    LANES or more]; the rows of each may lie apart, not overlap."""
    panels, k, _ = packed.shape
    threads = torch.get_num_threads()
    stride = 4 * out.stride(0)
    if add:
        start, start_stride, start_panel = out.data_ptr(), stride, 4 * LANES
    elif bias is not None:
        start, start_stride, start_panel = bias.data_ptr(), 0, 4 * LANES
    else:
        start, start_stride, start_panel = _NOTHING.data_ptr(), 0, 0
    job = _Job(
        0,
        panels,
        max(2, min(16, panels // (8 * threads)) // 2 * 2),
        x.shape[0],
        packed.data_ptr(),
        4 * LANES * k,
        x.data_ptr(),
        4 * x.stride(0),
        k,
        start,
        start_stride,
        start_panel,
        out.data_ptr(),
        stride,
    )
    run(_PRODUCT, job, threads)
