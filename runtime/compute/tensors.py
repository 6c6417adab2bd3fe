"""Tensors as bytes on the wire: numbers in little-endian order, row after row, without copies where
none are needed.

Between two turns only a few rows go each way, through code that the weights have meanwhile driven
out of the caches: every operation of torch or numpy then takes 25 to 50 us, as much as a message.
So a few rows are copied from memory to memory, without torch or numpy.
"""

import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from ctypes import string_at
from typing import Any, Final

import numpy as np
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
"""The dtypes by their tag in a RawTensor, in the order of messages.layers.RAW_DTYPES."""
_TAGS: Final = {kind: tag for tag, kind in enumerate(RAW)}

if sys.byteorder != "little":
    raise ImportError("zrt runs on little-endian machines only: tensors travel as they lie in memory")

COPIED: Final = 16 * 1024
"""The most bytes for which a copy is cheaper than an operation that avoids it."""
_BITS: Final[Mapping[torch.dtype, torch.dtype]] = {
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
}
"""Dtypes that have the same bytes, for dtypes that numpy lacks."""
_ARRAYS: Final[Mapping[torch.dtype, Any]] = {
    kind: torch.empty(0, dtype=_BITS.get(kind, kind)).numpy().dtype for kind in {*RAW, *DTYPES.values()}
}

# Tensors made from received bytes share read-only memory and are never written to. torch warns of
# that once a process: provoke the warning here, where it is ignored.
with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)
    torch.from_numpy(np.frombuffer(b"0", np.uint8))


def dtype_name(dtype: torch.dtype) -> str:
    """Return the wire name of a dtype."""
    return str(dtype).removeprefix("torch.")


def as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor converted to a dtype, or the tensor itself where it has that dtype already:
    asking torch even then costs an operation."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def to_bytes(tensor: Tensor, dtype: str | None = None) -> memoryview:
    """Return the bytes of a tensor, first converted to `dtype` where one is given.

    A tensor that is contiguous, on the CPU, of that dtype and larger than COPIED shares its memory
    with the view returned, and must not be written to while the bytes are in use.
    """
    if dtype is not None:
        tensor = as_dtype(tensor, DTYPES[dtype])
    if not tensor.is_cpu:
        tensor = tensor.cpu()
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    size = tensor.nbytes
    if size <= COPIED:
        return memoryview(string_at(tensor.data_ptr(), size))
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.dtype in _BITS:
        tensor = tensor.view(_BITS[tensor.dtype])
    return tensor.numpy().data.cast("B").toreadonly()


def from_bytes(buffer: bytes | bytearray | memoryview, dtype: str, shape: Sequence[int]) -> Tensor:
    """Return the tensor that lies in a buffer; it shares the buffer's memory (so do not write to
    it) unless that is not aligned to its numbers.

    ZrtError bad_request: a dtype not in `DTYPES`, or a shape that does not fit the buffer's size.
    """
    kind = DTYPES.get(dtype)
    if kind is None:
        raise ZrtError("bad_request", f"tensor dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    return _shared(buffer, kind, shape)


def to_raw(tensor: Tensor) -> RawTensor:
    """Return a tensor as Cake's messages carry it; memory is shared as in `to_bytes`. ZrtError
    bad_request: a dtype that has no tag."""
    return RawTensor(to_bytes(tensor), _tag(tensor.dtype), list(tensor.shape))


def rows_to_raw(rows: Tensor) -> RawTensor:
    """Return hidden states [n, hidden] as an operation carries them, [1, n, hidden]; otherwise as
    `to_raw`."""
    return RawTensor(to_bytes(rows), _tag(rows.dtype), [1, *rows.shape])


def from_raw(raw: RawTensor | WireTensor) -> Tensor:
    """Return the tensor of a message, which shares the message's memory as in `from_bytes`.
    ZrtError bad_request: an unknown tag, or a shape that does not fit the data."""
    return _shared(raw.data, _kind(raw), raw.shape)


def rows_from_raw(raw: RawTensor | WireTensor) -> Tensor:
    """Return hidden states [n, hidden] of a message whose shape is [1, n, hidden]. ZrtError
    bad_request: as `from_raw`, and for another shape."""
    if len(raw.shape) != 3 or raw.shape[0] != 1:
        raise ZrtError("bad_request", f"expected a shape [1, n, hidden], got {raw.shape}")
    return _shared(raw.data, _kind(raw), raw.shape[1:])


def _tag(kind: torch.dtype) -> int:
    tag = _TAGS.get(kind)
    if tag is None:
        raise ZrtError("bad_request", f"tensor dtype {dtype_name(kind)} is not one of {', '.join(RAW_DTYPES)}")
    return tag


class Rows:
    """The hidden states [n, hidden] of one message after another, in one reused buffer as long as
    they are few and of one shape."""

    def __init__(self) -> None:
        self._of: tuple[int, list[int]] = -1, []
        self._memory = memoryview(b"")
        self._tensor = torch.empty(0)

    def take(self, raw: RawTensor | WireTensor) -> Tensor:
        """Return the hidden states of a message, as `rows_from_raw`. They are valid until the next
        call."""
        of = raw.dtype, raw.shape
        if of != self._of or len(raw.data) != len(self._memory):
            tensor = rows_from_raw(raw)
            if not 0 < len(raw.data) <= COPIED:
                return tensor
            self._of, self._memory = of, memoryview(bytearray(raw.data))
            self._tensor = _shared(self._memory, _kind(raw), raw.shape[1:])
        self._memory[:] = raw.data
        return self._tensor


def _kind(raw: RawTensor | WireTensor) -> torch.dtype:
    if raw.dtype >= len(RAW):
        raise ZrtError("bad_request", f"unknown dtype tag: {raw.dtype}")
    return RAW[raw.dtype]


def _shared(buffer: bytes | bytearray | memoryview, kind: torch.dtype, shape: Sequence[int]) -> Tensor:
    size = memoryview(buffer).nbytes
    if any(n < 0 for n in shape) or math.prod(shape) * kind.itemsize != size:
        raise ZrtError("bad_request", f"{size} bytes do not hold {dtype_name(kind)} {list(shape)}")
    if size == 0:
        return torch.empty(tuple(shape), dtype=kind)
    array = np.ndarray(shape, _ARRAYS[kind], buffer)
    tensor = torch.from_numpy(array if array.flags.aligned else array.copy())
    return tensor.view(kind) if kind in _BITS else tensor
