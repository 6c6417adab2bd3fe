"""RMSNorm (arXiv 1910.07467)."""

import torch
from torch import Tensor
from torch.nn import functional

from zrt.runtime.compute.cpu import numba_runtime, row_kernels


def rms_norm(x: Tensor, weight: Tensor, eps: Tensor, out: Tensor, scale: Tensor) -> None:
    """out = x / sqrt(mean(x²) + eps) * weight over the last dimension; `out` may be `x`.

    Computed in float32. A weight in the dtype of `x` is applied after rounding to it, a float32
    weight before, as the families differ in transformers. `eps` is float32 [1]; `scale` is float32
    scratch of the shape of `x` with a last dimension of 1. Where our kernel does not take it, five
    plain operations: on the CPU torch's own `rms_norm` takes twice the time at one row and three
    times at 512.
    """
    if numba_runtime.take(x):
        row_kernels.norm(x, weight, eps, out)
        return
    wide = x if x.dtype == torch.float32 else x.float()
    torch.linalg.vector_norm(wide, dim=-1, keepdim=True, out=scale)
    torch.addcmul(eps, scale, scale, value=1 / x.shape[-1], out=scale)
    scale.rsqrt_()
    if wide is x:  # not ours to write over
        torch.mul(x, scale, out=out)
        out.mul_(weight)
    elif weight.dtype == x.dtype:
        out.copy_(wide.mul_(scale))
        out.mul_(weight)
    else:
        out.copy_(wide.mul_(scale).mul_(weight))


def gate_(gate: Tensor, up: Tensor, is_silu: bool) -> None:
    """gate = activation(gate) * up, SiLU or else GELU in its tanh form; both [rows, width], parts
    of one tensor."""
    if numba_runtime.take(gate):
        row_kernels.gate(gate, up, gelu=not is_silu)
        return
    if is_silu:
        functional.silu(gate, inplace=True)
    else:
        torch.ops.aten.gelu_(gate, approximate="tanh")
    gate.mul_(up)
