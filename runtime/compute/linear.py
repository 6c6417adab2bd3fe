"""Linear layers: objects chosen at load, so that a block does not know how its weights are kept."""

from typing import Protocol

from torch import Tensor
from torch.nn import functional


class Linear(Protocol):
    """A product with weights held in some form: `[rows, in] -> [rows, out]`, in the dtype of its input."""

    def __call__(self, x: Tensor) -> Tensor: ...


class DenseLinear:
    """Weights as they are stored, `[out, in]`, in the model's dtype, with an optional bias `[out]`.

    For one to three rows this layout reads weights at memory speed in both float32 and bfloat16; `[in, out]` is a tenth faster at one
    row and a third slower at two, and would take the shared tensor of tied weights apart.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)
