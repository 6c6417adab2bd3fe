"""How many threads a turn of decodes runs on: as many as it may, unless fewer are faster just then.
Pure: seconds in, numbers out.

The threads of a turn wait for each other after every product. If another process has one of their
cores, all of them wait until the one that was put off runs again, a scheduler's slice each time:
beside one busy process, two threads on two cores can take five times as long for a token as one.
Nothing but the time of the turns themselves tells it, so now and then some turns are tried on other
numbers of threads.
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import median_low
from typing import Final

WINDOW: Final = 8
"""Turns that tell the usual time, by their lower median: a few hiccups say nothing, nor do the
longer ones where long and short ones alternate."""
FASTER: Final = 0.85
"""A turn of a trial speaks for it if it takes less than this part of the usual time. Three that do
decide for it, two that do not against it."""
SLOWER: Final = 2.0
"""So does one alone that takes this many times the usual time."""
REST_TURNS: Final = 100
"""Between two trials lies the time of so many turns, or so many times what the last one cost, if
that is more."""


@dataclass(slots=True)
class _TurnKind:
    """Turns of about the same rows, on `size` threads; `rest` is the time until others are tried.
    In a trial (0: there is none) so many turns were `faster`, so many not, and `cost` is what they
    took beyond the usual time. All times are in seconds."""

    size: int
    trial: int = 0
    faster: int = 0
    others: int = 0
    cost: float = 0.0
    rest: float = 0.0
    down: bool = True
    times: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def took(self, seconds: float, limit: int) -> None:
        if self.trial:
            self._judge(seconds, median_low(self.times))
            return
        self.times.append(seconds)
        self.rest -= seconds
        if self.rest <= 0 and len(self.times) == WINDOW:
            self.trial, self.faster, self.others, self.cost = self._other(limit), 0, 0, 0.0

    def _other(self, limit: int) -> int:
        """Half or twice as many threads, by turns where both are possible."""
        fewer, more = self.size // 2, min(2 * self.size, limit) if self.size < limit else 0
        down, self.down = self.down, not self.down
        return (fewer or more) if down else (more or fewer)

    def _judge(self, seconds: float, usual: float) -> None:
        self.cost += seconds - usual
        if seconds < FASTER * usual:
            self.faster += 1
        else:
            self.others += 1
        lost = self.others == 2 or seconds > SLOWER * usual
        if not lost and self.faster < 3:
            return
        if not lost:
            self.size = self.trial
        self.rest = REST_TURNS * max(usual, self.cost)
        self.trial = 0


class ThreadTuner:
    """`size` says how many threads the next turn takes, `took` how long it lasted. A turn that is
    not told of changes nothing."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[int, int], _TurnKind] = {}
        self._last: tuple[_TurnKind, int] | None = None

    def size(self, limit: int, rows: int) -> int:
        """At most `limit`, for a turn of so many rows."""
        self._last = None
        if limit == 1:
            return limit
        kind = self._kinds.setdefault((limit, rows.bit_length()), _TurnKind(limit))
        self._last = kind, limit
        return kind.trial or kind.size

    def took(self, seconds: float) -> None:
        if self._last is not None:
            kind, limit = self._last
            kind.took(seconds, limit)
