"""The common part of the caches of CPU and GPU: sessions by key, whose pages a `PagePool` counts,
and the memory that follows the count."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence

from zrt.runtime.compute.kv.page_pool import Opening, PagePool, PoolStats, session_name
from zrt.runtime.errors import ZrtError


class SessionCache(ABC):
    """A cache of sessions of at most `context` tokens. Keys are any hashable. Errors:
    `unknown_session` for a key that is not open, and those named at each method. Not thread-safe:
    one executor uses it."""

    def __init__(self, pages: PagePool, context: int) -> None:
        self.context = context
        self._pages = pages

    def __contains__(self, key: Hashable) -> bool:
        return key in self._pages

    def __len__(self) -> int:
        return len(self._pages)

    def open(self, key: Hashable, names: Sequence[int] = ()) -> None:
        """Begin a session whose history's pages have these names, holding the longest prefix that
        is cached.

        A session that is open already goes on under the new names. ZrtError overloaded: all
        sessions are taken.
        """
        if key in self._pages:
            self._pages.rename(key, names)
            return
        opening = self._pages.open(key, names)
        self._take_back()
        if opening.source != opening.row:
            self._adopt(opening)

    def close(self, key: Hashable, names: Sequence[int] | None = None) -> None:
        """End a session: its full pages that have names become cache, the others are freed. Closing
        twice does nothing."""
        self._pages.close(key, names)
        self._take_back()

    def close_all(self) -> None:
        """End every session."""
        for key in self._pages.sessions():
            self.close(key)

    def have(self, key: Hashable) -> int:
        """Return how many tokens the session holds."""
        return self._pages.have(key)

    def rewind(self, key: Hashable, n: int) -> None:
        """Forget a session's tokens from `n` on and give back the pages beyond those then held."""
        self._pages.rewind(key, n)
        self._take_back()

    def reserve(self, key: Hashable, upto: int) -> None:
        """Own pages for tokens `[0, upto)`. ZrtError context_exceeded or kv_full: that cannot be;
        nothing changes then."""
        if upto > self.context:
            raise ZrtError(
                "context_exceeded",
                f"session {session_name(key)} would hold {upto} tokens; the context is {self.context}",
            )
        self._pages.reserve(key, upto)
        self._take_back()

    def commit(self, key: Hashable, upto: int) -> None:
        """Record that tokens `[0, upto)` have been written."""
        self._pages.commit(key, upto)

    def stats(self) -> PoolStats:
        return self._pages.stats()

    @abstractmethod
    def _adopt(self, opening: Opening) -> None:
        """Give a new session's row the tokens it has in common with another."""

    @abstractmethod
    def _take_back(self) -> None:
        """Release the memory behind `PagePool.freed`."""


class PageCount(SessionCache):
    """The sessions of a shard without blocks: their pages are counted, as on the shards beside it,
    and hold nothing."""

    def __init__(self, pages: int, *, page_tokens: int, context: int, sessions: int) -> None:
        super().__init__(PagePool(pages, page_tokens, 0, sessions), context)

    def _adopt(self, opening: Opening) -> None:
        """Do nothing: there is nothing to copy."""

    def _take_back(self) -> None:
        self._pages.freed()
