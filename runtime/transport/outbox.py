"""A peer's outbox: messages its socket had no room for, and large buffers that libzmq still reads
from."""

import asyncio
from collections import deque
from typing import Final, Protocol

from zrt.runtime.errors import ZrtError

Frames = list[bytes | memoryview]

MESSAGES: Final = 4096
BYTES: Final = 64 * 1024 * 1024


class Tracker(Protocol):
    """The part of zmq.MessageTracker that is used: `done` is true once libzmq has let go of the
    buffer."""

    @property
    def done(self) -> bool: ...


class Outbox:
    """What one peer has yet to take, bounded in messages and bytes, except that an empty outbox
    takes a message of any size."""

    __slots__ = ("_held", "_lent", "_lent_bytes", "_waiting", "waiters")

    def __init__(self) -> None:
        self._waiting: deque[tuple[Frames, int]] = deque()
        self._held = 0
        self._lent: deque[tuple[Tracker, int]] = deque()
        self._lent_bytes = 0
        self.waiters: list[asyncio.Future[None]] = []

    def __len__(self) -> int:
        """Return the number of messages that wait."""
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        """Whether nothing waits, nothing is lent to libzmq, and nobody waits for room."""
        self._settle()
        return not (self._waiting or self._lent or self.waiters)

    def takes(self, size: int) -> bool:
        """Return whether a message of `size` bytes still fits."""
        return self._fits(size, MESSAGES, BYTES)

    @property
    def roomy(self) -> bool:
        """Whether the outbox is at most half full: whoever waits for room may go on, and a message
        of up to half the bound is sure to fit."""
        return self._fits(0, MESSAGES // 2, BYTES // 2)

    def push(self, frames: Frames, size: int) -> None:
        self._waiting.append((frames, size))
        self._held += size

    def first(self) -> Frames:
        return self._waiting[0][0]

    def drop_first(self) -> None:
        self._held -= self._waiting.popleft()[1]

    def lend(self, tracker: Tracker, size: int) -> None:
        """Record that libzmq reads a buffer of `size` bytes until `tracker` is done."""
        self._lent.append((tracker, size))
        self._lent_bytes += size

    def wake(self) -> None:
        """Let those who wait for room go on, if there is room."""
        if self.waiters and self.roomy:
            for waiter in self.waiters:
                if not waiter.done():
                    waiter.set_result(None)
            self.waiters.clear()

    def fail(self, error: ZrtError) -> None:
        """Drop everything, and fail those who wait for room with `error`."""
        self._waiting.clear()
        self._held = 0
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_exception(error.anew())
        self.waiters.clear()

    def _fits(self, size: int, messages: int, octets: int) -> bool:
        if not self._waiting and not self._lent:
            return True
        if len(self._waiting) >= messages:
            return False
        if self._held + self._lent_bytes + size <= octets:
            return True
        self._settle()
        return self._held + self._lent_bytes + size <= octets or not (self._waiting or self._lent)

    def _settle(self) -> None:
        # libzmq sends one peer's buffers in order, so the first that is not done ends the search.
        while self._lent and self._lent[0][0].done:
            self._lent_bytes -= self._lent.popleft()[1]
