"""The shapes of the one-row product are tried once for each card, and kept; whichever is taken, the
product is the same."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

OUTPUTS, INPUTS = 2048, 4096


@pytest.fixture(scope="module")
def weights() -> list[Tensor]:
    draw = torch.Generator("cuda").manual_seed(0)
    return [torch.randn(OUTPUTS, INPUTS, generator=draw, device="cuda", dtype=torch.bfloat16) for _ in range(4)]


def test_a_card_is_tried_once(weights: list[Tensor], tmp_path: Path) -> None:
    from zrt.runtime.compute.cuda.dense_launch import Product, one_row_product
    from zrt.runtime.compute.cuda.tuning import TRIED, Tuning, worth_trying

    x, out = weights[0].new_ones(1, INPUTS), weights[0].new_empty(1, OUTPUTS)
    tried: set[Product] = set()

    def run(weight: Tensor, shape: Product) -> None:
        tried.add(shape)
        one_row_product(x, weight, out, shape=shape)

    assert worth_trying(weights[0])
    best = Tuning(tmp_path, "a card").shape("plain", weights, run)
    assert best in TRIED
    assert tried == set(TRIED)
    tried.clear()
    assert Tuning(tmp_path, "a card").shape("plain", weights, run) == best
    assert not tried
    Tuning(tmp_path, "another card").shape("plain", weights, run)
    assert tried == set(TRIED)
    (tmp_path / "a-card.json").write_text("{")
    assert Tuning(tmp_path, "a card").shape("plain", weights, run) in TRIED
    assert Tuning(Path("/proc/none"), "a card").shape("plain", weights, run) in TRIED


@pytest.mark.parametrize("gate", [False, True])
def test_every_shape_gives_the_product(gate: bool, weights: list[Tensor]) -> None:
    from zrt.runtime.compute.cuda.dense_launch import one_row_product
    from zrt.runtime.compute.cuda.tuning import fitting

    weight, norm = weights[0], torch.rand(INPUTS, device="cuda", dtype=torch.bfloat16) + 0.5
    x = torch.randn(1, INPUTS, device="cuda", dtype=torch.bfloat16)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean() + 1e-6) * norm.float()
    wanted = normed @ weight.float().t()
    if gate:
        first, second = wanted.chunk(2, dim=1)
        wanted = torch.nn.functional.silu(first) * second
    count = wanted.shape[1]
    for shape in fitting(count, INPUTS):
        out = weight.new_empty(1, count)
        one_row_product(x, weight, out, norm=norm, eps=1e-6, gate=gate, shape=shape)
        assert (out.float() - wanted).abs().max() <= 1e-2 * wanted.abs().max(), shape
