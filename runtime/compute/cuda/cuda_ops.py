"""The operations between the products of a block on a GPU, a kernel each."""

from torch import Tensor

from zrt.runtime.compute.cuda.dense_launch import gate_rows, norm_rows
from zrt.runtime.compute.decoder.workspace import Views


class CudaOps:
    """The operations of `decoder.ops.Ops` on a GPU; nothing waits for the host."""

    def __init__(self, eps: float, *, is_silu: bool) -> None:
        self._eps = eps
        self._is_silu = is_silu

    def norm(self, x: Tensor, weight: Tensor, out: Tensor, scratch: Tensor | None = None) -> None:
        """Write RMSNorm of x [rows, width] to `out`, which may be `x`; `scratch` is not used."""
        norm_rows(x, weight, self._eps, out)

    def gate(self, views: Views) -> None:
        """Compute gate = activation(gate) * up, SiLU or else GELU in its tanh form."""
        gate_rows(views.gate_up, self._is_silu)
