"""Accounting of KV memory: rows of pages, owned by sessions or kept as cache for sessions of an
equal prefix. Pure: knows no tensor.

A row is the place of one session's history, and its pages are counted against one pool. A session
that closes leaves the full pages that have names (see page_keys.py) behind in its row; a later
session whose history begins with the same names takes them over or copies them. Cached pages are
evicted from the ends of the rows that were used least recently, as soon as a session needs pages.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from zrt.runtime.errors import ZrtError
from zrt.runtime.formatting import counted


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Pages of a pool: `free + cached + used == total` at every moment."""

    total: int
    used: int
    cached: int
    free: int
    page_tokens: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class Freed:
    """A row whose memory from token `start` on holds nothing any more."""

    row: int
    start: int


@dataclass(frozen=True, slots=True)
class Opening:
    """The beginning of a new session: `tokens` of history, to be copied from row `source` if that
    is another than `row`."""

    row: int
    source: int
    tokens: int


@dataclass(slots=True)
class _PageRow:
    number: int
    have: int = 0  # tokens
    pages: int = 0
    names: list[int] = field(default_factory=list)  # of the pages of the history, as far as known
    named: int = 0  # pages that other sessions may find by their names: full, written, and named


class PagePool:
    """A pool of `total` pages of `page_tokens` tokens, with rows for `sessions` sessions and for as
    many cached ones besides."""

    def __init__(self, total: int, page_tokens: int, page_bytes: int, sessions: int) -> None:
        self._total = total
        self._page_tokens = page_tokens
        self._page_bytes = page_bytes
        self._max_sessions = sessions
        self._free_rows = list(range(2 * sessions))[::-1]
        self._sessions: dict[Hashable, _PageRow] = {}
        self._cached: OrderedDict[int, _PageRow] = OrderedDict()  # least recently used first
        self._holders: dict[int, dict[int, _PageRow]] = {}  # a page's name: the rows that have it
        self._used = 0
        self._cached_pages = 0
        self._freed: list[Freed] = []

    @property
    def rows(self) -> int:
        return 2 * self._max_sessions

    def __contains__(self, key: Hashable) -> bool:
        return key in self._sessions

    def __len__(self) -> int:
        """Return how many sessions are open."""
        return len(self._sessions)

    def sessions(self) -> list[Hashable]:
        """Return the keys of the open sessions."""
        return list(self._sessions)

    def row(self, key: Hashable) -> int:
        """Return where the session's history lies. ZrtError unknown_session: the session is not
        open, here and in every method below."""
        return self._row(key).number

    def have(self, key: Hashable) -> int:
        """Return how many tokens the session holds."""
        return self._row(key).have

    def open(self, key: Hashable, names: Sequence[int] = ()) -> Opening:
        """Begin a session whose history's pages have these names, with the longest prefix of them
        that is held here.

        ZrtError overloaded: `sessions` are open already.
        """
        if len(self._sessions) >= self._max_sessions:
            raise ZrtError(
                "overloaded", f"the KV cache has {counted(self._max_sessions, 'session')} at most, and all are taken"
            )
        source, pages = self._longest(names)
        whole_or_scarce = source is not None and (pages == source.named or pages > self.stats().free)
        if source is not None and source.number in self._cached and whole_or_scarce:
            return self._take_over(key, source, pages, names)
        row = self._new_row(source)
        self._sessions[key] = row
        if source is not None:
            pages = min(pages, self._make_room(pages, source))
            row.have, row.pages = pages * self._page_tokens, pages
            self._used += pages
            if source.number in self._cached:
                self._cached.move_to_end(source.number)
        self._name(row, names)
        return Opening(row.number, source.number if source is not None and pages else row.number, row.have)

    def rename(self, key: Hashable, names: Sequence[int]) -> None:
        """Give the pages of the session's history these names."""
        self._name(self._row(key), names)

    def reserve(self, key: Hashable, upto: int) -> None:
        """Own pages for tokens `[0, upto)`, at the cost of cached ones. ZrtError kv_full: too few
        pages can be had; nothing changes then."""
        row = self._row(key)
        missing = self._pages(upto) - row.pages
        if missing <= 0:
            return
        free = self._total - self._used
        if missing > free:
            raise ZrtError(
                "kv_full",
                f"session {session_name(key)} needs {counted(missing, 'more KV page')} of {counted(self._page_tokens, 'token')} "
                f"to hold {counted(upto, 'token')}; "
                f"{free} of {self._total} are free, {self._used} used by {counted(len(self._sessions), 'session')}",
            )
        self._make_room(missing, None)
        row.pages += missing
        self._used += missing

    def commit(self, key: Hashable, upto: int) -> None:
        """Record that tokens `[0, upto)` are held; their pages must be reserved."""
        row = self._row(key)
        if not row.have <= upto <= row.pages * self._page_tokens:
            raise ZrtError(
                "internal",
                f"session {session_name(key)} holds {counted(row.have, 'token')} in {counted(row.pages, 'page')}; {upto} cannot be committed",
            )
        row.have = upto
        self._publish(row)

    def rewind(self, key: Hashable, n: int) -> None:
        """Hold `min(have, n)` tokens, and give back every page beyond them, reserved ones included.
        Names stay: a caller that goes on with other tokens than the names stand for renames the
        pages first."""
        row = self._row(key)
        row.have = min(row.have, max(n, 0))
        self._hide(row, row.have // self._page_tokens)
        self._used -= self._shrink(row, self._pages(row.have))

    def close(self, key: Hashable, names: Sequence[int] | None = None) -> None:
        """End a session; its full pages that have names stay as cache. Closing twice does
        nothing."""
        row = self._sessions.get(key)
        if row is None:
            return
        if names is not None:
            self._name(row, names)
        del self._sessions[key]
        self._used -= row.pages
        self._shrink(row, row.named)
        row.have = row.named * self._page_tokens
        if row.pages:
            self._cached[row.number] = row
            self._cached_pages += row.pages
        else:
            self._free_rows.append(row.number)

    def freed(self) -> list[Freed]:
        """Return what was given back since the last call."""
        freed, self._freed = self._freed, []
        return freed

    def stats(self) -> PoolStats:
        return PoolStats(
            total=self._total,
            used=self._used,
            cached=self._cached_pages,
            free=self._total - self._used - self._cached_pages,
            page_tokens=self._page_tokens,
            page_bytes=self._page_bytes,
        )

    # ---- rows and pages --------------------------------------------------------------------------

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._page_tokens)

    def _row(self, key: Hashable) -> _PageRow:
        row = self._sessions.get(key)
        if row is None:
            raise ZrtError("unknown_session", f"session {session_name(key)} is not open here")
        return row

    def _new_row(self, keep: _PageRow | None) -> _PageRow:
        """Return a row for a session; if all are taken, the cached row that was used least recently
        (but not `keep`)."""
        if not self._free_rows:
            victim = next(row for row in self._cached.values() if row is not keep)
            self._evict(victim, victim.pages)
        return _PageRow(self._free_rows.pop())

    def _take_over(self, key: Hashable, source: _PageRow, pages: int, names: Sequence[int]) -> Opening:
        """Make a cached row the session's own; pages that it holds beyond the common prefix are
        given up."""
        self._evict(source, source.pages - pages)
        del self._cached[source.number]
        self._cached_pages -= pages
        self._used += pages
        self._sessions[key] = source
        self._name(source, names)
        return Opening(source.number, source.number, source.have)

    def _make_room(self, pages: int, keep: _PageRow | None) -> int:
        """Evict cached pages (not those of `keep`) until `pages` are free, or nothing is left to
        evict; return how many are free."""
        for row in list(self._cached.values()):
            missing = pages - (self._total - self._used - self._cached_pages)
            if missing <= 0:
                break
            if row is not keep:
                self._evict(row, min(missing, row.pages))
        return self._total - self._used - self._cached_pages

    def _evict(self, row: _PageRow, pages: int) -> None:
        """Take `pages` pages off the end of a cached row."""
        self._hide(row, row.pages - pages)
        self._cached_pages -= self._shrink(row, row.pages - pages)
        row.have = row.pages * self._page_tokens
        if not row.pages and pages:
            del self._cached[row.number]
            self._free_rows.append(row.number)

    def _shrink(self, row: _PageRow, pages: int) -> int:
        """Keep the first `pages` of a row. Returns how many pages were given back."""
        surplus = row.pages - pages
        if surplus > 0:
            row.pages = pages
            self._freed.append(Freed(row.number, pages * self._page_tokens))
        return max(surplus, 0)

    # ---- names -----------------------------------------------------------------------------------

    def _longest(self, names: Sequence[int]) -> tuple[_PageRow | None, int]:
        """Return the row with the longest prefix of these pages, and its length in pages; sessions'
        rows and cached rows both count."""
        for pages in range(len(names), 0, -1):
            holders = self._holders.get(names[pages - 1])
            if holders:
                return next(iter(holders.values())), pages
        return None, 0

    def _name(self, row: _PageRow, names: Sequence[int]) -> None:
        same = 0
        while same < min(len(names), row.named) and names[same] == row.names[same]:
            same += 1
        self._hide(row, same)
        row.names = list(names)
        self._publish(row)

    def _publish(self, row: _PageRow) -> None:
        upto = min(len(row.names), row.have // self._page_tokens)
        for name in row.names[row.named : upto]:
            self._holders.setdefault(name, {})[row.number] = row
        row.named = max(row.named, upto)

    def _hide(self, row: _PageRow, pages: int) -> None:
        """Let only the first `pages` of a row be found from now on."""
        for name in row.names[pages : row.named]:
            holders = self._holders[name]
            del holders[row.number]
            if not holders:
                del self._holders[name]
        row.named = min(row.named, pages)


def session_name(key: Hashable) -> str:
    """Return a session's key as it is shown to people: a number that a coordinator gave in 16
    hexadecimal digits, a bare peer's key unchanged."""
    return f"{key:016x}" if isinstance(key, int) else repr(key)
