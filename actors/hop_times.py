"""What hops to a worker take: there and back as its master sees it, and what of that the worker computed."""

import statistics
from collections import deque
from typing import Final

RECENT: Final = 512
"""Hops whose times are kept."""


class HopTimes:
    """Of one worker; microseconds. Medians are those of the last RECENT hops, 0 before the first."""

    def __init__(self) -> None:
        self.count = 0
        self._recent: deque[tuple[int, int]] = deque(maxlen=RECENT)

    def add(self, hop_us: int, compute_us: int) -> None:
        self.count += 1
        self._recent.append((hop_us, hop_us - compute_us))

    @property
    def hop_us(self) -> int:
        return self._median(0)

    @property
    def overhead_us(self) -> int:
        """The median of what is not the worker's compute: encoding, sockets, wake-ups."""
        return self._median(1)

    def _median(self, column: int) -> int:
        return int(statistics.median(times[column] for times in self._recent)) if self._recent else 0
