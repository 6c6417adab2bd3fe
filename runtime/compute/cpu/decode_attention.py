"""Attention of single tokens on the CPU, float32; the tests compare it with float64."""

import ctypes
import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from zrt.runtime.compute.cpu.numba_runtime import (
    FAST,
    LOWEST,
    ONE,
    ZERO,
    exp,
    floats,
    integers,
    kernel,
    njit,
    run,
    take_next,
)


@njit(**FAST)  # type: ignore[untyped-decorator]
def _scores(query: Any, keys: Any, tokens: Any, width: Any, scale: Any, softcap: Any, scores: Any) -> Any:
    """Write the scores of a query, four tokens at a time; return the greatest."""
    greatest = np.float32(-np.inf)
    last = tokens - 1
    for t in range(0, tokens, 4):
        k0 = floats(keys + 4 * width * t)
        k1 = floats(keys + 4 * width * min(t + 1, last))
        k2 = floats(keys + 4 * width * min(t + 2, last))
        k3 = floats(keys + 4 * width * min(t + 3, last))
        s0 = s1 = s2 = s3 = ZERO
        for d in range(width):
            q = query[d]
            s0 += q * k0[d]
            s1 += q * k1[d]
            s2 += q * k2[d]
            s3 += q * k3[d]
        scores[t], scores[t + 1], scores[t + 2], scores[t + 3] = s0 * scale, s1 * scale, s2 * scale, s3 * scale
    if softcap > ZERO:
        for t in range(tokens):
            scores[t] = np.float32(math.tanh(scores[t] / softcap)) * softcap
    for t in range(tokens):
        greatest = max(greatest, scores[t])
    return greatest


@njit(**FAST)  # type: ignore[untyped-decorator]
def _softmax(scores: Any, tokens: Any, greatest: Any) -> None:
    total = ZERO
    for t in range(tokens):
        e = exp(max(scores[t] - greatest, LOWEST))
        scores[t] = e
        total += e
    share = ONE / total
    for t in range(tokens):
        scores[t] *= share


@njit(**FAST)  # type: ignore[untyped-decorator]
def _mix(weights: Any, values: Any, tokens: Any, width: Any, out: Any) -> None:
    """Write the weighted sum of the values. `weights` has zeros up to the next multiple of four."""
    for d in range(width):
        out[d] = ZERO
    last = tokens - 1
    for t in range(0, tokens, 4):
        p0, p1, p2, p3 = weights[t], weights[t + 1], weights[t + 2], weights[t + 3]
        v0 = floats(values + 4 * width * t)
        v1 = floats(values + 4 * width * min(t + 1, last))
        v2 = floats(values + 4 * width * min(t + 2, last))
        v3 = floats(values + 4 * width * min(t + 3, last))
        for d in range(width):
            out[d] += (p0 * v0[d] + p1 * v1[d]) + (p2 * v2[d] + p3 * v3[d])


@kernel
def _attention(job: Any) -> None:
    """Compute the next heads of a job until none is left. `job`: counter, steps, tokens' places,
    heads, kv heads, head_dim, context, qkv, its stride, out, its stride, block, scale and softcap.

    For each step `places` has the address of its session's row, its position, the first token it
    sees and its row in the batch.
    """
    steps, heads, kv_heads, width, context = job[1], job[3], job[4], job[5], job[6]
    group = heads // kv_heads
    while True:
        task = take_next(job)
        if task >= steps * kv_heads:
            break
        head = task // steps
        place = integers(job[2] + 32 * (task % steps))
        position, first, row = place[1], place[2], place[3]
        plane = 4 * context * width
        keys = place[0] + plane * (2 * job[11] * kv_heads + head)
        values = keys + plane * kv_heads
        projected = job[7] + 4 * job[8] * row
        new_key, new_value = floats(keys + 4 * width * position), floats(values + 4 * width * position)
        key = floats(projected + 4 * width * (heads + head))
        value = floats(projected + 4 * width * (heads + kv_heads + head))
        for d in range(width):
            new_key[d] = key[d]
            new_value[d] = value[d]
        tokens = position + 1 - first
        keys, values = keys + 4 * width * first, values + 4 * width * first
        settings = floats(job[12])
        scores = np.empty((tokens + 3) // 4 * 4, np.float32)
        for one in range(head * group, (head + 1) * group):
            greatest = _scores(floats(projected + 4 * width * one), keys, tokens, width, settings[0], settings[1], scores)  # fmt: skip
            _softmax(scores, tokens, greatest)
            for t in range(tokens, len(scores)):
                scores[t] = ZERO
            _mix(scores, values, tokens, width, floats(job[9] + 4 * (job[10] * row + width * one)))


_ATTENTION: Final = _attention.address
_AttentionJob: Final = ctypes.c_int64 * 13


class DecodeStep(NamedTuple):
    """A step of one token: the row of the slab that holds its session, its position, the first
    token it sees, its row in the batch."""

    slab_row: int
    position: int
    first: int
    batch_row: int


class DecodeAttention:
    """The attention of steps of one token each, in place in the slab. All tensors are float32 and
    outlive this object.

    `slab` is [rows, blocks, 2, kv heads, context, head_dim], contiguous within a row; `qkv` [batch,
    (heads + 2 x kv heads) x head_dim], already rotated; `out` [batch, heads x head_dim]. A step's
    result is the same, bit by bit, whatever other steps there are.
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
        """Write the steps' keys and values to the slab, then attend: from the steps' rows of `qkv`
        to those of `out`."""
        self._job[0], self._job[11] = 0, block
        run(_ATTENTION, self._job, torch.get_num_threads())
