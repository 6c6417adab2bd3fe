"""Answers that are over, kept for clients that may not have heard all of them."""

from typing import Final

from zrt.actors.delivery import Delivery

SESSIONS: Final = 1024
SIZE: Final = 1 << 18
"""What is kept at most, in sessions, and in tokens and log-probabilities of theirs; the oldest go first."""


class Leases:
    """Deliveries by session, each for `seconds` from its end, or from when its client last came back. Times are monotonic seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._kept: dict[int, tuple[Delivery, int, float]] = {}  # the one that ends first comes first
        self._size = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, session: int, delivery: Delivery, now: float) -> None:
        """From now on, or anew."""
        self._drop(session)
        size = delivery.size
        self._kept[session] = (delivery, size, now + self._seconds)
        self._size += size
        while len(self._kept) > 1 and (len(self._kept) > SESSIONS or self._size > SIZE):
            self._drop(next(iter(self._kept)))

    def find(self, session: int) -> Delivery | None:
        kept = self._kept.get(session)
        return kept[0] if kept is not None else None

    def tend(self, now: float) -> None:
        """Drop what is kept no longer; clients that did not take all of it may do so now."""
        for session, (delivery, _, until) in list(self._kept.items()):
            if now >= until:
                self._drop(session)
            elif delivery.stalled:
                delivery.retry()

    def _drop(self, session: int) -> None:
        kept = self._kept.pop(session, None)
        if kept is not None:
            self._size -= kept[1]
