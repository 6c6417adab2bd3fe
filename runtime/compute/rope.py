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

    `sin` carries the sign of the half it multiplies, so that rotating is `x * cos + swapped halves of x * sin`.
    """

    def __init__(self, spec: ModelSpec, context: int, dtype: torch.dtype) -> None:
        angles = torch.outer(torch.arange(context, dtype=torch.float32), inverse_frequencies(spec))
        cos, sin = angles.cos(), angles.sin()
        self._cos = torch.cat((cos, cos), dim=1).to(dtype)
        self._sin = torch.cat((-sin, sin), dim=1).to(dtype)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and signed sin of positions int64 [rows]: two [rows, 1, head_dim], for every block of one forward."""
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)


def rotate_(heads: Tensor, halves: tuple[Tensor, Tensor], swapped: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate heads [rows, heads, head_dim] in place. `halves` are views of its second and first half, `swapped` is scratch of its shape."""
    torch.cat(halves, dim=-1, out=swapped)
    heads.mul_(cos).add_(swapped.mul_(sin))
