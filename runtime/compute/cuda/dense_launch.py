"""Launches of the dense kernels, as functions of tensors on a GPU: grids and launch parameters are
chosen here."""

from dataclasses import dataclass
from typing import Final

from torch import Tensor

from zrt.runtime.compute.cuda.kernels.dense import elementwise, gemv
from zrt.runtime.compute.cuda.kernels.dense.dependent_launch import DEPENDENT

GATE_TILE: Final = 1024
"""Numbers of a row that a program of the gate's kernel computes."""


def power_of_two(number: int, least: int = 1) -> int:
    """Return the smallest power of two that is below neither `number` nor `least`, itself a power
    of two."""
    return max(least, 1 << max(0, number - 1).bit_length())


def norm_rows(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Write RMSNorm of x [rows, width] to `out`, which may be `x`. Rows may lie apart, the numbers
    of a row may not; `weight` is [width]."""
    rows, width = x.shape
    elementwise.norm_rows[(rows,)](
        x,
        weight,
        out,
        x.stride(0),
        out.stride(0),
        eps,
        width,
        power_of_two(width),
        num_warps=8 if width > 1024 else 4,
        launch_pdl=DEPENDENT,
    )


def gate_rows(gate_up: Tensor, is_silu: bool) -> None:
    """Compute gate = activation(gate) * up in place of contiguous `gate_up` [rows, 2 x width]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    grid = (rows, -(-width // GATE_TILE))
    elementwise.gate_rows[grid](gate_up, width, GATE_TILE, is_silu, num_warps=4, launch_pdl=DEPENDENT)


@dataclass(frozen=True, slots=True)
class Product:
    """The shape in which `one_row_product` runs: outputs a program, inputs a chunk, warps."""

    rows: int
    chunk: int
    warps: int


def shape_of(inputs: int) -> Product | None:
    """Return the shape found fastest on Hopper for a product of `inputs` inputs; None where its
    chunk does not divide them."""
    return Product(4, 1024, 4) if inputs % 1024 == 0 else None


def one_row_product(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gate: bool = False,
    add: bool = False,
    shape: Product,
) -> None:
    """Write the product of x [1, inputs] and weight [outputs, inputs] (with `gate` [2 x outputs,
    inputs]) to `out` [1, outputs]. The kernel's docstring says what `norm` [inputs], `gate` and
    `add` do."""
    outputs, inputs = weight.shape[0] // (2 if gate else 1), weight.shape[1]
    gemv.one_row_product[(outputs // shape.rows,)](
        x,
        weight if norm is None else norm,
        weight,
        out,
        outputs,
        eps,
        inputs,
        shape.rows,
        shape.chunk,
        norm is not None,
        gate,
        add,
        num_warps=shape.warps,
        launch_pdl=DEPENDENT,
    )
