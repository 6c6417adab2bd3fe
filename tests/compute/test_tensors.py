"""Tensors travel as the bytes they lie in, and come back equal."""

import struct

import pytest
import torch

from zrt.runtime.compute.tensors import DTYPES, Rows, dtype_name, from_bytes, rows_to_raw, to_bytes
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.layers import RawTensor

TENSORS = {
    "a matrix": torch.randn(3, 5),
    "one number": torch.tensor(3.5),
    "odd sizes": torch.randn(7, 1, 3),
    "nothing": torch.empty(0, 4),
    "rows of nothing": torch.empty(4, 0),
    "a transposed view": torch.randn(4, 6).t(),
    "every other column": torch.randn(4, 6)[:, ::2],
    "an expanded row": torch.randn(1, 6).expand(4, 6),
    "a result of inference": torch.inference_mode()(lambda: torch.randn(2, 3) * 2)(),
    "needing gradients": torch.randn(2, 3, requires_grad=True),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS.keys())
def test_a_tensor_comes_back_equal(tensor, dtype) -> None:
    tensor = tensor.to(DTYPES[dtype])
    data = to_bytes(tensor)
    assert data.nbytes == tensor.numel() * tensor.itemsize
    back = from_bytes(data, dtype, tensor.shape)
    assert back.dtype == tensor.dtype
    assert torch.equal(back, tensor.detach())


def test_bytes_are_little_endian_and_row_by_row() -> None:
    assert bytes(to_bytes(torch.tensor([[1.0, -2.0], [0.5, 3.0]]), "float16")) == struct.pack(
        "<4e", 1.0, -2.0, 0.5, 3.0
    )
    assert bytes(to_bytes(torch.tensor([1, 2**32 - 1]), "uint32")) == struct.pack("<2I", 1, 2**32 - 1)
    assert bytes(to_bytes(torch.tensor([1.0], dtype=torch.bfloat16))) == b"\x80\x3f"


def test_token_ids_come_back_as_whole_numbers() -> None:
    ids = torch.tensor([0, 49151, 2**32 - 1])
    assert from_bytes(bytes(to_bytes(ids, "uint32")), "uint32", [3]).to(torch.int64).tolist() == ids.tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_large_contiguous_tensor_is_not_copied_either_way(dtype) -> None:
    tensor = torch.randn(128, 128, requires_grad=True).to(DTYPES[dtype])
    back = from_bytes(to_bytes(tensor), dtype, [128, 128])
    assert back.data_ptr() == tensor.data_ptr()
    assert torch.equal(back, tensor)


def test_the_bytes_of_a_small_tensor_stay_as_they_were() -> None:
    tensor = torch.ones(4)
    data = to_bytes(tensor)
    tensor.zero_()
    assert bytes(data) == struct.pack("<4f", 1, 1, 1, 1)


def test_rows_of_one_shape_after_another_lie_in_the_same_memory() -> None:
    rows = Rows()
    first, second, other = torch.randn(1, 8), torch.randn(1, 8), torch.randn(2, 8)
    held = rows.take(rows_to_raw(first))
    assert torch.equal(held, first)
    assert rows.take(rows_to_raw(second)).data_ptr() == held.data_ptr()
    assert torch.equal(held, second)
    assert torch.equal(rows.take(rows_to_raw(other)), other)
    assert torch.equal(held, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [0, 1, 3, 4096])
def test_rows_are_what_was_sent(dtype, n) -> None:
    rows = Rows()
    rows.take(rows_to_raw(torch.randn(1, 8)))
    sent = torch.randn(n, 8).to(dtype)
    for _ in range(2):
        got = rows.take(rows_to_raw(sent))
        assert got.dtype == dtype
        assert torch.equal(got, sent)


def test_rows_that_do_not_hold_their_shape_are_refused() -> None:
    rows = Rows()
    good = rows_to_raw(torch.randn(1, 8))
    rows.take(good)
    for bad in (RawTensor(memoryview(bytes(31)), good.dtype, good.shape), RawTensor(good.data, good.dtype, [1, 1, 9])):
        with pytest.raises(ZrtError):
            rows.take(bad)
    assert torch.equal(rows.take(good), rows.take(good))


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_will_do_also_one_that_is_not_aligned(kind) -> None:
    tensor = torch.randn(5)
    data = kind(b"x" + bytes(to_bytes(tensor)))
    assert torch.equal(from_bytes(memoryview(data)[1:], "float32", [5]), tensor)


@pytest.mark.parametrize(
    ("size", "dtype", "shape"),
    [
        (15, "float32", [4]),
        (17, "float32", [4]),
        (16, "float32", [5]),
        (16, "float32", [2, -2]),
        (16, "float32", [-4]),
        (0, "float32", [4]),
        (4, "float32", [0, 1]),
        (8, "float64", [1]),
        (8, "", [2]),
        (16, "float32", [2**62, 2**62]),
    ],
)
def test_bytes_that_do_not_hold_the_shape_are_refused(size, dtype, shape) -> None:
    with pytest.raises(ZrtError) as caught:
        from_bytes(bytes(size), dtype, shape)
    assert caught.value.kind == "bad_request"


def test_dtypes_are_named_as_on_the_wire() -> None:
    assert {dtype_name(dtype): dtype for dtype in DTYPES.values()} == DTYPES
