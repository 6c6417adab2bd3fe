"""Keys and values of many sessions in the memory of a GPU.

One allocation holds `total` pages of every block. `PagePool` counts them by sessions' rows; where
each page lies is kept here, in a table for each row. Sessions of an equal prefix share its pages in
place: a shared page is full, so it is only read, and one that is to be written again after going
back is copied first. Sharing makes the pages in use fewer than those counted, so a page that the
pool grants is always there.
"""

from collections.abc import Hashable

import numpy as np
import torch
from numpy.typing import NDArray

from zrt.runtime.compute.kv.page_pool import Opening, PagePool
from zrt.runtime.compute.kv.session_cache import SessionCache
from zrt.runtime.compute.tensors import dtype_name
from zrt.runtime.errors import ZrtError
from zrt.runtime.models.architecture.spec import ModelSpec
from zrt.runtime.models.checkpoint.layout import PAGE_TOKENS, kv_token_bytes


class PagedKVCache(SessionCache):
    """A cache of blocks `first..last` (inclusive) for at most `sessions` sessions of at most
    `context` tokens, in `budget` bytes of `device`."""

    def __init__(
        self,
        spec: ModelSpec,
        blocks: tuple[int, int],
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        budget: int,
        context: int,
        sessions: int,
        page_tokens: int = PAGE_TOKENS,
    ) -> None:
        num_blocks = blocks[1] - blocks[0] + 1
        page_bytes = page_tokens * num_blocks * kv_token_bytes(spec, dtype_name(dtype))
        total = budget // page_bytes
        if total == 0:
            raise ZrtError(
                "insufficient_vram",
                f"a KV budget of {budget} bytes is less than one page of blocks {blocks[0]}-{blocks[1]}: {page_bytes} bytes",
            )
        super().__init__(PagePool(total, page_tokens, page_bytes, sessions), context)
        self.page_tokens = page_tokens
        self.spare_page = total
        """A page beyond the pool's, which no session owns: the rows that pad a batch write to
        it."""
        self._tables = np.zeros((self._pages.rows, self.table_width), dtype=np.int32)
        self._counts = [0] * self._pages.rows
        self._owners = [0] * total
        self._free = list(range(total))[::-1]
        shape = (num_blocks, 2, total + 1, page_tokens, spec.num_kv_heads, spec.head_dim)
        try:
            self.pool = torch.zeros(shape, dtype=dtype, device=device)
            """[blocks, 2, pages + 1, page tokens, kv heads, head_dim]: keys at index 0 of the
            second dimension, values at 1."""
        except RuntimeError as error:
            raise ZrtError(
                "insufficient_vram", f"a KV pool of {budget} bytes does not fit in the memory of {device}"
            ) from error

    @property
    def table_width(self) -> int:
        """Return the number of pages of the longest history."""
        return -(-self.context // self.page_tokens)

    def reserve(self, key: Hashable, upto: int) -> None:
        """Own pages for tokens `[0, upto)`. ZrtError context_exceeded or kv_full: that cannot be;
        nothing changes then."""
        super().reserve(key, upto)
        row = self._pages.row(key)
        for index in range(self._counts[row], -(-upto // self.page_tokens)):
            self._tables[row, index] = self._new_page()
            self._counts[row] = index + 1
        have = self._pages.have(key)
        if have % self.page_tokens and upto > have:
            self._own(row, have // self.page_tokens)

    def table(self, key: Hashable) -> NDArray[np.int32]:
        """Return the numbers of the session's pages, in the order of its tokens. The caller must
        not change the array."""
        row = self._pages.row(key)
        return self._tables[row, : self._counts[row]]

    def slots(self, key: Hashable, start: int, count: int) -> NDArray[np.int64]:
        """Return where tokens `[start, start + count)` of the session lie among those of the pool:
        page x page tokens + place in it."""
        positions = np.arange(start, start + count)
        return (
            self.table(key)[positions // self.page_tokens] * np.int64(self.page_tokens) + positions % self.page_tokens
        )

    def _new_page(self) -> int:
        page = self._free.pop()
        self._owners[page] = 1
        return page

    def _own(self, row: int, index: int) -> None:
        """Make a page that is to be written this row's alone."""
        shared = int(self._tables[row, index])
        if self._owners[shared] == 1:
            return
        own = self._new_page()
        self._tables[row, index] = own
        self._owners[shared] -= 1
        self.pool[:, :, own] = self.pool[:, :, shared]

    def _adopt(self, opening: Opening) -> None:
        count = opening.tokens // self.page_tokens
        shared = self._tables[opening.source, :count]
        for page in shared.tolist():
            self._owners[page] += 1
        self._tables[opening.row, :count] = shared
        self._counts[opening.row] = count

    def _take_back(self) -> None:
        for freed in self._pages.freed():
            kept = freed.start // self.page_tokens
            for page in self._tables[freed.row, kept : self._counts[freed.row]].tolist():
                self._owners[page] -= 1
                if not self._owners[page]:
                    self._free.append(page)
            self._counts[freed.row] = min(self._counts[freed.row], kept)
