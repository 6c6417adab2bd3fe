"""Counts of durations by size, as Prometheus keeps them. Pure."""

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """`bounds` are the buckets' upper ends in seconds, rising; what is over the last one is counted apart. `sum` is of all that was observed."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """(upper end as text, how many were at most that), the last one "+Inf"."""
        total, made = 0, []
        for end, count in zip([*map(repr, self.bounds), "+Inf"], self.counts, strict=True):
            total += count
            made.append((end, float(total)))
        return made
