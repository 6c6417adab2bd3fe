"""A limit on warnings that others can provoke: a flood of bad messages is no flood of lines."""

import logging
from collections import Counter

log = logging.getLogger(__name__)


class LogLimiter:
    """A log of warnings that takes each kind the 1st, 2nd, 4th, 8th … time. The kinds are this
    program's: nothing a peer sent goes into `about`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._times: Counter[str] = Counter()

    def add(self, about: str, text: str, error: Exception | None = None) -> None:
        """Log a warning, if its turn came; with `error`, that one's traceback too."""
        self._times[about] += 1
        times = self._times[about]
        if times & (times - 1) == 0:
            log.warning("%s: %s%s", self._name, text, f" ({times} times)" if times > 1 else "", exc_info=error)
