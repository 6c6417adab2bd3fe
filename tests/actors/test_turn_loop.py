"""The turn loop and the owners of its steps."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from zrt.actors.block_server.backend import LocalBackend
from zrt.actors.block_server.step_owner import Turn
from zrt.actors.block_server.step_queue import Waiting
from zrt.actors.block_server.turn_loop import TurnLoop, _passing
from zrt.runtime.compute.turn import Outcome, Passing, TurnResult, Work


class Owner:
    """An owner that keeps what it was given; its turns are handed over to nobody in particular."""

    def __init__(self, *, urgent: bool = False) -> None:
        self.urgent = urgent
        self.given: list[list[tuple[object, int]]] = []
        self.heard = asyncio.Event()
        self.passed = Passing(outlet=None, begun=lambda handed, ran: None)  # type: ignore[arg-type]

    def work(self, engine: object, step: Waiting) -> Work:
        return Work(step.key, step.seq_pos, step.n, step.rows)

    def passing(self, steps: Sequence[Waiting]) -> Passing | None:
        return self.passed

    async def deliver(self, turn: Turn, ran: Sequence[tuple[Waiting, Outcome]]) -> None:
        self.given.append([(step.key, outcome.have) for step, outcome in ran])
        self.heard.set()


class CountingBackend:
    """A backend whose steps all run; each then holds as many tokens as its key says."""

    def __init__(self, device: str = "cpu") -> None:
        self.engine: Any = SimpleNamespace(
            shard=SimpleNamespace(device=SimpleNamespace(type=device)), hands_over=False, expecting=None
        )

    async def turn(self, works: Sequence[Work], threads: int) -> TurnResult:
        return TurnResult([Outcome(work.key) for work in works], None)  # type: ignore[arg-type]


@pytest.fixture
async def loop() -> AsyncIterator[TurnLoop]:
    made = TurnLoop("loop", (1, 1), lives=lambda: True)
    made.take_backend(CountingBackend(), 16)  # type: ignore[arg-type]
    yield made
    made.executor.close()


def step(owner: Owner, key: int) -> Waiting:
    return Waiting(key, 0, 1, [0], 0.0, 0, owner)


async def test_each_owner_gets_what_came_of_its_own_steps(loop: TurnLoop) -> None:
    first, second = Owner(), Owner()
    for owner, key in ((first, 1), (second, 2), (first, 3)):
        loop.add(step(owner, key))
    runs = asyncio.ensure_future(loop.run())
    async with asyncio.timeout(10):
        await asyncio.gather(first.heard.wait(), second.heard.wait())
    runs.cancel()
    assert loop.tally.turns == 1
    assert first.given == [[(1, 1), (3, 3)]]
    assert second.given == [[(2, 2)]]


async def test_what_others_wait_for_goes_out_first(loop: TurnLoop) -> None:
    late, urgent = Owner(), Owner(urgent=True)
    late.given = urgent.given  # one list, in the order in which they are told
    loop.add(step(late, 1))
    loop.add(step(urgent, 2))
    runs = asyncio.ensure_future(loop.run())
    async with asyncio.timeout(10):
        await asyncio.gather(late.heard.wait(), urgent.heard.wait())
    runs.cancel()
    assert urgent.given == [[(2, 2)], [(1, 1)]]


async def test_a_turn_passes_its_results_on_where_one_owner_has_all_its_steps() -> None:
    first, second = Owner(), Owner()
    assert _passing([step(first, 1), step(first, 2)]) is first.passed
    assert _passing([step(first, 1), step(second, 2)]) is None


async def test_an_engine_that_hands_over_is_told_where_its_results_go(loop: TurnLoop) -> None:
    told: list[object] = []

    def turn(works: Sequence[Work], threads: int, passing: Passing | None) -> TurnResult:
        told.append(passing)
        return TurnResult([Outcome(1) for _ in works], None)

    engine = CountingBackend().engine
    engine.hands_over, engine.turn = True, turn
    loop.take_backend(LocalBackend(loop.executor, engine), 16)
    owner = Owner()
    loop.add(step(owner, 1))
    runs = asyncio.ensure_future(loop.run())
    async with asyncio.timeout(10):
        await owner.heard.wait()
    runs.cancel()
    assert told == [owner.passed]
