"""What waits at a stage, and which of it makes the next turn. Pure: knows neither sockets nor tensors.

A turn takes at most one step a session: decodes (one token) first, then prompt chunks, until the token budget is used up.
A longer step is cut: its head runs now, its tail keeps its place. Steps of one session never overtake each other.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Waiting:
    """One step that waits: `n` tokens of `key` from `seq_pos` on; `rows` is their input (a tensor, cut along
    its first dimension), `arrived` a monotonic time in seconds.

    `origin` is the caller's own note of where the step came from and where its result goes; a cut step's parts share it.
    """

    key: Hashable
    seq_pos: int
    n: int
    rows: Any
    arrived: float
    origin: Any = None

    def cut(self, n: int) -> tuple["Waiting", "Waiting"]:
        """The first `n` tokens, and the rest."""
        head = replace(self, n=n, rows=self.rows[:n])
        tail = replace(self, seq_pos=self.seq_pos + n, n=self.n - n, rows=self.rows[n:])
        return head, tail


class TurnQueue:
    """The steps that wait, in order of arrival, a queue a session."""

    def __init__(self) -> None:
        self._queues: dict[Hashable, deque[Waiting]] = {}

    def __len__(self) -> int:
        """Steps waiting."""
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Waiting]:
        for queue in self._queues.values():
            yield from queue

    def add(self, step: Waiting) -> None:
        self._queues.setdefault(step.key, deque()).append(step)

    def drop(self, key: Hashable, unless: Callable[[Waiting], bool] = lambda _: False) -> int:
        """Forget the waiting steps of a session, except those that `unless` keeps; how many went."""
        queue = self._queues.pop(key, deque())
        kept = deque(step for step in queue if unless(step))
        if kept:
            self._queues[key] = kept
        return len(queue) - len(kept)

    def take(self, budget: int) -> list[Waiting]:
        """Remove and return the next turn: at most `budget` tokens (at least 1), one step a session."""
        fronts = [queue[0] for queue in self._queues.values()]
        fronts.sort(key=lambda step: step.n > 1)  # stable: decodes first, each kind in order of arrival
        turn: list[Waiting] = []
        for step in fronts:
            if budget == 0:
                break
            queue = self._queues.pop(step.key)
            queue.popleft()
            if step.n > budget:
                step, tail = step.cut(budget)
                queue.appendleft(tail)
            if queue:
                self._queues[step.key] = queue  # behind the others: nobody waits for ever
            turn.append(step)
            budget -= step.n
        return turn
