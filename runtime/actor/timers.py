"""Periodic calls on the loop, and how late the loop was with them."""

import asyncio
import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)


class Lateness:
    """The greatest lateness noted in the last one to two windows, in seconds."""

    def __init__(self, window_s: float = 1.0) -> None:
        self._window_s = window_s
        self._since = time.monotonic()
        self._now = 0.0
        self._before = 0.0

    def note(self, seconds: float) -> None:
        self._roll()
        self._now = max(self._now, seconds)

    @property
    def seconds(self) -> float:
        self._roll()
        return max(self._now, self._before)

    def _roll(self) -> None:
        age = time.monotonic() - self._since
        if age >= self._window_s:
            self._before = self._now if age < 2 * self._window_s else 0.0
            self._now = 0.0
            self._since = time.monotonic()


class Periodic:
    """A call of `fn` every `seconds` until cancelled, first after `seconds`. Times missed while the
    loop was busy are not made up for."""

    def __init__(self, seconds: float, fn: Callable[[], None], lateness: Lateness) -> None:
        self._seconds = seconds
        self._fn = fn
        self._lateness = lateness
        self._loop = asyncio.get_running_loop()
        self._due = time.monotonic() + seconds
        self._timer = self._loop.call_later(seconds, self._fire)

    @property
    def cancelled(self) -> bool:
        return self._timer.cancelled()

    def cancel(self) -> None:
        self._timer.cancel()

    def _fire(self) -> None:
        now = time.monotonic()
        self._lateness.note(max(0.0, now - self._due))
        self._due += self._seconds
        if self._due <= now:
            self._due = now + self._seconds
        self._timer = self._loop.call_later(self._due - now, self._fire)
        try:
            self._fn()
        except Exception:
            log.exception("%s failed; it is called again", self._fn)
