"""Keys and values of many sessions in CPU memory.

Memory is a slab of rows, one row a session, each long enough for the whole context and laid out `[block, k|v, kv head, token, head_dim]`,
so that attention reads a session's keys in place. The slab is address space, not memory: pages the kernel has not been asked to fill
cost nothing, and a closed session's row is given back to it. How many tokens may be held at once is counted in pages by `PagePool`.
"""

import ctypes
import mmap
import os
from collections.abc import Hashable
from typing import Final

import torch
from torch import Tensor

from zrt.runtime.compute.layout import PAGE_TOKENS, kv_token_bytes
from zrt.runtime.compute.pages import PagePool, PoolStats
from zrt.runtime.compute.spec import ModelSpec
from zrt.runtime.errors import ZrtError
from zrt.runtime.tensors import dtype_name

_MAP_NORESERVE: Final = 0x4000  # <asm-generic/mman.h>; the mmap module does not name it
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


class KVCache:
    """Cache of blocks `first..last` (inclusive) for at most `sessions` sessions of at most `context` tokens, in `budget` bytes.

    Keys are any hashable. Errors: `unknown_session` for a key that is not open, and those named below. Not thread-safe: one lane uses it.
    """

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
        self.context = context
        self._pages = PagePool(budget // page_bytes, page_tokens, page_bytes)
        self._free_rows = list(range(sessions))[::-1]
        self._rows: dict[Hashable, int] = {}
        self._memory = _Slab(sessions, (num_blocks, 2, spec.num_kv_heads, context, spec.head_dim), dtype)

    @property
    def slab(self) -> Tensor:
        """[sessions, blocks, 2, kv heads, context, head_dim]: keys at index 0 of the third dimension, values at 1."""
        return self._memory.tensor

    def __contains__(self, key: Hashable) -> bool:
        return key in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def open(self, key: Hashable) -> None:
        """Begin a session with no tokens; one that is open stays as it is. `overloaded` when every row is taken."""
        if key in self._rows:
            return
        if not self._free_rows:
            raise ZrtError("overloaded", f"all {len(self._rows)} sessions of the KV cache are taken")
        self._rows[key] = self._free_rows.pop()
        self._pages.open(key)

    def close(self, key: Hashable) -> None:
        """End a session: its pages and its memory come back. Closing twice is nothing."""
        self._pages.close(key)
        row = self._rows.pop(key, None)
        if row is not None:
            self._memory.give_back(row)
            self._free_rows.append(row)

    def row(self, key: Hashable) -> int:
        """The row of the slab that holds the session."""
        self._pages.have(key)
        return self._rows[key]

    def have(self, key: Hashable) -> int:
        """Tokens the session holds."""
        return self._pages.have(key)

    def rewind(self, key: Hashable, n: int) -> None:
        """Forget tokens from `n` on and give back the pages beyond what is then held."""
        self._pages.rewind(key, n)
        if self._pages.have(key) == 0:
            self._memory.give_back(self._rows[key])

    def reserve(self, key: Hashable, upto: int) -> None:
        """Own pages for tokens `[0, upto)`. `context_exceeded` or `kv_full` when that cannot be; nothing changes then."""
        if upto > self.context:
            raise ZrtError(
                "context_exceeded", f"session {key!r} would hold {upto} tokens; the context is {self.context}"
            )
        self._pages.reserve(key, upto)

    def commit(self, key: Hashable, upto: int) -> None:
        """Say that tokens `[0, upto)` have been written."""
        self._pages.commit(key, upto)

    def stats(self) -> PoolStats:
        return self._pages.stats()


class _Slab:
    """Rows of tensors in one anonymous private mapping, without swap reservation and without huge pages (a token touches few bytes of each block)."""

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

    def give_back(self, row: int) -> None:
        """Return a row's memory to the kernel; it reads as zeros afterwards. The call holds no GIL, since a long row takes milliseconds."""
        start = ctypes.c_void_p(self.tensor.data_ptr() + row * self._row_bytes)
        if _LIBC.madvise(start, ctypes.c_size_t(self._row_bytes), mmap.MADV_DONTNEED) != 0:
            raise ZrtError("internal", f"madvise failed: {os.strerror(ctypes.get_errno())}")
