"""A block server's loop of turns: take what waits, run it as one forward in the executor, hand the
results on."""

import asyncio
import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from zrt.actors.block_server.backend import Backend, LocalBackend
from zrt.actors.block_server.prefill_budget import LEAST_ON_GPU, Crowd, PrefillBudget
from zrt.actors.block_server.step_owner import StepOwner, Turn
from zrt.actors.block_server.step_queue import StepQueue, Waiting
from zrt.runtime.actor.executor import ComputeExecutor
from zrt.runtime.compute.devices import out_of_memory
from zrt.runtime.compute.engine import Engine, Holding
from zrt.runtime.compute.turn import Outcome, Passing, TurnResult
from zrt.runtime.errors import ZrtError
from zrt.runtime.formatting import counted
from zrt.runtime.messages.stats import KvStats, Load

log = logging.getLogger(__name__)

RECENT = 256  # turns whose times are kept
RECENT_S = 60.0
EXPECTED_S = 0.02
"""Seconds that the device waits for rows that are expected: they may not come."""
PARKED_S = 0.25
"""Seconds after which a step that found no page is tried again, though none came back: the process
that makes room may not have heard of the need."""


class TurnLoop:
    """The queue of steps, the executor, and the loop between them. `lives` is the executor's test
    of its device.

    `threads` are those of a turn while one slot is at work, and so one stage at a time, and while
    several are, which keep all stages busy. The engine is the executor's: whatever touches it runs
    there, between turns.
    """

    def __init__(self, name: str, threads: tuple[int, int], *, lives: Callable[[], bool]) -> None:
        self.tally = Load()
        self.backend: Backend | None = None
        self.executor = ComputeExecutor(name, lives)
        self.running: list[Waiting] = []
        """The steps of the turn that runs now."""
        self._queue = StepQueue()
        self._parked: dict[Hashable, list[Waiting]] = {}
        self._parked_since = 0.0
        self._prefill_budget = PrefillBudget(1)
        self._crowd = Crowd()
        self._threads = threads
        self._wake = asyncio.Event()
        self._alarm: asyncio.TimerHandle | None = None
        self._expected: asyncio.TimerHandle | None = None
        self._recent: deque[tuple[float, int]] = deque(maxlen=RECENT)

    @property
    def engine(self) -> Holding | None:
        return self.backend.engine if self.backend is not None else None

    def take_backend(self, backend: Backend | None, chunk: int) -> None:
        """Serve this backend from now on (None: nothing), and drop what waits for another. `chunk`
        is the most prompt tokens of a turn."""
        self.backend = backend
        self._wake.set()  # it lets go of the one before
        self._queue = StepQueue()
        self._parked.clear()
        on_gpu = backend is not None and backend.engine.shard.device.type == "cuda"
        self._prefill_budget = PrefillBudget(chunk, LEAST_ON_GPU, chunk) if on_gpu else PrefillBudget(chunk)

    def add(self, step: Waiting) -> None:
        self._queue.add(step)
        self._wake.set()

    def expect(self, key: Hashable, slot: int) -> None:
        """Let the slot wait for the session's next step: it is on its way through the other
        stages."""
        self._queue.expect(key, slot, time.monotonic())

    def park(self, step: Waiting) -> None:
        """Keep a step that found no KV page, until some come back, or PARKED_S."""
        if not self._parked:
            self._parked_since = time.monotonic()
        self._parked.setdefault(step.key, []).append(step)

    def drop(self, key: Hashable) -> list[Waiting]:
        """Forget the session's steps and return them; count them as stale."""
        dropped = self.forget(key)
        self.tally.dropped_stale += len(dropped)
        return dropped

    def forget(self, key: Hashable) -> list[Waiting]:
        """Forget the session's steps and return them, uncounted: when they were begun, it could not
        be known that they are in vain."""
        self._wake.set()  # others of its slot may have waited for it
        return self._queue.drop(key) + self._parked.pop(key, [])

    async def release(self, key: Hashable, names: Sequence[int] | None = None) -> None:
        """Free the session's KV (pages with names stay as cache); parked steps are tried again with
        what came back."""
        self.drop(key)
        backend = self.backend
        if backend is None:
            return
        await backend.close(key, names)
        self._unpark()
        self._wake.set()

    def _unpark(self) -> None:
        for steps in self._parked.values():
            for step in reversed(steps):
                self._queue.put_back(step)
        self._parked.clear()

    def load(self) -> Load:
        """Return the counters, with what waits and what the KV pool holds now."""
        load = self.tally
        load.waiting = len(self._queue) + sum(map(len, self._parked.values()))
        load.kv = KvStats()
        if self.engine is not None:
            stats = self.engine.stats()
            load.kv = KvStats(stats.free, stats.cached, stats.used, stats.total, stats.page_tokens)
        since = time.monotonic() - RECENT_S
        spent = sorted(us for started, us in self._recent if started >= since)
        load.turn_p50_us = spent[len(spent) // 2] if spent else 0
        load.turn_p95_us = spent[len(spent) * 95 // 100] if spent else 0
        return load

    async def run(self) -> None:
        """Run turns for as long as the actor lives."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while (backend := self.backend) is not None:
                now = time.monotonic()
                if self._parked and now >= self._parked_since + PARKED_S:
                    self._unpark()
                budget = self._prefill_budget.budget(now, several=self._queue.several_prompts)
                steps = self._queue.take(budget, now)
                if not steps:
                    self._wake_at(self._due(), now)
                    break
                await self._turn(backend, steps)

    def _due(self) -> float | None:
        """Return when a slot has waited long enough for its others, or parked steps for pages;
        None: nothing waits."""
        held = self._queue.due()
        if not self._parked:
            return held
        again = self._parked_since + PARKED_S
        return again if held is None else min(held, again)

    def _wake_at(self, due: float | None, now: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = (
            None if due is None else asyncio.get_running_loop().call_later(max(0.0, due - now), self._wake.set)
        )

    async def _turn(self, backend: Backend, steps: list[Waiting]) -> None:
        engine = backend.engine
        works = [step.owner.work(engine, step) for step in steps]
        self.running = steps
        started = time.monotonic()
        handing = backend if isinstance(backend, LocalBackend) and engine.hands_over else None
        try:
            crowded = self._crowd.observe(started, steps[0].slot) > 1
            threads = self._threads[crowded]
            if handing is not None:
                result = await handing.turn(works, threads, _passing(steps))
            else:
                result = await backend.turn(works, threads)
        except ZrtError as error:
            log.warning("a turn of %s failed: %s", counted(len(steps), "step"), str(error))
            result = _failed(steps, error)
        except Exception as error:  # whatever a forward raises, the other sessions go on
            log.exception("a turn of %s failed", counted(len(steps), "step"))
            result = _failed(steps, out_of_memory(error) or ZrtError("internal", f"a turn failed: {error!r}"))
        self.running = []
        if handing is not None:
            self._expect(handing.engine)
        ended = time.monotonic()
        prompts = sum(step.n for step in steps if step.n > 1)
        decodes = sum(1 for step in steps if step.n == 1)
        self._prefill_budget.observe(ended, decodes, prompts, ended - started)
        turn = Turn(engine, steps, result, started, int((ended - started) * 1e6))
        self.tally.turns += 1
        self.tally.steps += len(steps)
        self.tally.tokens += prompts + decodes
        self.tally.busy_us += turn.spent_us
        self._recent.append((started, turn.spent_us))
        if log.isEnabledFor(logging.DEBUG):
            told = {"step": self.tally.turns, "ms": turn.spent_us / 1e3}
            log.debug("a turn of %s, %s", counted(decodes, "decode"), counted(prompts, "prompt token"), extra=told)
        await _deliver(turn)

    def _expect(self, engine: Engine) -> None:
        if self._expected is not None:
            self._expected.cancel()
            self._expected = None
        if engine.expecting:
            self._expected = asyncio.get_running_loop().call_later(EXPECTED_S, engine.expecting.stop)


def _passing(steps: Sequence[Waiting]) -> Passing | None:
    """Return where a turn's results go while it runs: nowhere, unless one owner has all its
    steps."""
    owner = steps[0].owner
    return owner.passing(steps) if all(step.owner is owner for step in steps) else None


async def _deliver(turn: Turn) -> None:
    """Give each owner what came of its steps, first those whose results others wait for."""
    shares: dict[StepOwner[Any], list[tuple[Waiting, Outcome]]] = defaultdict(list)
    for step, outcome in zip(turn.steps, turn.result.outcomes, strict=True):
        shares[step.owner].append((step, outcome))
    for owner, ran in sorted(shares.items(), key=lambda share: not share[0].urgent):
        await owner.deliver(turn, ran)


def _failed(steps: Sequence[Waiting], error: ZrtError) -> TurnResult:
    return TurnResult([Outcome(0, ZrtError(error.kind, error.message, error.where)) for _ in steps], None)
