"""Warnings that others can provoke: a flood of bad messages is no flood of lines."""

import logging
from collections import Counter

log = logging.getLogger(__name__)


class LogLimiter:
    """Logs each kind of complaint the 1st, 2nd, 4th, 8th … time. The kinds are ours: nothing a peer
    sent goes into `about`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._times: Counter[str] = Counter()

    def add(self, about: str, text: str, error: Exception | None = None) -> None:
        """With `error`, its traceback is logged too."""
        self._times[about] += 1
        times = self._times[about]
        if times & (times - 1) == 0:
            log.warning("%s: %s%s", self._name, text, f" ({times} times)" if times > 1 else "", exc_info=error)
