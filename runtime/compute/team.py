"""How many threads a turn runs on: as many as it may, unless fewer are faster just then. Pure: seconds in, numbers out.

The threads of a turn wait for each other after every product. If another process has one of their cores, all of them wait until the one that was
put off runs again, a scheduler's slice each time: beside one busy process, two threads on two cores can take five times as long for a token as
one. Nothing but the time of the turns themselves tells it, so now and then some turns are tried on other numbers of threads.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

MOST_ROWS: Final = 64
"""Turns of more rows compute long between two waits, and are too long to be tried slower."""
WINDOW: Final = 8
TRIAL: Final = 4
FASTER: Final = 0.85
"""What other threads must take, as a part of the usual time, to be preferred."""
SLOWER: Final = 2.0
"""A trial of which two turns took so many times the usual time is over."""
REST_TURNS: Final = 100
COST: Final = 200
"""A trial that cost some time is followed by so many times that without one, but"""
REST_MOST_S: Final = 10.0


def typical(times: deque[float]) -> float:
    """The mean without the greatest: one hiccup says nothing."""
    return (sum(times) - max(times)) / (len(times) - 1)


@dataclass(slots=True)
class _Kind:
    """Turns of about the same rows. `rest` is in seconds of such turns."""

    size: int
    trial: int = 0
    down: bool = True
    rest: float = 0.0
    times: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    tried: deque[float] = field(default_factory=deque)

    def took(self, seconds: float, limit: int) -> None:
        if self.trial:
            self.tried.append(seconds)
            self._judge()
            return
        self.times.append(seconds)
        self.rest -= seconds
        if self.rest <= 0 and len(self.times) == WINDOW:
            self.trial = self._other(limit)

    def _other(self, limit: int) -> int:
        """Half or twice as many threads, in turns where both are possible; 0 where neither is."""
        fewer, more = self.size // 2, min(2 * self.size, limit) if self.size < limit else 0
        down, self.down = self.down, not self.down
        return (fewer or more) if down else (more or fewer)

    def _judge(self) -> None:
        usual = typical(self.times)
        hopeless = sum(seconds > SLOWER * usual for seconds in self.tried) == 2
        if not hopeless and len(self.tried) < TRIAL:
            return
        self.rest = REST_TURNS * usual
        if not hopeless and typical(self.tried) < FASTER * usual:
            self.size = self.trial
            self.times.clear()
        else:
            self.rest = min(REST_MOST_S, max(self.rest, COST * (sum(self.tried) - len(self.tried) * usual)))
        self.trial = 0
        self.tried.clear()


class Team:
    """`size` says how many threads the next turn takes, `took` how long it lasted. A turn that is not told of changes nothing."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[int, int], _Kind] = {}
        self._last: tuple[_Kind, int] | None = None

    def size(self, limit: int, rows: int) -> int:
        """At most `limit`, for a turn of `rows` rows."""
        self._last = None
        if limit == 1 or rows > MOST_ROWS:
            return limit
        kind = self._kinds.setdefault((limit, rows.bit_length()), _Kind(limit))
        self._last = kind, limit
        return kind.trial or kind.size

    def took(self, seconds: float) -> None:
        if self._last is not None:
            kind, limit = self._last
            kind.took(seconds, limit)
