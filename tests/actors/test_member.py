"""Members and their coordinator: joining, beating, being lost, coming back."""

import asyncio
import itertools
import logging
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
import pytest_asyncio
from support.peers import PATIENCE_S, Start, elsewhere, until

from zrt.runtime.actor import member as member_module
from zrt.runtime.actor.actor import Actor
from zrt.runtime.actor.envelope import Answer, Envelope
from zrt.runtime.actor.executor import ComputeExecutor
from zrt.runtime.actor.member import Member
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.control import Control, Done
from zrt.runtime.messages.header import PROTOCOL, Header
from zrt.runtime.messages.members import Beat, GoingDown, LoadProgress, Register, Registered, Shutdown
from zrt.runtime.messages.sessions import Credit
from zrt.runtime.messages.stats import Load


class Coordinator(Actor):
    """The coordinator's side of joining, and a note of what it heard."""

    def __init__(self, listen: str, *, beat_ms: int = 20) -> None:
        super().__init__("coordinator", listen=listen)
        self.registered: list[tuple[str, int, Register]] = []
        self.beats: list[Beat] = []
        self.progress: list[LoadProgress] = []
        self.known: set[int] = set()
        self.refusing = False
        self.silent = False
        self._beat_ms = beat_ms
        self.handle(Register, self._on_register)
        self.handle(Beat, self._on_beat)
        self.handle(LoadProgress, lambda body, envelope: self.progress.append(envelope.body))  # type: ignore[arg-type]

    def _on_register(self, body: Any, envelope: Envelope) -> Answer:
        if self.refusing:
            raise ZrtError("draining", "nobody joins now")
        assert isinstance(envelope.body, Register)
        self.registered.append((envelope.header.sender, envelope.header.incarnation, envelope.body))
        self.known.add(envelope.header.incarnation)
        return Registered(self.incarnation, self._beat_ms)

    async def _on_beat(self, body: Any, envelope: Envelope) -> Control:
        assert isinstance(envelope.body, Beat)
        self.beats.append(envelope.body)
        if self.silent:
            await asyncio.Event().wait()
        if envelope.header.incarnation not in self.known:
            raise ZrtError("unknown_session", "who are you?")
        return Done()


class Worker(Member):
    """A member that notes what happened to it."""

    def __init__(self, join: str) -> None:
        super().__init__("front", "block_server", join=join)
        self.joins: list[bool] = []
        self.losses = 0
        self.sessions = 0
        self.on_registered(self.joins.append)
        self.on_coordinator_lost(self._count)

    def _count(self) -> None:
        self.losses += 1

    def registration(self) -> Register:
        message = super().registration()
        message.device = "cpu"
        return message

    def load(self) -> Load | None:
        return Load(sessions=self.sessions)


@pytest.fixture
def endpoint() -> str:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@pytest_asyncio.fixture
async def pair(start: Start, endpoint: str) -> AsyncIterator[tuple[Coordinator, Worker]]:
    coordinator, worker = Coordinator(endpoint), Worker(endpoint)
    await start(coordinator)
    await start(worker)
    await asyncio.wait_for(worker.registered.wait(), PATIENCE_S)
    yield coordinator, worker


async def test_a_member_registers_and_beats(pair: tuple[Coordinator, Worker]) -> None:
    coordinator, worker = pair
    name, incarnation, register = coordinator.registered[0]
    assert (name, incarnation) == ("front", worker.incarnation)
    expected = Register("block_server", worker.endpoint, os.getpid(), socket.gethostname(), "starting", device="cpu")
    assert register == expected
    assert worker.coordinator == coordinator.address
    worker.state, worker.sessions = "ready", 4
    await until(lambda: len(coordinator.beats) >= 3)
    await until(lambda: coordinator.beats[-1].state == "ready")
    beat = coordinator.beats[-1]
    assert beat.load == Load(sessions=4)
    assert beat.rss_bytes > 2**20
    assert worker.joins == [False]


async def test_a_member_may_come_before_its_coordinator(start: Start, endpoint: str) -> None:
    worker = Worker(endpoint)
    await start(worker)
    assert not worker.tell_coordinator(LoadProgress(1, 0, 1))
    with pytest.raises(ZrtError) as raised:
        await worker.ask_coordinator(Done(), timeout=1)
    assert raised.value.kind == "coordinator_lost"
    coordinator = Coordinator(endpoint)
    await start(coordinator)
    await asyncio.wait_for(worker.registered.wait(), PATIENCE_S)
    assert worker.tell_coordinator(LoadProgress(1, 1, 1))
    await until(lambda: coordinator.progress == [LoadProgress(1, 1, 1)])


def said(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if "nobody" in record.getMessage()]


@pytest.mark.parametrize("stranger", [False, True], ids=["nobody", "a stranger that says nothing"])
async def test_that_nobody_answers_is_said_ever_more_rarely(
    stranger: bool, start: Start, endpoint: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(member_module, "UNANSWERED_S", 0.02)
    worker = Worker(endpoint)
    host, port = endpoint.removeprefix("tcp://").split(":")
    with ExitStack() as there:
        if stranger:
            there.enter_context(socket.create_server((host, int(port))))
        began = time.time()
        await start(worker)
        await until(lambda: len(said(caplog)) >= 4)
    assert {record.getMessage() for record in said(caplog)} == {f"front: nobody answers at {endpoint} yet; retrying"}
    times = [began, *(record.created for record in said(caplog)[:4])]
    pauses = [after - before for before, after in itertools.pairwise(times)]
    assert all(pause >= least - 0.002 for pause, least in zip(pauses, (0.02, 0.04, 0.08, 0.16), strict=True)), pauses
    await start(Coordinator(endpoint))
    await asyncio.wait_for(worker.registered.wait(), PATIENCE_S)


async def test_a_new_coordinator_on_the_same_port_is_joined_anew(
    start: Start, pair: tuple[Coordinator, Worker], endpoint: str
) -> None:
    first, worker = pair
    asking = asyncio.create_task(worker.ask_coordinator(Shutdown(), timeout=PATIENCE_S))
    with pytest.raises(ZrtError):
        await asking
    await first.stop()
    await until(lambda: worker.losses == 1)
    assert not worker.registered.is_set()
    assert not worker.tell_coordinator(LoadProgress(1, 0, 1))
    second = Coordinator(endpoint)
    await start(second)
    await asyncio.wait_for(worker.registered.wait(), PATIENCE_S)
    assert worker.coordinator == second.address
    assert worker.tell_coordinator(LoadProgress(1, 1, 1))
    await until(lambda: len(second.beats) >= 2)
    assert second.counters.stale == 0  # nothing that was meant for the first one reached the second
    assert (worker.joins, worker.losses) == ([False, False], 1)


@pytest.mark.parametrize("in_order", [True, False])
async def test_a_cluster_that_went_down_in_order_is_not_said_to_be_lost(
    in_order: bool, start: Start, pair: tuple[Coordinator, Worker], endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator, worker = pair
    caplog.set_level(logging.INFO)
    if in_order:
        await coordinator.ask(worker.address, GoingDown(0), timeout=PATIENCE_S)
    await coordinator.stop()
    await until(lambda: worker.losses == 1)
    down = (logging.INFO, f"front: the cluster went down; waiting until it is back at {endpoint}")
    lost = (logging.WARNING, "front: lost the coordinator: the connection broke")
    assert [said for _, *said in caplog.record_tuples if "waiting" in said[1] or "lost" in said[1]] == [
        list(down if in_order else lost)
    ]
    second = Coordinator(endpoint)
    await start(second)
    await asyncio.wait_for(worker.registered.wait(), PATIENCE_S)
    await second.stop()
    await until(lambda: worker.losses == 2)
    assert caplog.record_tuples[-1][1:] == lost


async def test_a_coordinator_that_does_not_know_a_member_is_told_again_who_it_is(
    pair: tuple[Coordinator, Worker],
) -> None:
    coordinator, worker = pair
    coordinator.known.clear()
    await until(lambda: len(coordinator.registered) == 2)
    await until(worker.registered.is_set)
    assert (worker.joins, worker.losses) == ([False, True], 1)
    beats = len(coordinator.beats)
    await until(lambda: len(coordinator.beats) > beats + 2)
    assert len(coordinator.registered) == 2


async def test_a_registration_that_is_refused_is_tried_again(start: Start, endpoint: str) -> None:
    coordinator, worker = Coordinator(endpoint), Worker(endpoint)
    coordinator.refusing = True
    await start(coordinator)
    await start(worker)
    await until(lambda: bool(worker._log_limiter._times["registration"]))
    coordinator.refusing = False
    await asyncio.wait_for(worker.registered.wait(), PATIENCE_S)
    assert worker.losses == 0


async def test_a_coordinator_that_leaves_beats_unanswered_is_lost_and_found_again(
    pair: tuple[Coordinator, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_module, "SILENCE_S", 0.1)
    coordinator, worker = pair
    coordinator.silent = True
    await until(lambda: worker.losses == 1)
    coordinator.silent = False
    await until(lambda: len(coordinator.registered) >= 2)
    await until(worker.registered.is_set)
    assert worker.joins[-1] is True


async def test_shutdown_is_answered_and_ends_the_member(start: Start, pair: tuple[Coordinator, Worker]) -> None:
    coordinator, worker = pair
    assert (await coordinator.ask(worker.address, Shutdown(), timeout=PATIENCE_S)).body == Done()
    assert worker.ended.is_set()


@pytest.mark.parametrize("name", ["stranger", "coordinator"])
async def test_a_member_takes_orders_from_its_coordinator_alone(
    start: Start, pair: tuple[Coordinator, Worker], name: str
) -> None:
    """Another process of the coordinator's name is what a coordinator of the past is: not the one
    that knows us."""
    _, worker = pair
    asker = await start(Actor(name))
    with pytest.raises(ZrtError) as raised:
        await asker.ask(worker.address, Shutdown(), timeout=PATIENCE_S)
    assert raised.value.kind == "unauthorized"
    assert worker.counters.stale == 1
    assert not worker.ended.is_set()


async def test_a_new_coordinators_order_may_come_before_its_answer_to_a_registration(
    start: Start, endpoint: str
) -> None:
    coordinator, worker = Coordinator(endpoint), Worker(endpoint)
    await start(worker)
    coordinator.refusing = True
    await start(coordinator)
    order = asyncio.create_task(coordinator.ask(worker.address, Shutdown(), timeout=PATIENCE_S))
    await until(lambda: any(task.get_name() == "handle Shutdown" for task in worker._tasks._tasks))
    assert not worker.ended.is_set()
    coordinator.refusing = False
    assert (await order).body == Done()
    assert worker.ended.is_set()


async def test_orders_are_obeyed_in_the_order_they_came_whenever_the_registration_is_answered(
    start: Start, endpoint: str
) -> None:
    """Some come before it has been read, one at that very moment, and one when it has, but those
    before have not been obeyed yet."""
    coordinator, worker = Coordinator(endpoint), Worker(endpoint)
    obeyed: list[int] = []
    worker.obey(Credit, lambda body, envelope: obeyed.append(envelope.body.upto))  # type: ignore[union-attr]
    coordinator.refusing = True
    await start(coordinator)
    await start(worker)

    def comes(upto: int) -> None:
        header = Header(PROTOCOL, "coordinator", coordinator.incarnation, worker.incarnation)
        worker._dispatcher.dispatch(Envelope(header, Credit(1, 1, upto), b""))

    comes(1)
    comes(2)
    worker.registered.set = lambda: (comes(3), type(worker.registered).set(worker.registered))  # type: ignore[method-assign]
    worker.on_registered(lambda again: comes(4))
    coordinator.refusing = False
    await until(lambda: len(obeyed) == 4)
    comes(5)
    assert obeyed == [1, 2, 3, 4, 5]


async def test_a_member_whose_joining_fails_does_not_live_on_idle(
    start: Start, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(endpoint)

    def fail() -> Register:
        raise ZeroDivisionError

    monkeypatch.setattr(worker, "registration", fail)
    await start(worker)
    await start(Coordinator(endpoint))
    await asyncio.wait_for(worker.ended.wait(), PATIENCE_S)
    assert worker.failed


async def test_beats_go_on_while_the_lane_works(pair: tuple[Coordinator, Worker]) -> None:
    coordinator, _ = pair
    executor = ComputeExecutor("work")
    working = asyncio.create_task(executor.run(time.sleep, 0.5))
    before = len(coordinator.beats)
    await until(lambda: len(coordinator.beats) >= before + 5)
    assert not working.done()
    await working
    executor.close()


async def test_a_member_that_was_held_up_longer_than_the_silence_allowed_has_lost_nothing(
    start: Start, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own lateness is not the coordinator's silence: the answer to its last beat has been
    waiting."""
    monkeypatch.setattr(member_module, "SILENCE_S", 0.2)
    coordinator = Coordinator(endpoint)
    async with elsewhere(coordinator):
        worker = Worker(endpoint)
        await start(worker)
        await until(lambda: len(coordinator.beats) >= 2)
        time.sleep(0.6)  # noqa: ASYNC251
        beats = len(coordinator.beats)
        await until(lambda: len(coordinator.beats) > beats + 2)
        assert worker.losses == 0


async def test_stop_leaves_no_task(
    start: Start, pair: tuple[Coordinator, Worker], caplog: pytest.LogCaptureFixture
) -> None:
    _, worker = pair
    with caplog.at_level(logging.ERROR):
        await worker.stop()
    assert not caplog.records
    assert len(worker._tasks) == 0
    assert not worker.registered.is_set()
