"""The kernels compute what float64 says, whatever the sizes, and a row's result does not depend on the other rows."""

import pytest
import torch
from torch import Tensor

from zrt.runtime.compute import native
from zrt.runtime.compute.kernels import DecodeAttention, DecodeStep, skinny_product
from zrt.runtime.compute.linear import KERNEL_ROWS, DenseLinear

CONTEXT, BLOCKS, HEAD_DIM = 70, 2, 24
POSITIONS = (0, 1, 6, 7, 38, 69)


@pytest.mark.parametrize("n", [*range(1, 10), 16, 17])
@pytest.mark.parametrize(("outs", "k"), [(1, 1), (7, 33), (8, 64), (30, 100), (131, 576)])
def test_a_product_is_that_of_float64(n: int, outs: int, k: int) -> None:
    x, weight, bias, out = torch.randn(n, k), torch.randn(outs, k), torch.randn(outs), torch.randn(n, outs)
    exact = x.double() @ weight.double().T
    for add, given in ((False, None), (True, None), (False, bias), (True, bias)):
        got = out.clone()
        skinny_product(x, weight, given, got, add=add)
        wanted = exact + (0 if given is None else given) + (out if add else 0)
        assert (got - wanted).abs().max() <= 1e-5 * max(1.0, float(wanted.abs().max()))


def test_rows_may_lie_apart_and_nothing_between_them_is_touched() -> None:
    x, weight, out = torch.randn(5, 50), torch.randn(9, 33), torch.zeros(5, 20)
    skinny_product(x[:, :33], weight, None, out[:, 2:11], add=False)
    assert torch.allclose(out[:, 2:11], x[:, :33] @ weight.T, atol=1e-5)
    assert not out[:, :2].any()
    assert not out[:, 11:].any()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_is_the_same_bit_by_bit_in_any_company_and_on_any_number_of_threads(threads: int) -> None:
    x, weight = torch.randn(KERNEL_ROWS.stop - 1, 90), torch.randn(61, 90)
    whole = torch.empty(len(x), 61)
    skinny_product(x, weight, None, whole, add=False)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for n in range(1, len(x)):
            out = torch.empty(n, 61)
            skinny_product(x[len(x) - n :], weight, None, out, add=False)
            assert torch.equal(out, whole[len(x) - n :])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("n", [1, KERNEL_ROWS.start - 1, KERNEL_ROWS.start, KERNEL_ROWS.stop - 1, KERNEL_ROWS.stop])
def test_a_linear_layer_is_one_function_on_both_sides_of_its_thresholds(n: int, biased: bool) -> None:
    weight, bias = torch.randn(50, 40), torch.randn(50) if biased else None
    layer, x, out = DenseLinear(weight, bias), torch.randn(n, 40), torch.empty(n, 50)
    layer.write(x, out)
    wanted = torch.nn.functional.linear(x, weight, bias)
    assert torch.allclose(out, wanted, atol=1e-4)
    layer.add(x, out)
    assert torch.allclose(out, 2 * wanted, atol=1e-4)


def test_other_dtypes_are_left_to_torch() -> None:
    assert native.take(torch.empty(1))
    assert not native.take(torch.empty(1, dtype=torch.bfloat16))


@pytest.mark.parametrize("window", [None, 1, 3, 64])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (9, 3), (7, 1)])
def test_attention_of_single_tokens_is_that_of_float64(
    heads: int, kv_heads: int, softcap: float | None, window: int | None
) -> None:
    slab, qkv = _slab(kv_heads), torch.randn(len(POSITIONS), (heads + 2 * kv_heads) * HEAD_DIM)
    before = slab.clone()
    steps, out = _steps(window), torch.empty(len(POSITIONS), heads * HEAD_DIM)
    DecodeAttention(slab, steps, qkv, out, scale=0.3, softcap=softcap)(1)
    for step in steps:
        row = qkv[step.batch_row].view(-1, HEAD_DIM)
        before[step.slab_row, 1, :, :, step.position] = row[heads:].view(2, kv_heads, HEAD_DIM)
        past = before[step.slab_row, 1, :, :, step.first : step.position + 1]
        assert (out[step.batch_row] - _exact(row[:heads], past, softcap)).abs().max() <= 2e-6
    assert torch.equal(slab, before)


def test_a_step_attends_the_same_bit_by_bit_in_any_company() -> None:
    slab, qkv = _slab(2), torch.randn(len(POSITIONS), 8 * HEAD_DIM)
    together, alone = torch.empty(2, len(POSITIONS), 4 * HEAD_DIM)
    DecodeAttention(slab, _steps(None), qkv, together, scale=0.2, softcap=None)(0)
    for step in _steps(None):
        DecodeAttention(slab, [step], qkv, alone, scale=0.2, softcap=None)(0)
    assert torch.equal(alone, together)


def test_scores_far_apart_do_not_overflow() -> None:
    slab, qkv = _slab(1), torch.randn(len(POSITIONS), 3 * HEAD_DIM) * 100
    out = torch.empty(len(POSITIONS), HEAD_DIM)
    DecodeAttention(slab, _steps(None), qkv, out, scale=1.0, softcap=None)(0)
    for step in _steps(None):
        past = slab[step.slab_row, 0, :, :, : step.position + 1]
        wanted = _exact(qkv[step.batch_row].view(3, HEAD_DIM)[:1], past, None, scale=1.0)
        assert torch.allclose(out[step.batch_row].double(), wanted, rtol=1e-3, atol=1e-3)


def _slab(kv_heads: int) -> Tensor:
    """Rows that do not follow one another closely, as in the cache."""
    numbers = BLOCKS * 2 * kv_heads * CONTEXT * HEAD_DIM
    return torch.randn(8, numbers + 5)[:, :numbers].view(8, BLOCKS, 2, kv_heads, CONTEXT, HEAD_DIM)


def _steps(window: int | None) -> list[DecodeStep]:
    return [
        DecodeStep(7 - row, position, 0 if window is None else max(0, position + 1 - window), row)
        for row, position in enumerate(POSITIONS)
    ]


def _exact(queries: Tensor, past: Tensor, softcap: float | None, scale: float = 0.3) -> Tensor:
    """`queries` [heads, head_dim] over `past` [2, kv heads, tokens, head_dim], in float64: [heads x head_dim]."""
    keys, values = past.double().repeat_interleave(len(queries) // past.shape[1], dim=1)
    scores = torch.einsum("hd,htd->ht", queries.double(), keys) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    return torch.einsum("ht,htd->hd", scores.softmax(-1), values).flatten()
