"""The number of threads that a turn of decodes runs on: as many as it may, unless fewer are faster
at the moment. Pure: seconds in, numbers out.

The threads of a turn wait for each other after every product. If another process has one of their
cores, all of them wait until the suspended thread runs again, a scheduler's slice each time: beside
one busy process, two threads on two cores can take five times as long for a token as one. Only the
time of the turns themselves shows it, so now and then some turns are tried on other numbers of
threads.
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import median_low
from typing import Final

WINDOW: Final = 8
"""The number of turns whose lower median is the usual time: a few outliers do not change it, nor do
the longer turns where long and short ones alternate."""
FASTER: Final = 0.85
"""The part of the usual time below which a turn of a trial counts as faster. Three faster turns
decide for the trial's number of threads, two others against it."""
SLOWER: Final = 2.0
"""The multiple of the usual time at which a single turn decides against the trial."""
REST_TURNS: Final = 100
"""The time between two trials, in turns of the usual time; or so many times what the last trial
cost, if that is more."""


@dataclass(slots=True)
class _TurnKind:
    """The state of turns of about the same rows, on `size` threads; `rest` is the time until
    another number is tried. In a trial (0: there is none) so many turns were `faster`, so many not,
    and `cost` is the time taken beyond the usual. All times are in seconds."""

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
        """Return half or twice as many threads, alternately where both are possible."""
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
    """The choice of threads for each turn: `size` says how many the next turn takes, `took` is told
    how long it lasted. A turn whose time is not reported changes nothing."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[int, int], _TurnKind] = {}
        self._last: tuple[_TurnKind, int] | None = None

    def size(self, limit: int, rows: int) -> int:
        """Return the number of threads, at most `limit`, for a turn of `rows` rows."""
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
