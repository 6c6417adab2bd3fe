"""Products of few rows and attention of single tokens on the CPU, float32, compiled by numba; the tests compare them with float64.

A kernel is a native function that the OpenMP runtime torch has loaded runs on torch's own threads, so that a process has one pool of them:
the threads of two pools would rob each other while they spin. Each thread takes the next part of the job until none is left, which keeps
them equally busy however long a part takes. What a part computes does not depend on who runs it, nor on how many rows or sessions there are.

Importing this module compiles the kernels, or reads them from `home()/kernels`; numba holds the GIL for it.
"""

import ctypes
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import llvmlite.binding
import numpy as np
import torch
from torch import Tensor

from zrt.runtime.models import home


def _prepare() -> bool:
    """Set what numba reads once, when it is imported; whether compiled kernels can be kept."""
    features = llvmlite.binding.get_host_cpu_features()
    if features.get("avx512f"):  # LLVM prefers half the width on most processors that have it
        os.environ.setdefault("NUMBA_CPU_NAME", llvmlite.binding.get_host_cpu_name())
        os.environ.setdefault("NUMBA_CPU_FEATURES", features.flatten() + ",-prefer-256-bit")
    folder = home() / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    os.environ.setdefault("NUMBA_CACHE_DIR", str(folder))
    return os.access(folder, os.W_OK)


_KEPT: Final = _prepare()

from numba import cfunc, njit, types  # noqa: E402
from numba.extending import intrinsic  # noqa: E402

_FAST: Final = {"fastmath": True, "boundscheck": False, "error_model": "numpy"}
_JOB: Final = types.void(types.CPointer(types.int64))

_ZERO: Final = np.float32(0)
_LOWEST: Final = np.float32(-87.0)  # e to this is the least normal float32
_LOG2_E: Final = np.float32(math.log2(math.e))
_LN2_HIGH: Final = np.float32(0.693359375)  # ln 2 in two parts: the first has few bits, so that its multiples are exact
_LN2_LOW: Final = np.float32(math.log(2) - 0.693359375)
_HALF: Final = np.float32(0.5)
_E2, _E3, _E4, _E5, _E6 = (np.float32(1 / math.factorial(n)) for n in (2, 3, 4, 5, 6))
_E7: Final = np.float32(1 / math.factorial(7))
_ONE: Final = np.float32(1)


@intrinsic  # type: ignore[untyped-decorator]
def _floats(typing: Any, address: Any) -> Any:
    """The float32 numbers at an address."""
    signature = types.CPointer(types.float32)(types.int64)

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return signature, lower


@intrinsic  # type: ignore[untyped-decorator]
def _integers(typing: Any, address: Any) -> Any:
    """The int64 numbers at an address."""
    signature = types.CPointer(types.int64)(types.int64)

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return signature, lower


@intrinsic  # type: ignore[untyped-decorator]
def _next(typing: Any, counter: Any) -> Any:
    """Count up, atomically; what was counted before."""
    signature = types.int64(types.CPointer(types.int64))

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", args[0], context.get_constant(types.int64, 1), "monotonic")

    return signature, lower


@intrinsic  # type: ignore[untyped-decorator]
def _power_of_two(typing: Any, exponent: Any) -> Any:
    """2 to an integer within float32's normal exponents."""
    signature = types.float32(types.int32)

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        biased = builder.add(args[0], context.get_constant(types.int32, 127))
        bits = builder.shl(biased, context.get_constant(types.int32, 23))
        return builder.bitcast(bits, context.get_value_type(types.float32))

    return signature, lower


@njit(error_model="numpy")  # type: ignore[untyped-decorator]  # without fastmath, which would merge the two parts of ln 2
def _exp(x: Any) -> Any:
    """e to `x` of -87 to 0, within 2e-7 of it: a Taylor polynomial after Cody and Waite's reduction."""
    n = np.int32(x * _LOG2_E - _HALF)
    f = (x - np.float32(n) * _LN2_HIGH) - np.float32(n) * _LN2_LOW
    p = _E2 + f * (_E3 + f * (_E4 + f * (_E5 + f * (_E6 + f * _E7))))
    return (_ONE + f * (_ONE + f * p)) * _power_of_two(n)


@njit(**_FAST)  # type: ignore[untyped-decorator]
def _store(out: Any, row: Any, rows: Any, stride: Any, column: Any, value: Any, add: Any) -> None:
    if row < rows:
        at = row * stride + column
        out[at] = out[at] + value if add else value


@njit(**_FAST)  # type: ignore[untyped-decorator]
def _tiles(
    w: Any,
    x: Any,
    x_stride: Any,
    bias: Any,
    out: Any,
    out_stride: Any,
    n: Any,
    k: Any,
    outs: Any,
    start: Any,
    stop: Any,
    add: Any,
) -> None:
    """Outputs `start..stop` in tiles of 4 outputs x 4 rows: 16 sums in registers, 8 loads for 16 multiplications.

    Rows and outputs beyond the last are computed as the last, and not stored.
    """
    last, end = n - 1, outs - 1
    for j in range(start, stop, 4):
        w0 = _floats(w + 4 * k * j)
        w1 = _floats(w + 4 * k * min(j + 1, end))
        w2 = _floats(w + 4 * k * min(j + 2, end))
        w3 = _floats(w + 4 * k * min(j + 3, end))
        for r in range(0, n, 4):
            x0 = _floats(x + 4 * x_stride * r)
            x1 = _floats(x + 4 * x_stride * min(r + 1, last))
            x2 = _floats(x + 4 * x_stride * min(r + 2, last))
            x3 = _floats(x + 4 * x_stride * min(r + 3, last))
            a00 = a01 = a02 = a03 = a10 = a11 = a12 = a13 = _ZERO
            a20 = a21 = a22 = a23 = a30 = a31 = a32 = a33 = _ZERO
            for i in range(k):
                p0, p1, p2, p3 = w0[i], w1[i], w2[i], w3[i]
                q0, q1, q2, q3 = x0[i], x1[i], x2[i], x3[i]
                a00 += p0 * q0
                a01 += p0 * q1
                a02 += p0 * q2
                a03 += p0 * q3
                a10 += p1 * q0
                a11 += p1 * q1
                a12 += p1 * q2
                a13 += p1 * q3
                a20 += p2 * q0
                a21 += p2 * q1
                a22 += p2 * q2
                a23 += p2 * q3
                a30 += p3 * q0
                a31 += p3 * q1
                a32 += p3 * q2
                a33 += p3 * q3
            sums = ((a00, a01, a02, a03), (a10, a11, a12, a13), (a20, a21, a22, a23), (a30, a31, a32, a33))
            for c in range(min(4, outs - j)):
                b = _floats(bias)[j + c] if bias != 0 else _ZERO
                for s in range(4):
                    _store(_floats(out), r + s, n, out_stride, j + c, sums[c][s] + b, add)


@cfunc(_JOB, cache=_KEPT, **_FAST)  # type: ignore[untyped-decorator]
def _product(job: Any) -> None:
    """`job`: counter, outputs a part, then the arguments of `_tiles` up to `outs`, and whether to add."""
    part, outs = job[1], job[10]
    while True:
        start = _next(job) * part
        if start >= outs:
            break
        stop = min(outs, start + part)
        _tiles(job[2], job[3], job[4], job[5], job[6], job[7], job[8], job[9], outs, start, stop, job[11] != 0)


@njit(**_FAST)  # type: ignore[untyped-decorator]
def _scores(query: Any, keys: Any, tokens: Any, width: Any, scale: Any, softcap: Any, scores: Any) -> Any:
    """Four tokens at a time; the greatest score."""
    greatest = np.float32(-np.inf)
    last = tokens - 1
    for t in range(0, tokens, 4):
        k0 = _floats(keys + 4 * width * t)
        k1 = _floats(keys + 4 * width * min(t + 1, last))
        k2 = _floats(keys + 4 * width * min(t + 2, last))
        k3 = _floats(keys + 4 * width * min(t + 3, last))
        s0 = s1 = s2 = s3 = _ZERO
        for d in range(width):
            q = query[d]
            s0 += q * k0[d]
            s1 += q * k1[d]
            s2 += q * k2[d]
            s3 += q * k3[d]
        scores[t], scores[t + 1], scores[t + 2], scores[t + 3] = s0 * scale, s1 * scale, s2 * scale, s3 * scale
    if softcap > _ZERO:
        for t in range(tokens):
            scores[t] = np.float32(math.tanh(scores[t] / softcap)) * softcap
    for t in range(tokens):
        greatest = max(greatest, scores[t])
    return greatest


@njit(**_FAST)  # type: ignore[untyped-decorator]
def _softmax(scores: Any, tokens: Any, greatest: Any) -> None:
    total = _ZERO
    for t in range(tokens):
        e = _exp(max(scores[t] - greatest, _LOWEST))
        scores[t] = e
        total += e
    share = _ONE / total
    for t in range(tokens):
        scores[t] *= share


@njit(**_FAST)  # type: ignore[untyped-decorator]
def _mix(weights: Any, values: Any, tokens: Any, width: Any, out: Any) -> None:
    """The values' sum, weighted. `weights` has zeros up to the next multiple of four."""
    for d in range(width):
        out[d] = _ZERO
    last = tokens - 1
    for t in range(0, tokens, 4):
        p0, p1, p2, p3 = weights[t], weights[t + 1], weights[t + 2], weights[t + 3]
        v0 = _floats(values + 4 * width * t)
        v1 = _floats(values + 4 * width * min(t + 1, last))
        v2 = _floats(values + 4 * width * min(t + 2, last))
        v3 = _floats(values + 4 * width * min(t + 3, last))
        for d in range(width):
            out[d] += (p0 * v0[d] + p1 * v1[d]) + (p2 * v2[d] + p3 * v3[d])


@cfunc(_JOB, cache=_KEPT, **_FAST)  # type: ignore[untyped-decorator]
def _attention(job: Any) -> None:
    """`job`: counter, steps, tokens' places, heads, kv heads, head_dim, context, qkv, its stride, out, its stride, block, scale and softcap.

    Of each step `places` has the address of its session's row, its position, the first token it sees and its row in the batch.
    """
    steps, heads, kv_heads, width, context = job[1], job[3], job[4], job[5], job[6]
    group = heads // kv_heads
    while True:
        task = _next(job)
        if task >= steps * kv_heads:
            break
        head = task // steps
        place = _integers(job[2] + 32 * (task % steps))
        position, first, row = place[1], place[2], place[3]
        plane = 4 * context * width
        keys = place[0] + plane * (2 * job[11] * kv_heads + head)
        values = keys + plane * kv_heads
        projected = job[7] + 4 * job[8] * row
        new_key, new_value = _floats(keys + 4 * width * position), _floats(values + 4 * width * position)
        key = _floats(projected + 4 * width * (heads + head))
        value = _floats(projected + 4 * width * (heads + kv_heads + head))
        for d in range(width):
            new_key[d] = key[d]
            new_value[d] = value[d]
        tokens = position + 1 - first
        keys, values = keys + 4 * width * first, values + 4 * width * first
        settings = _floats(job[12])
        scores = np.empty((tokens + 3) // 4 * 4, np.float32)
        for one in range(head * group, (head + 1) * group):
            greatest = _scores(_floats(projected + 4 * width * one), keys, tokens, width, settings[0], settings[1], scores)  # fmt: skip
            _softmax(scores, tokens, greatest)
            for t in range(tokens, len(scores)):
                scores[t] = _ZERO
            _mix(scores, values, tokens, width, _floats(job[9] + 4 * (job[10] * row + width * one)))


def _runtime() -> "Callable[..., None] | None":
    """OpenMP's "run this function on all threads", of the runtime that torch has loaded."""
    try:
        run: Callable[..., None] = ctypes.CDLL(None).GOMP_parallel
    except AttributeError:
        return None
    run.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)  # type: ignore[attr-defined]
    run.restype = None  # type: ignore[attr-defined]
    return run


_parallel: Final = _runtime()
_PRODUCT: Final = _product.address
_ATTENTION: Final = _attention.address
_ProductJob: Final = ctypes.c_int64 * 12
_AttentionJob: Final = ctypes.c_int64 * 13


def take(tensor: Tensor) -> bool:
    """Whether the kernels take a weight or a cache such as this."""
    return _parallel is not None and tensor.dtype == torch.float32 and tensor.device.type == "cpu"


def skinny_product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, add: bool) -> None:
    """out = x weightᵀ + bias, or out += it. `x` [n, in], `weight` [out, in] contiguous, `out` [n, out]; rows of `x` and `out` may lie apart.

    All float32. A row's result is the same, bit by bit, whatever other rows there are.
    """
    threads = torch.get_num_threads()
    outs, k = weight.shape
    part = max(4, min(256, outs // (8 * threads)) // 4 * 4)
    job = _ProductJob(
        0,
        part,
        weight.data_ptr(),
        x.data_ptr(),
        x.stride(0),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        out.stride(0),
        x.shape[0],
        k,
        outs,
        add,
    )
    _run(_PRODUCT, job, threads)


class DecodeStep(NamedTuple):
    """A step of one token: the row of the slab that holds its session, its position, the first token it sees, its row in the batch."""

    slab_row: int
    position: int
    first: int
    batch_row: int


class DecodeAttention:
    """Attention of steps of one token each, in place in the slab. All tensors are float32 and outlive this object.

    `slab` is [rows, blocks, 2, kv heads, context, head_dim], contiguous within a row; `qkv` [batch, (heads + 2 x kv heads) x head_dim],
    already rotated; `out` [batch, heads x head_dim]. A step's result is the same, bit by bit, whatever other steps there are.
    """

    def __init__(
        self,
        slab: Tensor,
        steps: Sequence[DecodeStep],
        qkv: Tensor,
        out: Tensor,
        *,
        scale: float,
        softcap: float | None,
    ) -> None:
        _, _, _, kv_heads, context, head_dim = slab.shape
        start, row_bytes = slab.data_ptr(), 4 * slab.stride(0)
        places = [(start + step.slab_row * row_bytes, step.position, step.first, step.batch_row) for step in steps]
        self._places = torch.tensor(places)
        self._settings = torch.tensor([scale, softcap or 0.0])
        self._tensors = slab, qkv, out
        self._job = _AttentionJob(
            0,
            len(steps),
            self._places.data_ptr(),
            out.shape[1] // head_dim,
            kv_heads,
            head_dim,
            context,
            qkv.data_ptr(),
            qkv.stride(0),
            out.data_ptr(),
            out.stride(0),
            0,
            self._settings.data_ptr(),
        )

    def __call__(self, block: int) -> None:
        """Write the steps' keys and values to the slab, then attend: from their rows of `qkv` to those of `out`."""
        self._job[0], self._job[11] = 0, block
        _run(_ATTENTION, self._job, torch.get_num_threads())


def _run(kernel: int, job: Any, threads: int) -> None:
    assert _parallel is not None
    _parallel(kernel, ctypes.addressof(job), threads, 0)
