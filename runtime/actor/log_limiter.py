"""A limit on warnings that others can provoke: a flood of bad messages does not flood the log."""

import logging
from collections import Counter

log = logging.getLogger(__name__)


class LogLimiter:
    """A log of warnings that writes each kind the 1st, 2nd, 4th, 8th … time only. A kind (`about`)
    is this program's own text, never anything a peer sent."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._times: Counter[str] = Counter()

    def add(self, about: str, text: str, error: Exception | None = None) -> None:
        """Log a warning of the kind `about` if its turn has come; with `error`, also the
        traceback."""
        self._times[about] += 1
        times = self._times[about]
        if times & (times - 1) == 0:
            log.warning("%s: %s%s", self._name, text, f" ({times} times)" if times > 1 else "", exc_info=error)
