"""Linear layers: objects chosen at load, so that a block does not know how its weights are kept."""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional


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

    def write(self, x: Tensor, out: Tensor) -> None:
        if self.bias is None:
            torch.mm(x, self._transposed, out=out)
        else:
            torch.addmm(self.bias, x, self._transposed, out=out)

    def add(self, x: Tensor, out: Tensor) -> None:
        if self.bias is None and out.dtype == torch.float32:
            out.addmm_(x, self._transposed)
        else:  # the product is rounded before it is added, as in transformers
            out.add_(functional.linear(x, self.weight, self.bias))
