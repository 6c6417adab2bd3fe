"""Where the results of a turn of routed steps go: those that are handed over in memory."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from zrt.actors.block_server.stage_session import StageSession
from zrt.actors.block_server.step_owner import Turn
from zrt.actors.block_server.turn_delivery import RoutedStep, TurnDelivery
from zrt.runtime.compute.turn import Outcome, TurnResult
from zrt.runtime.messages.control import Address
from zrt.runtime.messages.header import HandedOver, Step
from zrt.runtime.messages.stats import Load

FIRST, LAST, OTHER = (Address(name, number, "tcp://x:1") for number, name in enumerate(("first", "last", "other")))
HANDED = HandedOver(1, 2, 3, 4, 64, 0, 1)


class Peers:
    """An actor and its row channels, which keep what goes out."""

    name = "stage"

    def __init__(self) -> None:
        self.sent: list[tuple[Address, list[Step], HandedOver | None]] = []
        self.taken_back: list[HandedOver] = []

    def tell(
        self, address: Address, body: object, *, steps: list[Step], handed: HandedOver | None, **_: object
    ) -> None:
        self.sent.append((address, steps, handed))

    async def room(self, address: Address, timeout: float) -> None:
        pass

    def outlet(self, address: Address) -> object:
        return address.name

    def offer(self, address: Address) -> str:
        return ""

    def take_back(self, handed: HandedOver) -> None:
        self.taken_back.append(handed)


@pytest.fixture
def peers() -> Peers:
    return Peers()


def delivery(peers: Any, sessions: dict[int, StageSession]) -> TurnDelivery:
    loop: Any = SimpleNamespace(tally=Load())
    bare: Any = None
    return TurnDelivery(peers, loop, peers, bare, sessions)


def session(number: int, stage: int = 1, route: tuple[Address, ...] = (FIRST, LAST), most: int = 9) -> StageSession:
    return StageSession(number, 1, 0, stage, list(route), 4, frozenset(), most, most)


def decode(owner: TurnDelivery, of: StageSession) -> RoutedStep:
    received = Step(of.session, of.epoch, 3, 1)
    return RoutedStep(of.session, 3, 1, None, 0.0, 0, owner, of, received)


async def test_the_ring_goes_on_before_its_tokens_are_known(peers: Peers) -> None:
    """Of the sessions whose generation goes on, each with its row."""
    sessions = {1: session(1), 2: session(2, most=5), 3: session(3)}
    owner = delivery(peers, sessions)
    passing = owner.passing([decode(owner, one) for one in sessions.values()])
    assert passing is not None
    assert passing.outlet == "first"
    passing.begun(HANDED, [0, 1, 2])
    await asyncio.sleep(0)
    ((address, steps, handed),) = peers.sent
    assert address == FIRST
    assert [(step.session, step.seq_pos, step.n) for step in steps] == [(1, 4, 1), (3, 4, 1)]
    assert handed is not None
    assert handed.rows == [0, 2]


async def test_results_for_two_processes_are_not_handed_over(peers: Peers) -> None:
    sessions = {1: session(1), 2: session(2, route=(OTHER, LAST))}
    owner = delivery(peers, sessions)
    assert owner.passing([decode(owner, one) for one in sessions.values()]) is None
    replay = session(3, stage=0)
    ending = RoutedStep(3, 0, 3, None, 0.0, 0, owner, replay, Step(3, 1, 0, 3, until=0))
    assert owner.passing([ending]) is None  # it goes no further than here


@pytest.mark.parametrize("known", [True, False])
async def test_hidden_states_in_memory_are_told_of_or_taken_back(peers: Peers, known: bool) -> None:
    of = session(1, stage=0)
    owner = delivery(peers, {1: of} if known else {})
    step = decode(owner, of)
    engine: Any = SimpleNamespace(dtype="bfloat16", spec=SimpleNamespace(hidden_size=8))
    turn = Turn(engine, [step], TurnResult([Outcome(4, first=0)], None, HANDED), 0.0, 1)
    await owner.deliver(turn, [(step, turn.result.outcomes[0])])
    assert [address for address, _, _ in peers.sent] == ([LAST] if known else [])
    assert peers.taken_back == ([] if known else [HANDED])
