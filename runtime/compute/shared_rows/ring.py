"""Memory that two processes map, with places for rows and a flag for each (channel.py).

Layout: a page of words (magic; whether the memory is broken; the number of the rows written last;
for each place, on lines of their own, the turn written with whether it is void, and the turn
taken), then the places.
"""

import fcntl
import mmap
import os
from itertools import product
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor

from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.header import HandedOver

NAME: Final = "zrt-handover"
PAGE: Final = 4096
_MAGIC: Final = 0x7A727431
_MAGIC_WORD: Final = 0
_BROKEN_WORD: Final = 1
_PROBE_WORD: Final = 2
_PROBE_VOID_WORD: Final = 3
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_WORD: Final = 4
_LINE: Final = 32
"""Words between two flags."""
LAST: Final = _LINE
"""The word that holds the number of the rows written last. It is only a hint: readers may write it,
too."""


class Device(Protocol):
    """The device that writes flags and waits for them, in the order of its work
    (stream_flags.py)."""

    def register(self, address: int, size: int) -> int:
        """Map host memory into the device; return the address by which the device knows it."""

    def unregister(self, address: int) -> None: ...

    def finish(self) -> None:
        """Wait until the device has done all work it was given."""

    def write(self, address: int, value: int) -> None: ...

    def wait(self, address: int, value: int) -> None: ...

    def leave(self, rows: Tensor, place: Tensor, void: Tensor | None, said: Tensor) -> None:
        """Copy rows to `place`, in shared memory, and to `said`, int32 [1] there, whether any of
        `void` is not 0."""

    def take(self, place: Tensor, to: Tensor, broken: Tensor, said: Tensor, void: Tensor) -> None:
        """Copy rows from `place`, and to `void`, int32 [1], whether `broken` or `said` is not 0."""

    def sample(self, count: int) -> Tensor:
        """Return int16 [count] on the device: 0, 1, 2 and so on."""


class RowRing:
    """One mapping of the memory. Words may be touched by any thread; `device` and rows by the
    executor alone."""

    def __init__(self, fd: int, places: int, place_bytes: int, device: Device) -> None:
        self._map = mmap.mmap(fd, PAGE + places * place_bytes)
        self.words = np.frombuffer(self._map, np.uint32, PAGE // _WORD)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._flags = torch.frombuffer(self._map, dtype=torch.int32, count=PAGE // _WORD)
        self._place_bytes = place_bytes
        self._device = device
        self._seen = 0
        self.closed = False

    def written(self, place: int) -> int:
        return _LINE * (2 * place + 2)

    def void(self, place: int) -> int:
        return self.written(place) + 1

    def taken(self, place: int) -> int:
        return _LINE * (2 * place + 3)

    @property
    def broken(self) -> bool:
        return bool(self.words[_BROKEN_WORD])

    def break_(self) -> None:
        """Mark the memory broken: it is not written any more."""
        self.words[_BROKEN_WORD] = 1

    def flag(self, word: int) -> Tensor:
        """Return a word as int32 [1], for the device to copy."""
        return self._flags[word : word + 1]

    @property
    def broken_flag(self) -> Tensor:
        return self.flag(_BROKEN_WORD)

    def probe(self) -> None:
        """Have the device leave numbers, write a flag, wait for it and take the numbers, at both
        alignments and for both kinds of counts that the kernels know, so that they are compiled.
        ZrtError unsupported: the device cannot do this."""
        device = self._device
        for turn, (skipped, count) in enumerate(product((0, 4), (PAGE // 4, PAGE // 4 - 1)), 1):
            sample = device.sample(count)
            got, void = torch.zeros_like(sample), torch.ones_like(sample, dtype=torch.int32)[:1]
            place = self.rows(0, 0, (PAGE // 2,), torch.int16)[skipped:][:count]
            said = self.flag(_PROBE_VOID_WORD)
            device.leave(sample, place, None, said)
            self.write(_PROBE_WORD, turn)
            self.wait(_PROBE_WORD, turn)
            device.take(place, got, self.broken_flag, said, void)
            device.finish()
            if self.words[_PROBE_WORD] != turn or not torch.equal(got, sample) or void.item():
                raise ZrtError("unsupported", "this device does not write into shared memory, or reads something else")

    def rows(self, place: int, first: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the rows from `first` on in this place, for the device to copy."""
        self.open()
        size = dtype.itemsize * int(np.prod(shape))
        start = PAGE + place * self._place_bytes + first * size // max(1, shape[0])
        return self._bytes[start : start + size].view(dtype).view(shape)

    def write(self, word: int, value: int) -> None:
        self.open()
        self._device.write(self._seen + _WORD * word, value)

    def wait(self, word: int, value: int) -> None:
        self.open()
        self._device.wait(self._seen + _WORD * word, value)

    def close(self) -> None:
        """Close the memory, once the device is done with it; nothing is read or written any more.
        The mapping lives as long as rows of it are held."""
        self.closed = True
        if self._seen:
            self._device.unregister(self.words.ctypes.data)
            self._seen = 0

    def open(self) -> None:
        """Register the memory with the device. ZrtError stage_lost: the memory is closed."""
        if self.closed:
            raise ZrtError("stage_lost", "the memory that rows were handed over in is gone")
        if not self._seen:
            self._seen = self._device.register(self.words.ctypes.data, len(self._map))


def made(places: int, place_bytes: int, device: Device) -> tuple[int, RowRing]:
    """Make new memory; return its file, to be closed by the caller, and its mapping. OSError."""
    fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, PAGE + places * place_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        memory = RowRing(fd, places, place_bytes, device)
    except BaseException:
        os.close(fd)
        raise
    memory.words[_MAGIC_WORD] = _MAGIC
    return fd, memory


def mapped(handed: HandedOver, size: int, device: Device) -> RowRing:
    """Map another process's memory of `size` bytes. ZrtError stage_lost: the memory is gone, or
    cannot be opened; bad_request: it is of another kind."""
    path, whose = f"/proc/{handed.pid}/fd/{handed.fd}", f"the memory that process {handed.pid} hands rows over in"
    try:
        if not os.readlink(path).startswith(f"/memfd:{NAME}"):
            raise ZrtError("stage_lost", f"{whose} is gone")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_ino != handed.inode:
                raise ZrtError("stage_lost", f"{whose} is gone")
            # without the seals the writer could shrink it, and reading beyond its end would be a
            # bus error
            if os.fstat(fd).st_size != size or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise ZrtError("bad_request", f"handed: {whose} has not {size} bytes, or is unsealed")
            memory = RowRing(fd, handed.places, handed.place_bytes, device)
        finally:
            os.close(fd)
    except OSError as error:
        raise ZrtError("stage_lost", f"{whose} cannot be had: {error.strerror}") from error
    if memory.words[_MAGIC_WORD] != _MAGIC:
        raise ZrtError("bad_request", f"handed: {whose} is of another kind")
    return memory
