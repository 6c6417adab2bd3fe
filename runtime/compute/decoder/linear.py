"""Linear layers: objects chosen at load, so that a block does not know how its weights are kept."""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from zrt.runtime.compute.cpu.gemm import pack, packs, product
from zrt.runtime.compute.cpu.numba_runtime import LANES


class Linear(Protocol):
    """A product with weights held in some form. `x` is [rows, in], `out` [rows, out], both in the
    model's dtype."""

    def write(self, x: Tensor, out: Tensor) -> None:
        """Write the product to `out`."""

    def add(self, x: Tensor, out: Tensor) -> None:
        """Add the product to `out`."""

    def rows(self, ids: Tensor, out: Tensor) -> None:
        """Write the weight's rows of these numbers, int64 [n], to `out`, [n, in]: the lookup of an
        embedding."""


def linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Return the fastest form for a weight [out, in], with an optional bias [out]. The layer owns
    the tensor from now on."""
    if weight.is_cuda:
        return CudaLinear(weight, bias)
    return PackedLinear(weight, bias) if packs(weight) else DenseLinear(weight, bias)


class DenseLinear:
    """A layer whose weights are as they are stored, in the model's dtype."""

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

    def rows(self, ids: Tensor, out: Tensor) -> None:
        torch.index_select(self.weight, 0, ids, out=out)


class CudaLinear(DenseLinear):
    """A layer on a GPU, where adding to `out` is part of the product and rounded once with it."""

    def add(self, x: Tensor, out: Tensor) -> None:
        out.addmm_(x, self._transposed)
        if self.bias is not None:
            out.add_(self.bias)


class PackedLinear:
    """A layer of float32 weights on the CPU in panels (see gemm.py), packed in place; outputs
    beyond the last whole panel stay as they were."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.shape = tuple(weight.shape)
        self._packed = pack(weight)  # [panels, in, LANES]
        self._whole = len(self._packed) * LANES
        rest = weight[self._whole :]
        self._rest = DenseLinear(rest, None if bias is None else bias[self._whole :]) if len(rest) else None
        self._by_output = self._packed.transpose(1, 2)
        self.bias = bias

    def write(self, x: Tensor, out: Tensor) -> None:
        product(x, self._packed, self.bias, out, add=False)
        if self._rest is not None:
            out[:, self._whole :] = functional.linear(x, self._rest.weight, self._rest.bias)

    def add(self, x: Tensor, out: Tensor) -> None:
        product(x, self._packed, None, out, add=True)
        if self.bias is not None:
            out[:, : self._whole] += self.bias[: self._whole]
        if self._rest is not None:
            out[:, self._whole :] += functional.linear(x, self._rest.weight, self._rest.bias)

    def rows(self, ids: Tensor, out: Tensor) -> None:
        if self._rest is None:
            out.copy_(self._by_output[ids // LANES, ids % LANES])
            return
        within = ids.clamp(max=self._whole - 1)
        out.copy_(self._by_output[within // LANES, within % LANES])
        beyond = ids >= self._whole
        out[beyond] = self._rest.weight[ids[beyond] - self._whole]
