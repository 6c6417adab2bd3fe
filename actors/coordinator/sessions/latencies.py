"""How long the clients of all sessions waited for their tokens, as histograms. Pure."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

FIRST_TOKEN_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
INTER_TOKEN_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Latencies:
    """What was measured of all sessions: seconds until their first token, and from each token to
    the next."""

    def __init__(self) -> None:
        self.first_token = Histogram(FIRST_TOKEN_S)
        self.inter_token = Histogram(INTER_TOKEN_S)


class Histogram:
    """Durations counted in buckets. `bounds` are the buckets' upper ends in seconds, rising; what
    is over the last one is counted apart. `sum` is of all that was observed."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count a duration."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Return for each bucket its upper end as text, the last one "+Inf", and how many were at
        most that."""
        total, made = 0, []
        for end, count in zip([*map(repr, self.bounds), "+Inf"], self.counts, strict=True):
            total += count
            made.append((end, float(total)))
        return made
