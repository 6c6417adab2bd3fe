"""Tensors as bytes on the wire: numbers in little-endian order, rows after rows, without copies where none are needed."""

import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from zrt.runtime.errors import ZrtError

DTYPES: Final[Mapping[str, torch.dtype]] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "uint32": torch.uint32,
}

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
    size = memoryview(buffer).nbytes
    if any(n < 0 for n in shape) or math.prod(shape) * kind.itemsize != size:
        raise ZrtError("bad_request", f"{size} bytes do not hold {dtype} {list(shape)}")
    if size == 0:
        return torch.empty(tuple(shape), dtype=kind)
    raw = torch.frombuffer(buffer, dtype=torch.uint8)
    if raw.data_ptr() % kind.itemsize:
        raw = raw.clone()
    return raw.view(kind).view(tuple(shape))
