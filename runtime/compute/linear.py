"""Linear layers: objects chosen at load, so that a block does not know how its weights are kept."""

from typing import Final, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from zrt.runtime.compute import kernels, native

KERNEL_ROWS: Final = range(4, 33)
"""Numbers of rows at which our kernel is faster than MKL.

All products of a token in a 135M-parameter model's 30 blocks, ms of one AVX-512 core, MKL and kernel: 1 row 34 and 44; 3: 41 and 46;
4: 62 and 46; 8: 80 and 53; 16: 75 and 68; 24: 86 and 80; 32: 101 and 91; 40: 101 and 104; 64: 118 and 139.
"""


class Linear(Protocol):
    """A product with weights held in some form. `x` is [rows, in], `out` [rows, out], both in the model's dtype."""

    def write(self, x: Tensor, out: Tensor) -> None:
        """out = product"""

    def add(self, x: Tensor, out: Tensor) -> None:
        """out += product"""


class DenseLinear:
    """Weights as they are stored, [out, in], in the model's dtype, with an optional bias [out].

    At one to three rows this layout reads float32 weights at memory speed. Kept as [in, out] they would be read a tenth faster at one row
    but half slower at two, and the two ends of a tied model could not share a tensor.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self._transposed = weight.t()
        self._kernel_rows = KERNEL_ROWS if native.take(weight) else range(0)

    def write(self, x: Tensor, out: Tensor) -> None:
        if len(x) in self._kernel_rows:
            kernels.skinny_product(x, self.weight, self.bias, out, add=False)
        elif self.bias is None:
            torch.mm(x, self._transposed, out=out)
        else:
            torch.addmm(self.bias, x, self._transposed, out=out)

    def add(self, x: Tensor, out: Tensor) -> None:
        if len(x) in self._kernel_rows:
            kernels.skinny_product(x, self.weight, self.bias, out, add=True)
        elif self.bias is None and out.dtype == torch.float32:
            out.addmm_(x, self._transposed)
        else:  # the product is rounded before it is added, as in transformers
            out.add_(functional.linear(x, self.weight, self.bias))
