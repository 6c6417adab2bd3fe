"""Products are what float64 says, whatever the sizes, and a row's result does not depend on the
other rows."""

import pytest
import torch

from zrt.runtime.compute.cpu import numba_runtime
from zrt.runtime.compute.decoder.linear import DenseLinear, PackedLinear, linear


@pytest.mark.parametrize("n", [*range(1, 34), 97, 150])
@pytest.mark.parametrize(("outs", "k"), [(16, 4), (33, 60), (48, 64), (130, 576), (576, 8)])
def test_a_product_is_that_of_float64(n: int, outs: int, k: int) -> None:
    x, weight, bias, out = torch.randn(n, k), torch.randn(outs, k), torch.randn(outs), torch.randn(n, outs)
    exact = x.double() @ weight.double().T
    for given in (None, bias):
        layer, got = linear(weight.clone(), given), torch.empty(n, outs)
        assert isinstance(layer, PackedLinear)
        layer.write(x, got)
        wanted = exact + (0 if given is None else given)
        assert (got - wanted).abs().max() <= 1e-5 * max(1.0, float(wanted.abs().max()))
        got = out.clone()
        layer.add(x, got)
        assert (got - wanted - out).abs().max() <= 1e-5 * max(1.0, float(wanted.abs().max()))


@pytest.mark.parametrize(("outs", "k"), [(numba_runtime.LANES, 8), (100, 64), (numba_runtime.LANES - 1, 64), (40, 30)])
def test_its_rows_are_those_of_the_weight(outs: int, k: int) -> None:
    """Packed, packed with a rest, and too narrow or too odd to be packed."""
    weight, ids = torch.randn(outs, k), torch.randint(outs, (57,))
    ids[0], ids[1] = outs - 1, 0
    layer, out = linear(weight.clone()), torch.empty(57, k)
    assert isinstance(layer, PackedLinear) == (outs >= numba_runtime.LANES and k % 4 == 0)
    layer.rows(ids, out)
    assert torch.equal(out, weight[ids])


def test_rows_may_lie_apart_and_nothing_between_them_is_touched() -> None:
    x, weight, out = torch.randn(5, 50), torch.randn(32, 40), torch.zeros(5, 60)
    linear(weight.clone()).write(x[:, :40], out[:, 2:34])
    assert torch.allclose(out[:, 2:34], x[:, :40] @ weight.T, atol=1e-5)
    assert not out[:, :2].any()
    assert not out[:, 34:].any()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_is_the_same_bit_by_bit_in_any_company_and_on_any_number_of_threads(threads: int) -> None:
    x, layer = torch.randn(130, 92), linear(torch.randn(80, 92))
    whole = torch.empty(len(x), 80)
    layer.write(x, whole)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for n in (*range(1, 40), 96, 97, 108, 129):
            out = torch.empty(n, 80)
            layer.write(x[len(x) - n :], out)
            assert torch.equal(out, whole[len(x) - n :])
    finally:
        torch.set_num_threads(before)


def test_other_dtypes_are_left_to_torch() -> None:
    assert numba_runtime.take(torch.empty(1))
    assert not numba_runtime.take(torch.empty(1, dtype=torch.bfloat16))
    assert isinstance(linear(torch.randn(64, 64, dtype=torch.bfloat16)), DenseLinear)
