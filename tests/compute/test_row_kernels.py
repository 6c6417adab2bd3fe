"""Norms, rotation and gates are what float64 says, whatever the sizes and strides."""

from types import SimpleNamespace

import pytest
import torch

from zrt.runtime.compute.cpu import numba_runtime, row_kernels
from zrt.runtime.compute.cpu.cpu_ops import CpuOps

ROWS = [1, 2, 3, 40, 700]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [1, 7, 64, 577])
def test_a_norm(rows: int, width: int) -> None:
    x, weight, eps = 3 * torch.randn(rows, width + 5)[:, :width], torch.randn(width), torch.tensor([1e-5])
    out = torch.empty(rows, width)
    row_kernels.norm(x, weight, eps, out)
    wanted = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    assert torch.allclose(out.double(), wanted, rtol=2e-6, atol=1e-6)
    row_kernels.norm(x, weight, eps, x)
    assert torch.equal(x, out)


@pytest.mark.parametrize("rows", ROWS)
def test_a_norm_of_heads_has_a_weight_for_each(rows: int) -> None:
    parts, weight, eps = torch.randn(rows, 8, 24), torch.randn(5, 24), torch.tensor([1e-6])
    heads, rest = parts[:, :5], parts[:, 5:].clone()
    wanted = heads.double() / (heads.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    row_kernels.norm(heads, weight, eps, heads)
    assert torch.allclose(heads.double(), wanted, rtol=2e-6, atol=1e-6)
    assert torch.equal(parts[:, 5:], rest)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("dim", "head_dim"), [(24, 24), (8, 24)])
def test_a_rotation(rows: int, dim: int, head_dim: int) -> None:
    parts, angles = torch.randn(rows, 6, head_dim), torch.randn(rows, 1, dim)
    cos, sin = angles.cos(), angles.sin()
    before, heads = parts.clone(), parts[:, :4, :dim]
    swapped = torch.cat((heads[..., dim // 2 :], heads[..., : dim // 2]), dim=-1)
    wanted = heads.double() * cos + swapped.double() * sin
    row_kernels.rotate(heads, cos, sin)
    assert torch.allclose(heads.double(), wanted, rtol=1e-6, atol=1e-6)
    assert torch.equal(parts[:, 4:], before[:, 4:])
    assert torch.equal(parts[..., dim:], before[..., dim:])


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("gelu", [False, True])
def test_a_gate(rows: int, gelu: bool) -> None:
    whole = 4 * torch.randn(rows, 2 * 129)
    whole[0, :8] = torch.tensor([0.0, -0.0, 100.0, -100.0, 1e-30, -88.0, 30.0, -30.0])
    gate, up = whole.chunk(2, dim=1)
    activation = (
        torch.nn.functional.gelu(gate.double(), approximate="tanh") if gelu else torch.nn.functional.silu(gate.double())
    )
    wanted, kept = activation * up, up.clone()
    row_kernels.gate(gate, up, gelu=gelu)
    assert torch.allclose(gate.double(), wanted, rtol=3e-6, atol=1e-6)
    assert torch.equal(up, kept)


@pytest.mark.parametrize("kernels", [True, False], ids=["by kernels", "by torch"])
def test_both_ways_are_one_function_and_write_to_nothing_else(monkeypatch: pytest.MonkeyPatch, kernels: bool) -> None:
    """Where torch came with another OpenMP runtime there are no kernels."""
    x, weight = torch.randn(3, 48), torch.randn(48)
    heads, angles, both = torch.randn(3, 4, 16), torch.randn(3, 1, 16), torch.randn(3, 40)
    wanted = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    swapped = torch.cat((heads[..., 8:], heads[..., :8]), dim=-1)
    rotated = heads * angles.cos() + swapped * angles.sin()
    gated = torch.nn.functional.silu(both[:, :20]) * both[:, 20:]
    if not kernels:
        monkeypatch.setattr(numba_runtime, "_parallel", None)
    out, before = torch.empty(3, 48), x.clone()
    ops = CpuOps(torch.float32, 1e-5, is_silu=True)
    ops.norm(x, weight, out, torch.empty(3, 1))
    assert torch.allclose(out, wanted, atol=1e-5)
    assert torch.equal(x, before)
    views = SimpleNamespace(gate=both[:, :20], up=both[:, 20:], rotated=heads, swapped=torch.empty_like(heads))
    views.rotated_halves = (heads[..., 8:], heads[..., :8])
    ops.rotate(views, angles.cos(), angles.sin())
    assert torch.allclose(heads, rotated, atol=1e-5)
    ops.gate(views)
    assert torch.allclose(both[:, :20], gated, atol=1e-5)
