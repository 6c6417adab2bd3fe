"""Accounting of KV memory in pages. Pure: knows no tensor, so that the same rules hold whatever keeps the numbers."""

from collections.abc import Hashable
from dataclasses import dataclass

from zrt.runtime.errors import ZrtError


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Pages of a pool: `free + cached + used == total` at every moment."""

    total: int
    used: int
    cached: int
    free: int
    page_tokens: int
    page_bytes: int


@dataclass(slots=True)
class _Holding:
    have: int = 0
    pages: int = 0


class PagePool:
    """A fixed number of pages of `page_tokens` tokens, owned by sessions. A session holds `have` tokens and the pages it reserved."""

    def __init__(self, total: int, page_tokens: int, page_bytes: int) -> None:
        self._total = total
        self._page_tokens = page_tokens
        self._page_bytes = page_bytes
        self._used = 0
        self._sessions: dict[Hashable, _Holding] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._sessions

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, key: Hashable) -> None:
        """Begin a session with no tokens; one that is open stays as it is."""
        self._sessions.setdefault(key, _Holding())

    def have(self, key: Hashable) -> int:
        """Tokens the session holds. `unknown_session` when it was never opened, here as everywhere below."""
        return self._holding(key).have

    def reserve(self, key: Hashable, upto: int) -> None:
        """Own pages for tokens `[0, upto)`. `kv_full` when too few are free; nothing changes then."""
        holding = self._holding(key)
        missing = self._pages(upto) - holding.pages
        if missing <= 0:
            return
        free = self._total - self._used
        if missing > free:
            raise ZrtError(
                "kv_full",
                f"session {key!r} needs {missing} more KV pages of {self._page_tokens} tokens to hold {upto} tokens; "
                f"{free} of {self._total} are free, {self._used} used by {len(self._sessions)} sessions",
            )
        holding.pages += missing
        self._used += missing

    def commit(self, key: Hashable, upto: int) -> None:
        """Say that tokens `[0, upto)` are held; their pages must be reserved."""
        holding = self._holding(key)
        if not holding.have <= upto <= holding.pages * self._page_tokens:
            raise ZrtError(
                "internal",
                f"session {key!r} holds {holding.have} tokens in {holding.pages} pages; {upto} cannot be committed",
            )
        holding.have = upto

    def rewind(self, key: Hashable, n: int) -> None:
        """Hold `min(have, n)` tokens, and give back every page beyond them, reserved ones included."""
        holding = self._holding(key)
        holding.have = min(holding.have, max(n, 0))
        surplus = holding.pages - self._pages(holding.have)
        holding.pages -= surplus
        self._used -= surplus

    def close(self, key: Hashable) -> None:
        """End a session and give back its pages; closing twice is nothing."""
        holding = self._sessions.pop(key, None)
        if holding is not None:
            self._used -= holding.pages

    def stats(self) -> PoolStats:
        return PoolStats(
            total=self._total,
            used=self._used,
            cached=0,
            free=self._total - self._used,
            page_tokens=self._page_tokens,
            page_bytes=self._page_bytes,
        )

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._page_tokens)

    def _holding(self, key: Hashable) -> _Holding:
        holding = self._sessions.get(key)
        if holding is None:
            raise ZrtError("unknown_session", f"session {key!r} is not open here")
        return holding
