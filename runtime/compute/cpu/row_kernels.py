"""The work between two products, row by row, on the CPU in float32: each kernel is one pass over
its rows where torch takes three to five operations.

The tests compare the kernels with float64.
"""

import ctypes
from typing import Any, Final

import torch
from torch import Tensor

from zrt.runtime.compute.cpu.numba_runtime import LOWEST, ONE, ZERO, exp, floats, kernel, np, run, take_next

ALONE: Final = 32_768
"""The most numbers for which one thread is done before another has woken up."""

_C0: Final = np.float32(2 * (2 / np.pi) ** 0.5)
_C1: Final = np.float32(0.044715)


@kernel
def _norm(job: Any) -> None:
    """Norm the next rows of a job until none is left. `job`: counter, rows, rows a part, heads,
    width, x, its strides (row, head), out, its strides, weight, its head stride, epsilon."""
    rows, part, heads, width = job[1], job[2], job[3], job[4]
    epsilon = floats(job[13])[0]
    while True:
        start = take_next(job) * part
        if start >= rows:
            break
        for row in range(start, min(rows, start + part)):
            for head in range(heads):
                x = floats(job[5] + 4 * (job[6] * row + job[7] * head))
                out = floats(job[8] + 4 * (job[9] * row + job[10] * head))
                weight = floats(job[11] + 4 * job[12] * head)
                total = ZERO
                for i in range(width):
                    total += x[i] * x[i]
                scale = ONE / np.sqrt(total / np.float32(width) + epsilon)
                for i in range(width):
                    out[i] = x[i] * scale * weight[i]


@kernel
def _rotation(job: Any) -> None:
    """Rotate the next rows of a job until none is left. `job`: counter, rows, rows a part, heads,
    half, x, its strides (row, head), cos, sin (both contiguous, sin signed)."""
    rows, part, heads, half = job[1], job[2], job[3], job[4]
    while True:
        start = take_next(job) * part
        if start >= rows:
            break
        for row in range(start, min(rows, start + part)):
            cos, sin = floats(job[8] + 8 * half * row), floats(job[9] + 8 * half * row)
            for head in range(heads):
                low = job[5] + 4 * (job[6] * row + job[7] * head)
                x, y = floats(low), floats(low + 4 * half)
                for i in range(half):
                    a, b = x[i], y[i]
                    x[i] = a * cos[i] + b * sin[i]
                    y[i] = b * cos[half + i] + a * sin[half + i]


@kernel
def _gate(job: Any) -> None:
    """Gate the next rows of a job until none is left. `job`: counter, rows, rows a part, width,
    gate, up, the stride of both, whether the activation is GELU (tanh) in place of SiLU."""
    rows, part, width = job[1], job[2], job[3]
    gelu = job[7] != 0
    while True:
        start = take_next(job) * part
        if start >= rows:
            break
        for row in range(start, min(rows, start + part)):
            gate, up = floats(job[4] + 4 * job[6] * row), floats(job[5] + 4 * job[6] * row)
            for i in range(width):
                x = gate[i]
                t = x * (_C0 + _C0 * _C1 * x * x) if gelu else x  # GELU's tanh as a sigmoid: both are x times one
                e = exp(max(-abs(t), LOWEST))
                gate[i] = x * up[i] * (ONE if t >= ZERO else e) / (ONE + e)


_NORM: Final = _norm.address
_ROTATION: Final = _rotation.address
_GATE: Final = _gate.address
_NormJob: Final = ctypes.c_int64 * 14
_RotationJob: Final = ctypes.c_int64 * 10
_GateJob: Final = ctypes.c_int64 * 8


def norm(x: Tensor, weight: Tensor, eps: Tensor, out: Tensor) -> None:
    """Compute out = x / sqrt(mean(x²) + eps) * weight, the mean over the last dimension. `x`, `out`
    [rows, (heads,) width], rows contiguous; `weight` [(heads,) width]; `eps` [1]."""
    rows, width = x.shape[0], x.shape[-1]
    heads, x_head, out_head = (x.shape[1], x.stride(1), out.stride(1)) if x.ndim == 3 else (1, 0, 0)
    threads, part = _parts(rows, heads * width)
    job = _NormJob(
        0,
        rows,
        part,
        heads,
        width,
        x.data_ptr(),
        x.stride(0),
        x_head,
        out.data_ptr(),
        out.stride(0),
        out_head,
        weight.data_ptr(),
        weight.stride(0) if weight.ndim == 2 else 0,
        eps.data_ptr(),
    )
    run(_NORM, job, threads)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate `heads` [rows, heads, dim] in place by angles [rows, 1, dim], contiguous, as
    `rope.Rotary.at` gives them."""
    rows, count, dim = heads.shape
    threads, part = _parts(rows, count * dim)
    job = _RotationJob(
        0,
        rows,
        part,
        count,
        dim // 2,
        heads.data_ptr(),
        heads.stride(0),
        heads.stride(1),
        cos.data_ptr(),
        sin.data_ptr(),
    )
    run(_ROTATION, job, threads)


def gate(gate: Tensor, up: Tensor, *, gelu: bool) -> None:
    """Compute gate = activation(gate) * up; both are [rows, width], parts of one tensor."""
    rows, width = gate.shape
    threads, part = _parts(rows, 4 * width)
    run(_GATE, _GateJob(0, rows, part, width, gate.data_ptr(), up.data_ptr(), gate.stride(0), gelu), threads)


def _parts(rows: int, width: int) -> tuple[int, int]:
    """Return the number of threads, and the rows of a part: a few parts a thread."""
    threads = torch.get_num_threads()
    if rows * width <= ALONE or threads == 1 or rows == 1:
        return 1, rows
    return threads, max(1, rows // (4 * threads))
