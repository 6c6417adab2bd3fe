"""Kernels between the products of a block, in Triton: RMSNorm of rows, and the MLP's gate.

Each computes in float32 and rounds its result once.
"""

import triton
import triton.language as tl

from zrt.runtime.compute.cuda.kernels.dense.dependent_launch import launch_dependents, wait


@triton.jit
def norm_rows(x_ptr, weight_ptr, out_ptr, x_stride, out_stride, eps, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Write RMSNorm of the rows of `x` to `out`, one row a program; `out` may be `x`."""
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
    """Compute gate = activation(gate) * up in rows [gate | up]; a program does TILE numbers of one
    row."""
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
