"""Rotary position embedding (RoFormer, arXiv 2104.09864) in the half-split form of the Hugging Face checkpoints."""

import torch
from torch import Tensor

from zrt.runtime.compute.spec import ModelSpec


def inverse_frequencies(spec: ModelSpec) -> Tensor:
    """float32 [head_dim / 2]: radians a position, for each rotated pair."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
    return 1.0 / (spec.rope_theta**exponents)


class RotaryTable:
    """cos and sin of every position of the context, computed in float32, kept in `dtype` (as transformers casts them).

    `sin` carries the sign of the half it multiplies, so that rotating is `x * cos + swap_halves(x) * sin`.
    """

    def __init__(self, spec: ModelSpec, context: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        angles = torch.outer(torch.arange(context, dtype=torch.float32), inverse_frequencies(spec))
        cos, sin = angles.cos(), angles.sin()
        self._half = spec.head_dim // 2
        self._cos = torch.cat((cos, cos), dim=1).to(device, dtype)
        self._sin = torch.cat((-sin, sin), dim=1).to(device, dtype)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and signed sin of positions int64 [rows]: two [rows, 1, head_dim], to be used by every block of one forward."""
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)

    def rotate_(self, heads: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate heads [rows, heads, head_dim] in place."""
        swapped = heads.roll(self._half, dims=-1)
        heads.mul_(cos).addcmul_(swapped, sin)
