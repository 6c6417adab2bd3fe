"""Memory of the host whose words a CUDA stream writes, and waits for, without the host (the
driver's stream memory operations), and whose rows kernels write and read.

https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEMOP.html

A stream that waits for an event of another process waits for ever if that process dies; a stream
that waits for a word goes on as soon as any process writes the word.
"""

import ctypes
from ctypes import byref, c_uint, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from zrt.runtime.errors import ZrtError

_PORTABLE_AND_MAPPED: Final = 1 | 2
_WHEN_REACHED: Final = 0
"""The flag for waiting until (word - value) as a signed number is not negative."""
_TILE: Final = 1024
"""Numbers of 16 bits that a program copies, 16 bytes a thread."""
_UNIT: Final = 8
"""Numbers that are written as one, where their count is a multiple of this."""
_MOST: Final = 1 << 20
"""The most bytes that kernels copy; a copy engine takes larger copies, since it has more accesses
under way at once than programs that read the host's memory."""


@cache
def _driver() -> Any:
    """Return the driver that torch has loaded."""
    driver = ctypes.CDLL("libcuda.so.1")
    for name in ("cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2"):
        getattr(driver, name).argtypes = [c_void_p, c_uint64, c_uint32, c_uint]
    driver.cuMemHostGetDevicePointer_v2.argtypes = [c_void_p, c_void_p, c_uint]
    return driver


def register(address: int, size: int) -> int:
    """Pin mapped memory for all devices of this process; return the address at which they see it.
    ZrtError unsupported. Undone by `unregister`."""
    _check(int(torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE_AND_MAPPED)), "to pin shared memory")
    seen = c_uint64()
    _check(_driver().cuMemHostGetDevicePointer_v2(byref(seen), address, 0), "to map shared memory")
    return seen.value


def unregister(address: int) -> None:
    """Unpin memory, once the current stream has done all work it was given."""
    finish()
    torch.cuda.cudart().cudaHostUnregister(address)


def finish() -> None:
    """Wait until the current stream has done all work it was given."""
    torch.cuda.current_stream().synchronize()


def write(address: int, value: int) -> None:
    """Have the current stream set a word to `value`, so that everything written before it can be
    read then."""
    _check(_driver().cuStreamWriteValue32_v2(_stream(), address, value, 0), "to write a flag")


def wait(address: int, value: int) -> None:
    """Have the current stream wait until a word is `value` or one that follows it."""
    _check(_driver().cuStreamWaitValue32_v2(_stream(), address, value, _WHEN_REACHED), "to wait for a flag")


def leave(rows: Tensor, place: Tensor, void: Tensor | None, said: Tensor) -> None:
    """Copy contiguous rows to registered memory; `said` int32 [1] there is 1 if any of `void` is
    not 0, else 0."""
    from zrt.runtime.compute.cuda.kernels import host_copy  # triton is installed only where CUDA is

    count, voids = _copied(rows, place), 0 if void is None else void.numel()
    unit, void = _unit(count), said if void is None else void
    host_copy.leave[_programs(count)](
        rows.view(torch.int16), place.view(torch.int16), count // unit, void, voids, said, unit, _TILE
    )


def take(place: Tensor, to: Tensor, broken: Tensor, said: Tensor, void: Tensor) -> None:
    """Copy rows of registered memory to contiguous `to`; `void` int32 [1] is 1 if `broken` or
    `said`, int32 [1] there, is not 0, else 0."""
    from zrt.runtime.compute.cuda.kernels import host_copy

    count = _copied(place, to)
    unit = _unit(count)
    host_copy.take[_programs(count)](
        place.view(torch.int16), to.view(torch.int16), count // unit, broken, said, void, unit, _TILE
    )


def sample(count: int) -> Tensor:
    """Return int16 [count] on the device: 0, 1, 2 and so on."""
    return torch.arange(count, dtype=torch.int16, device="cuda")


def _copied(rows: Tensor, to: Tensor) -> int:
    """Copy large rows by a copy engine; return how many numbers of 16 bits are left for a kernel to
    copy, 0 if there are none."""
    if rows.nbytes <= _MOST:
        return rows.nbytes // 2
    to.copy_(rows, non_blocking=True)
    return 0


def _unit(count: int) -> int:
    return 1 if count % _UNIT else _UNIT


def _programs(count: int) -> tuple[int]:
    return (max(1, -(-count // _TILE)),)


def _stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


def _check(status: int, what: str) -> None:
    if status:
        raise ZrtError("unsupported", f"this device or its driver does not let us {what[3:]}: CUDA error {status}")
