"""A cluster's event log: what happened last, for people who look later. Bounded."""

import logging
import time
from collections import Counter, deque
from typing import Final, Literal

from zrt.runtime.messages.cluster import Happened

log = logging.getLogger(__name__)

KEPT: Final = 400

Kind = Literal["state", "death", "reroute", "rebuild", "preemption", "drain", "down", "refusal", "error"]


class EventLog:
    """The last events of a cluster. `errors` counts what clients were told, by kind; `last` is the
    newest event's serial."""

    def __init__(self) -> None:
        self.errors: Counter[str] = Counter()
        self.last = 0
        self._kept: deque[Happened] = deque(maxlen=KEPT)

    def add(self, kind: Kind, where: str, text: str, error: str = "") -> None:
        """Note an event; with `error`, one of errors.KINDS, count that too."""
        self.last += 1
        if error:
            self.errors[error] += 1
        log.info("%s: %s%s", kind, text, f" ({error})" if error else "", extra={"where": where})
        self._kept.append(Happened(self.last, round(time.time(), 3), kind, where, text[:400], error))

    def since(self, serial: int) -> list[Happened]:
        """Return the events after this serial, as far as they are kept."""
        new = min(self.last - serial, len(self._kept))
        return list(self._kept)[len(self._kept) - new :] if new > 0 else []
