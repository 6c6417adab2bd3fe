"""Tensors as bytes on the wire: numbers in little-endian order, rows after rows, without copies where none are needed."""

import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.layers import RAW_DTYPES, RawTensor
from zrt.runtime.messages.layers import Tensor as WireTensor

DTYPES: Final[Mapping[str, torch.dtype]] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "uint32": torch.uint32,
}
RAW: Final = (
    torch.uint8,
    torch.uint32,
    torch.int64,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
)
"""By dtype tag of a RawTensor, in the order of messages.layers.RAW_DTYPES."""

if sys.byteorder != "little":
    raise ImportError("zrt runs on little-endian machines only: tensors travel as they lie in memory")

# Tensors made from received bytes share read-only memory and are never written to. torch warns of that once a process: now, unheard.
with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)
    torch.frombuffer(b"0", dtype=torch.uint8)


def dtype_name(dtype: torch.dtype) -> str:
    """The wire name of a dtype."""
    return str(dtype).removeprefix("torch.")


def to_bytes(tensor: Tensor, dtype: str | None = None) -> memoryview:
    """The bytes of a tensor, first converted to `dtype` where one is given.

    A contiguous CPU tensor of that dtype is not copied: the view then shares its memory, so it must not be written to while the bytes are in use.
    """
    wanted = tensor.dtype if dtype is None else DTYPES[dtype]
    flat = tensor.detach().to("cpu", wanted).contiguous().flatten()
    return flat.view(torch.uint8).numpy().data.toreadonly()


def from_bytes(buffer: bytes | bytearray | memoryview, dtype: str, shape: Sequence[int]) -> Tensor:
    """The tensor that lies in a buffer; it shares the buffer's memory (so do not write to it) unless that is not aligned to its numbers.

    `bad_request` for a dtype not in `DTYPES`, or a shape that does not fit the buffer's size.
    """
    kind = DTYPES.get(dtype)
    if kind is None:
        raise ZrtError("bad_request", f"tensor dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    return _shared(buffer, kind, shape)


def to_raw(tensor: Tensor) -> RawTensor:
    """A tensor as Cake's messages carry it; shares memory as `to_bytes`. `bad_request` for a dtype that has no tag."""
    if tensor.dtype not in RAW:
        raise ZrtError("bad_request", f"tensor dtype {dtype_name(tensor.dtype)} is not one of {', '.join(RAW_DTYPES)}")
    return RawTensor(to_bytes(tensor), RAW.index(tensor.dtype), list(tensor.shape))


def from_raw(raw: RawTensor | WireTensor) -> Tensor:
    """The tensor of a message, sharing its memory as `from_bytes`. `bad_request`: an unknown tag, or a shape that does not fit the data."""
    if raw.dtype >= len(RAW):
        raise ZrtError("bad_request", f"unknown dtype tag: {raw.dtype}")
    return _shared(raw.data, RAW[raw.dtype], raw.shape)


def _shared(buffer: bytes | bytearray | memoryview, kind: torch.dtype, shape: Sequence[int]) -> Tensor:
    size = memoryview(buffer).nbytes
    if any(n < 0 for n in shape) or math.prod(shape) * kind.itemsize != size:
        raise ZrtError("bad_request", f"{size} bytes do not hold {dtype_name(kind)} {list(shape)}")
    if size == 0:
        return torch.empty(tuple(shape), dtype=kind)
    raw = torch.frombuffer(buffer, dtype=torch.uint8)
    if raw.data_ptr() % kind.itemsize:
        raw = raw.clone()
    return raw.view(kind).view(tuple(shape))
