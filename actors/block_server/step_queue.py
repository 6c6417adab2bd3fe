"""The queue of steps that wait at a stage, and the choice of those that make the next turn. Pure:
knows neither sockets nor tensors.

A turn serves one slot: all its decodes (one token each), then prompt chunks until their token
budget is used up, at most one step a session. A longer step is cut: its head runs now, its tail
keeps its place. Steps of one session never overtake each other. What is short, or is left of a long
prompt, goes before longer ones, with half of the budget at most while there are such, and a slot
with long ones alone lets one with a short one go before it, once: neither kind waits for all of the
other.

Where stages share their cores, a slot's sessions go round together: the first stage waits for those
of them that are on their way. In two groups they would compute at the same time on the same cores,
each reading all weights anew.
"""

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from typing import Self

    from zrt.actors.block_server.step_owner import StepOwner


@dataclass(frozen=True, slots=True)
class Waiting:
    """One step that waits: `n` tokens of `key` from `seq_pos` on, in micro-batch `slot`; `rows` is
    their input (a tensor, cut along its first dimension), `arrived` a monotonic time in seconds.

    `owner` says how the step runs, and takes its results. What else the owner knows of its steps is
    in a subclass, and the parts of a cut step share it.
    """

    key: Hashable
    seq_pos: int
    n: int
    rows: Any
    arrived: float
    slot: int
    owner: "StepOwner[Any]"

    @property
    def left(self) -> int:
        """How many tokens its session has yet to run at this stage, these among them, as far as is
        known."""
        return self.n

    def cut(self, n: int) -> tuple["Self", "Self"]:
        """Return the step's first `n` tokens, and the rest, as two steps."""
        head = replace(self, n=n, rows=self.rows[:n])
        tail = replace(self, seq_pos=self.seq_pos + n, n=self.n - n, rows=self.rows[n:])
        return head, tail


SHORT: Final = 128
"""Tokens left of a prompt that counts as short: what a person asks, the end of a long one."""
ROUND_S: Final = 0.05
"""Seconds that a step is taken to be on its way before any has come round."""
OVERDUE: Final = 4.0
"""How many usual rounds a step is waited for: a prompt's chunk may have joined the others."""
MEMORY: Final = 0.2
"""Weight of the newest measurement."""


class StepQueue:
    """The steps that wait: a queue per session, the sessions of each slot in order of arrival.
    Slots take turns. Times are in seconds."""

    def __init__(self) -> None:
        self._slots: dict[int, dict[Hashable, deque[Waiting]]] = {}  # the slot that was served last stands last
        self._away: dict[
            int, dict[Hashable, float]
        ] = {}  # of a slot, sessions whose next step is on its way, and since when
        self._round = ROUND_S
        self._passed: int | None = None  # the slot that another was served before, out of its turn

    def __len__(self) -> int:
        """Return how many steps wait."""
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[Waiting]:
        for sessions in self._slots.values():
            for queue in sessions.values():
                yield from queue

    def expect(self, key: Hashable, slot: int, now: float) -> None:
        """Let the slot wait for this session's next step, which comes round by itself, though not
        much longer than usual."""
        self._away.setdefault(slot, {})[key] = now

    def add(self, step: Waiting) -> None:
        for away in self._away.values():
            since = away.pop(step.key, None)
            if since is not None:
                self._round += MEMORY * (min(step.arrived - since, OVERDUE * self._round) - self._round)
        self._slots.setdefault(step.slot, {}).setdefault(step.key, deque()).append(step)

    def put_back(self, step: Waiting) -> None:
        """Put a step that could not run before its session's others."""
        self._slots.setdefault(step.slot, {}).setdefault(step.key, deque()).appendleft(step)

    def drop(self, key: Hashable) -> list[Waiting]:
        """Forget the waiting steps of a session, and return them."""
        for away in self._away.values():
            away.pop(key, None)
        return [step for sessions in self._slots.values() for step in sessions.pop(key, ())]

    def due(self) -> float | None:
        """Return when the first slot that has steps, and waits for others on their way, waits no
        longer; None: no slot waits."""
        held = [
            max(self._away[slot].values())
            for slot, sessions in self._slots.items()
            if sessions and self._away.get(slot)
        ]
        return min(held) + OVERDUE * self._round if held else None

    def take(self, budget: int, now: float) -> list[Waiting]:
        """Remove and return the next turn: every decode of one slot, and at most `budget` tokens of
        longer steps."""
        slots = [slot for slot in self._slots if self._ready(slot, now)]
        if not slots:
            return []
        first = slots[0]
        if first != self._passed and not any(map(_is_quick, self._fronts(first))):
            slots.sort(key=lambda slot: not any(map(_is_short, self._fronts(slot))))
        self._passed = first if slots[0] != first else None
        sessions = self._slots.pop(slots[0])
        self._away.get(slots[0], {}).clear()
        self._slots[slots[0]] = sessions
        return self._take_from(sessions, budget)

    @property
    def several_prompts(self) -> bool:
        """Whether prompts of more than one session wait."""
        waiting = (slot for slot in self._slots for step in self._fronts(slot) if step.n > 1)
        return len(list(islice(waiting, 2))) > 1

    def _ready(self, slot: int, now: float) -> bool:
        """Return whether a slot has steps, and waits for none that are on their way."""
        if not self._slots[slot]:
            return False
        away = self._away.get(slot, {})
        return not away or now >= max(away.values()) + OVERDUE * self._round

    def _fronts(self, slot: int) -> list[Waiting]:
        """Return each session's first step, in order of arrival."""
        return [queue[0] for queue in self._slots[slot].values()]

    def _take_from(self, sessions: dict[Hashable, deque[Waiting]], budget: int) -> list[Waiting]:
        fronts = [queue[0] for queue in sessions.values()]
        short = [step for step in fronts if _is_short(step)]
        long = [step for step in fronts if step.n > 1 and not _is_short(step)]
        shares = _shares(short, budget - budget // 2 if long else budget)
        begun = len(shares)
        shares += _shares(long, budget - sum(n for _, n in shares))
        shares += _shares(short[begun:], budget - sum(n for _, n in shares))
        whole = [(step, 1) for step in fronts if step.n == 1]
        return [self._part(sessions, step, n) for step, n in (*whole, *shares)]

    def _part(self, sessions: dict[Hashable, deque[Waiting]], step: Waiting, n: int) -> Waiting:
        """Remove and return the first `n` tokens of a session's first step; its others stand behind
        those of other sessions, so that nobody waits for ever."""
        queue = sessions.pop(step.key)
        queue.popleft()
        if n < step.n:
            step, tail = step.cut(n)
            queue.appendleft(tail)
        if queue:
            sessions[step.key] = queue
        return step


def _is_short(step: Waiting) -> bool:
    return step.n > 1 and step.left <= SHORT


def _is_quick(step: Waiting) -> bool:
    return step.n == 1 or _is_short(step)


def _shares(steps: Sequence[Waiting], budget: int) -> list[tuple[Waiting, int]]:
    """Return the steps that begin within a budget of tokens, in order, each with how many tokens of
    it run."""
    shares = []
    for step in steps:
        if budget <= 0:
            break
        n = min(step.n, budget)
        shares.append((step, n))
        budget -= n
    return shares
