"""Keys and values of many sessions in CPU memory.

Memory is a slab of rows, one row a session, each long enough for the whole context and laid out
`[block, k|v, kv head, token, head_dim]`, so that attention reads a session's keys in place. The
slab is address space, not memory: pages that were never written cost nothing, and memory that a row
no longer needs is given back to the kernel. How many tokens may be held at once is counted in pages
by `PagePool`, which also keeps closed sessions' pages as cache; a session that begins like another
copies what they have in common.
"""

import ctypes
import mmap
import os
from collections.abc import Hashable
from typing import Final

import torch
from torch import Tensor

from zrt.runtime.compute.kv.page_pool import Opening, PagePool
from zrt.runtime.compute.kv.session_cache import SessionCache
from zrt.runtime.compute.tensors import dtype_name
from zrt.runtime.errors import ZrtError
from zrt.runtime.models.architecture.spec import ModelSpec
from zrt.runtime.models.checkpoint.layout import PAGE_TOKENS, kv_token_bytes

_MAP_NORESERVE: Final = 0x4000  # <asm-generic/mman.h>; the mmap module does not name it
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


class SlabKVCache(SessionCache):
    """A cache of blocks `first..last` (inclusive) for at most `sessions` sessions of at most
    `context` tokens, in `budget` bytes."""

    def __init__(
        self,
        spec: ModelSpec,
        blocks: tuple[int, int],
        *,
        dtype: torch.dtype,
        budget: int,
        context: int,
        sessions: int,
        page_tokens: int = PAGE_TOKENS,
    ) -> None:
        num_blocks = blocks[1] - blocks[0] + 1
        page_bytes = page_tokens * num_blocks * kv_token_bytes(spec, dtype_name(dtype))
        if budget < page_bytes:
            raise ZrtError(
                "insufficient_memory",
                f"a KV budget of {budget} bytes is less than one page of blocks {blocks[0]}-{blocks[1]}: {page_bytes} bytes",
            )
        super().__init__(PagePool(budget // page_bytes, page_tokens, page_bytes, sessions), context)
        self._memory = _Slab(self._pages.rows, (num_blocks, 2, spec.num_kv_heads, context, spec.head_dim), dtype)

    @property
    def slab(self) -> Tensor:
        """Return the slab, [rows, blocks, 2, kv heads, context, head_dim]: keys at index 0 of the
        third dimension, values at 1."""
        return self._memory.tensor

    def row(self, key: Hashable) -> int:
        """Return the row of the slab that holds the session."""
        return self._pages.row(key)

    def _adopt(self, opening: Opening) -> None:
        slab = self.slab
        slab[opening.row, ..., : opening.tokens, :] = slab[opening.source, ..., : opening.tokens, :]

    def _take_back(self) -> None:
        for freed in self._pages.freed():
            self._memory.give_back(freed.row, freed.start)


class _Slab:
    """Rows of tensors in one anonymous private mapping, without swap reservation and without huge
    pages (a token touches few bytes of each block)."""

    def __init__(self, rows: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        system_page = os.sysconf("SC_PAGE_SIZE")
        numbers = torch.Size(shape).numel()
        self._row_bytes = -(-numbers * dtype.itemsize // system_page) * system_page
        size = rows * self._row_bytes
        try:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        except (OSError, OverflowError, ValueError) as error:
            raise ZrtError(
                "insufficient_memory",
                f"no address space for a KV cache of {rows} sessions x {self._row_bytes} bytes ({error}); ask for fewer sessions or less context",
            ) from error
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        row_numbers = self._row_bytes // dtype.itemsize
        self.tensor: Tensor = (
            torch.frombuffer(memory, dtype=dtype).view(rows, row_numbers)[:, :numbers].view(rows, *shape)
        )

    def give_back(self, row: int, start: int) -> None:
        """Return a row's memory from token `start` on to the kernel; it reads as zeros afterwards.

        Only whole pages of the kernel are returned. The calls hold no GIL, since a long row takes
        milliseconds.
        """
        numbers = self.tensor[row]
        if start == 0:
            self._advise(numbers.data_ptr(), self._row_bytes)
            return
        token = numbers.shape[-1] * numbers.itemsize
        first, end = start * token, numbers.shape[-2] * token
        for head in range(numbers.shape[0] * numbers.shape[1] * numbers.shape[2]):
            self._advise(numbers.data_ptr() + head * end + first, end - first)

    def _advise(self, start: int, size: int) -> None:
        page = os.sysconf("SC_PAGE_SIZE")
        aligned = -(-start // page) * page
        size = (start + size - aligned) // page * page
        if size <= 0:
            return
        if _LIBC.madvise(ctypes.c_void_p(aligned), ctypes.c_size_t(size), mmap.MADV_DONTNEED) != 0:
            raise ZrtError("internal", f"madvise failed: {os.strerror(ctypes.get_errno())}")
