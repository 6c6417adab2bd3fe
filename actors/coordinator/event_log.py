"""What happened in a cluster, the last of it: for people who look later. Bounded."""

import logging
import time
from collections import Counter, deque
from typing import Final, Literal

from zrt.runtime.messages.cluster import Happened

log = logging.getLogger(__name__)

KEPT: Final = 400

Kind = Literal["state", "death", "reroute", "rebuild", "preemption", "drain", "down", "refusal", "error"]


class EventLog:
    """`errors` counts what clients were told, by kind; `last` is the newest entry's serial."""

    def __init__(self) -> None:
        self.errors: Counter[str] = Counter()
        self.last = 0
        self._kept: deque[Happened] = deque(maxlen=KEPT)

    def add(self, kind: Kind, where: str, text: str, error: str = "") -> None:
        """Note it; with `error`, one of errors.KINDS, it is counted there too."""
        self.last += 1
        if error:
            self.errors[error] += 1
        log.info("%s: %s%s", kind, text, f" ({error})" if error else "", extra={"where": where})
        self._kept.append(Happened(self.last, round(time.time(), 3), kind, where, text[:400], error))

    def since(self, serial: int) -> list[Happened]:
        """What came after this serial, as far as it is kept."""
        new = min(self.last - serial, len(self._kept))
        return list(self._kept)[len(self._kept) - new :] if new > 0 else []
