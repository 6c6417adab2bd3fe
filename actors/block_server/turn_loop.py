"""A block server's loop of turns: take what waits, run it as one forward in the executor, hand the
results on."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass

from zrt.actors.block_server.backend import Backend, LocalBackend
from zrt.actors.block_server.prefill_budget import LEAST, LEAST_ON_GPU, Crowd, PrefillBudget
from zrt.actors.block_server.step_queue import StepQueue, Waiting
from zrt.runtime.actor.executor import ComputeExecutor
from zrt.runtime.compute.devices import out_of_memory
from zrt.runtime.compute.engine import Engine, Holding
from zrt.runtime.compute.turn import Outcome, Passing, TurnResult, Work
from zrt.runtime.errors import ZrtError
from zrt.runtime.formatting import counted
from zrt.runtime.messages.stats import KvStats, Load

log = logging.getLogger(__name__)

RECENT = 256  # turns whose times are kept
RECENT_S = 60.0
EXPECTED_S = 0.02
"""The device waits no longer for rows that are expected: they may not come."""
PARKED_S = 0.25
"""After this a step that found no page is tried again, though none came back: whoever makes room
may not have heard of it."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn that ran: its steps, what became of each, and its clock (`started` monotonic
    seconds, `spent_us` in the executor)."""

    engine: Holding
    steps: list[Waiting]
    result: TurnResult
    started: float
    spent_us: int


class TurnLoop:
    """The queue of steps and the executor. `work` says how a waiting step is to be run, `passing`
    where a turn's results go while it runs (None: nowhere), `deliver` gets each turn's results.
    `lives` as the executor's.

    `threads` are those of a turn while one slot is at work, and so one stage at a time, and while
    several are, which keep all stages busy. The engine is the executor's: whatever touches it runs
    there, between turns.
    """

    def __init__(
        self,
        name: str,
        threads: tuple[int, int],
        *,
        lives: Callable[[], bool],
        work: Callable[[Holding, Waiting], Work],
        passing: Callable[[Sequence[Waiting]], Passing | None],
        deliver: Callable[[Turn], Awaitable[None]],
    ) -> None:
        self.tally = Load()
        self.backend: Backend | None = None
        self.executor = ComputeExecutor(name, lives)
        self.running: list[Waiting] = []
        """The steps of the turn that runs now."""
        self._work = work
        self._passing = passing
        self._deliver = deliver
        self._queue = StepQueue()
        self._parked: dict[Hashable, list[Waiting]] = {}
        self._parked_since = 0.0
        self._pace = PrefillBudget(1)
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
        """Serve this one from now on; what waits for another is dropped. `chunk` is the most prompt
        tokens of a turn."""
        self.backend = backend
        self._wake.set()  # it lets go of the one before
        self._queue = StepQueue()
        self._parked.clear()
        on_gpu = backend is not None and backend.engine.shard.device.type == "cuda"
        self._pace = PrefillBudget(chunk, LEAST_ON_GPU if on_gpu else LEAST)

    def add(self, step: Waiting) -> None:
        self._queue.add(step)
        self._wake.set()

    def expect(self, key: Hashable, slot: int) -> None:
        """The session's next step is on its way through the other stages."""
        self._queue.expect(key, slot, time.monotonic())

    def park(self, step: Waiting) -> None:
        """Keep a step that found no KV page, until some come back, or PARKED_S."""
        if not self._parked:
            self._parked_since = time.monotonic()
        self._parked.setdefault(step.key, []).append(step)

    def drop(self, key: Hashable) -> list[Waiting]:
        """Forget the session's steps and return them; they are counted as stale."""
        dropped = self.forget(key)
        self.tally.dropped_stale += len(dropped)
        return dropped

    def forget(self, key: Hashable) -> list[Waiting]:
        """As `drop`, of steps that were begun before anybody could know that they are not wanted:
        uncounted."""
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
        """The counters, with what is the case now."""
        load = self.tally
        load.waiting = len(self._queue) + sum(map(len, self._parked.values()))
        if self.engine is not None:
            stats = self.engine.stats()
            load.kv = KvStats(stats.free, stats.cached, stats.used, stats.total, stats.page_tokens)
        since = time.monotonic() - RECENT_S
        spent = sorted(us for started, us in self._recent if started >= since)
        load.turn_p50_us = spent[len(spent) // 2] if spent else 0
        load.turn_p95_us = spent[len(spent) * 95 // 100] if spent else 0
        return load

    async def run(self) -> None:
        """For as long as the actor lives."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while (backend := self.backend) is not None:
                now = time.monotonic()
                if self._parked and now >= self._parked_since + PARKED_S:
                    self._unpark()
                steps = self._queue.take(self._pace.budget(now), now)
                if not steps:
                    self._wake_at(self._due(), now)
                    break
                await self._turn(backend, steps)

    def _due(self) -> float | None:
        """When a slot has waited long enough for its others, or what is parked for pages."""
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
        works = [self._work(engine, step) for step in steps]
        self.running = steps
        started = time.monotonic()
        handing = backend if isinstance(backend, LocalBackend) and engine.hands_over else None
        try:
            crowded = self._crowd.observe(started, steps[0].slot) > 1
            threads = self._threads[crowded]
            if handing is not None:
                result = await handing.turn(works, threads, self._passing(steps))
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
        self._pace.observe(ended, decodes, prompts, ended - started)
        turn = Turn(engine, steps, result, started, int((ended - started) * 1e6))
        self.tally.turns += 1
        self.tally.steps += len(steps)
        self.tally.tokens += prompts + decodes
        self.tally.busy_us += turn.spent_us
        self._recent.append((started, turn.spent_us))
        if log.isEnabledFor(logging.DEBUG):
            told = {"step": self.tally.turns, "ms": turn.spent_us / 1e3}
            log.debug("a turn of %s, %s", counted(decodes, "decode"), counted(prompts, "prompt token"), extra=told)
        await self._deliver(turn)

    def _expect(self, engine: Engine) -> None:
        if self._expected is not None:
            self._expected.cancel()
            self._expected = None
        if engine.expecting:
            self._expected = asyncio.get_running_loop().call_later(EXPECTED_S, engine.expecting.stop)


def _failed(steps: Sequence[Waiting], error: ZrtError) -> TurnResult:
    return TurnResult([Outcome(0, ZrtError(error.kind, error.message, error.where)) for _ in steps], None)
