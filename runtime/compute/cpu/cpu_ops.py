"""Operations between the products of a block on a CPU: in float32 by our kernels where they can
run, else by torch."""

import torch
from torch import Tensor
from torch.nn import functional

from zrt.runtime.compute.cpu import numba_runtime, row_kernels
from zrt.runtime.compute.decoder.workspace import Views


class CpuOps:
    """The operations of `decoder.ops.Ops` for rows of one dtype on a CPU, and the rotation of
    heads."""

    def __init__(self, dtype: torch.dtype, eps: float, *, is_silu: bool) -> None:
        self._by_kernel = numba_runtime.take(torch.empty(0, dtype=dtype))
        self._eps = torch.tensor([eps])
        self._is_silu = is_silu

    def norm(self, x: Tensor, weight: Tensor, out: Tensor, scratch: Tensor | None = None) -> None:
        """Write x / sqrt(mean(x²) + eps) * weight over the last dimension (RMSNorm, arXiv
        1910.07467) to `out`, which may be `x`.

        The computation is in float32. A weight in the dtype of `x` is applied after rounding to
        that dtype, a float32 weight before, as the families differ in transformers. `scratch` is
        float32, of the shape of `x` with a last dimension of 1. Where our kernel does not take `x`,
        five plain operations are used: torch's own `rms_norm` takes twice the time at one row and
        three times at 512.
        """
        if self._by_kernel:
            row_kernels.norm(x, weight, self._eps, out)
            return
        wide = x if x.dtype == torch.float32 else x.float()
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True, out=scratch)
        torch.addcmul(self._eps, scale, scale, value=1 / x.shape[-1], out=scale)
        scale.rsqrt_()
        if wide is x:  # the caller's, not to be written over
            torch.mul(x, scale, out=out)
            out.mul_(weight)
        elif weight.dtype == x.dtype:
            out.copy_(wide.mul_(scale))
            out.mul_(weight)
        else:
            out.copy_(wide.mul_(scale).mul_(weight))

    def gate(self, views: Views) -> None:
        """Compute gate = activation(gate) * up, SiLU or else GELU in its tanh form; both are [rows,
        width], parts of one tensor."""
        gate, up = views.gate, views.up
        if self._by_kernel:
            row_kernels.gate(gate, up, gelu=not self._is_silu)
            return
        if self._is_silu:
            functional.silu(gate, inplace=True)
        else:
            torch.ops.aten.gelu_(gate, approximate="tanh")
        gate.mul_(up)

    def rotate(self, views: Views, cos: Tensor, sin: Tensor) -> None:
        """Rotate `views.rotated` [rows, heads, dim] in place by angles [rows, 1, dim], as
        `rope.Rotary.at` gives them."""
        heads, swapped = views.rotated, views.swapped
        if self._by_kernel:
            row_kernels.rotate(heads, cos, sin)
            return
        torch.cat(views.rotated_halves, dim=-1, out=swapped)
        heads.mul_(cos).add_(swapped.mul_(sin))
