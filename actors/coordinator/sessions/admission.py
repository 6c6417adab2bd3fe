"""Which sessions may run: a bounded queue, the KV pages of the scarcest stage, and the slots that
keep all stages busy. Pure.

A session is admitted when its history and some tokens more fit beside the others', not when its
longest possible output would: if pages run out after all, the youngest goes back to the queue (it
is replayed later), so that the oldest always gets to its end.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from zrt.runtime.errors import ZrtError
from zrt.runtime.formatting import counted

HEADROOM = 64
"""How many tokens a session must have room for beyond its history before it is admitted beside
others."""


@dataclass(slots=True)
class _Admitted:
    """A session that runs: tokens of its history, and its slot."""

    length: int
    slot: int


class Admission:
    """The queue and the running sessions, by id. `capacity` is in pages of `page_tokens` tokens, on
    the stage that has the fewest: of one of its replicas, which a session must fit, and until
    `resize` says more, of all of them."""

    def __init__(self, *, capacity: int, page_tokens: int, sessions: int, queue: int, slots: int) -> None:
        self.capacity = capacity
        self._room = capacity
        self._page_tokens = page_tokens
        self._max_sessions = sessions
        self._max_queue = queue
        self._queue: deque[tuple[int, int]] = deque()  # id, length
        self._running: dict[int, _Admitted] = {}  # oldest first
        self._parked: dict[int, int] = {}  # id: length
        self._populations = [0] * slots

    def resize(self, *, capacity: int, room: int, slots: int) -> None:
        """Take up what the stages offer now: pages of one replica, of all replicas of a stage, and
        slots; sessions of slots that no longer exist go to others."""
        self.capacity = capacity
        self._room = room
        if slots == len(self._populations):
            return
        self._populations = [0] * slots
        moved = [running for running in self._running.values() if running.slot >= slots]
        for running in self._running.values():
            if running.slot < slots:
                self._populations[running.slot] += 1
        for running in moved:
            running.slot = self._populations.index(min(self._populations))
            self._populations[running.slot] += 1

    def offer_all(self, offers: Sequence[tuple[int, int, int]]) -> None:
        """Queue all of a request's sessions, or none: for each its id, `length` and `max_length`.

        ZrtError bad_request: there are never places for so many; else as `offer`.
        """
        self.check_number(len(offers))
        for count, offer in enumerate(offers):
            try:
                self.offer(*offer)
            except ZrtError:
                for session, *_ in offers[:count]:
                    self.remove(session)
                raise

    def offer(self, session: int, length: int, max_length: int) -> None:
        """Queue a new session whose history has `length` tokens and may grow to `max_length`.

        ZrtError kv_full: it could never fit; overloaded: it would have to wait and the queue is
        full, with a time to try again after.
        """
        needed = self._pages(max_length)
        if needed > self.capacity:
            raise ZrtError(
                "kv_full",
                f"{counted(max_length, 'token')} need {counted(needed, 'KV page')} and a stage has {self.capacity}: "
                "lower max_tokens or raise [kv] bytes",
            )
        lengths = chain((waiting for _, waiting in self._queue), (length,))
        if len(self._queue) + 1 - self._startable(lengths) > self._max_queue:
            raise self._full()
        self._queue.append((session, length))

    def _full(self) -> ZrtError:
        text = f"{self._max_queue} may wait besides the {self._max_sessions} that may run ([limits] queue, sessions)"
        return ZrtError("overloaded", f"the queue is full: {text}; retry after {self.retry_after()} s")

    def check_room(self, sessions: int) -> None:
        """Check that so many sessions of any length may come, before theirs is known. ZrtError
        bad_request: there are never places for so many; overloaded: there are none now."""
        self.check_number(sessions)
        free = max(0, self._max_sessions - len(self._running))
        if len(self._queue) + sessions > free + self._max_queue:
            raise self._full()

    def check_number(self, sessions: int) -> None:
        """Check that so many sessions may ever run and wait at once. ZrtError bad_request."""
        most = self._max_sessions + self._max_queue
        if sessions > most:
            raise ZrtError(
                "bad_request", f"n = {sessions}, but {most} may run and wait at once ([limits] sessions, queue)"
            )

    def retry_after(self) -> int:
        """Return the seconds after which a refused client may try again: longer, the more wait."""
        return max(1, len(self._queue) // max(1, self._max_sessions))

    def admit(self) -> list[tuple[int, int]]:
        """Start the sessions that may run now; return them in order of arrival, each with its
        slot."""
        admitted = []
        for _ in range(self._startable(length for _, length in self._queue)):
            session, length = self._queue.popleft()
            slot = self._populations.index(min(self._populations))
            self._populations[slot] += 1
            self._running[session] = _Admitted(length, slot)
            admitted.append((session, slot))
        return admitted

    def _startable(self, lengths: Iterable[int]) -> int:
        """Return how many of these may start now, in this order."""
        count, used = len(self._running), sum(self._pages(running.length) for running in self._running.values())
        started = 0
        for length in islice(lengths, max(0, self._max_sessions - count)):
            if count + started and used + self._pages(length + HEADROOM) > self._room:
                break
            used += self._pages(length)
            started += 1
        return started

    def grow(self, session: int, length: int) -> None:
        """Note that a running session's history has so many tokens now."""
        if session in self._running:
            self._running[session].length = length

    def rebalance(self, session: int) -> int:
        """Return the slot a running session has from now on: another, if that evens the slots
        out."""
        running = self._running[session]
        least = min(self._populations)
        if self._populations[running.slot] - least >= 2:
            self._populations[running.slot] -= 1
            running.slot = self._populations.index(least)
            self._populations[running.slot] += 1
        return running.slot

    def youngest(self, of: set[int]) -> int | None:
        """Return the one of these running sessions to preempt when their pages run out; None if
        there is at most one, which must fit alone."""
        running = [session for session in self._running if session in of]
        return running[-1] if len(running) > 1 else None

    def preempt(self, session: int) -> None:
        """Put a running session back at the head of the queue."""
        running = self._leave(session)
        self._queue.appendleft((session, running.length))

    def park(self, session: int) -> None:
        """Set a running session aside until `unpark`: it holds nothing, and does not wait for its
        turn either."""
        self._parked[session] = self._leave(session).length

    def unpark(self, session: int) -> None:
        """Put a parked session at the head of the queue."""
        length = self._parked.pop(session, None)
        if length is not None:
            self._queue.appendleft((session, length))

    def remove(self, session: int) -> None:
        """Forget a session that is over, wherever it was."""
        self._parked.pop(session, None)
        if session in self._running:
            self._leave(session)
        else:
            self._queue = deque(waiting for waiting in self._queue if waiting[0] != session)

    def place(self, session: int) -> tuple[int, int] | None:
        """Return how many wait before this session, and how many in all; None if it does not
        wait."""
        ids = [waiting for waiting, _ in self._queue]
        return (ids.index(session), len(ids)) if session in ids else None

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def _leave(self, session: int) -> _Admitted:
        running = self._running.pop(session)
        self._populations[running.slot] -= 1
        return running

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._page_tokens)
