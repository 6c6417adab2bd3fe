"""Start and stop: what an actor owns while it lives, and that nothing of it is left."""

import asyncio
import gc
import logging
import os
import threading
import time
import warnings
from collections.abc import Awaitable
from typing import Any

import pytest
from support.peers import PATIENCE_S, Start, until

from zrt.runtime.actor import tasks
from zrt.runtime.actor.actor import Actor
from zrt.runtime.actor.envelope import Answer, Envelope, Handler
from zrt.runtime.actor.timers import Lateness, Periodic
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.control import Control, Done
from zrt.runtime.messages.members import Shutdown
from zrt.runtime.messages.sessions import Close, Credit


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_fifty_lives_leave_no_descriptor_task_or_thread() -> None:
    async def live_once() -> None:
        left, right = Actor("a"), Actor("b")
        right.handle(Shutdown, lambda body, envelope: Done())
        await left.start()
        await right.start()
        left.every(60, lambda: None)
        left.spawn(asyncio.Event().wait(), "forever")
        await left.ask(right.address, Shutdown(), timeout=PATIENCE_S)
        await left.stop()
        await right.stop()

    await live_once()
    gc.collect()
    before = _descriptors(), len(asyncio.all_tasks()), threading.active_count()
    for _ in range(50):
        await live_once()
    # libzmq's reaper closes its last descriptors a moment after the context says it has ended.
    await until(lambda: (_descriptors(), len(asyncio.all_tasks()), threading.active_count()) <= before)


async def test_stop_cancels_and_awaits_what_the_actor_owns(start: Start) -> None:
    actor = await start(Actor("a"))
    steps: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            steps.append("cleaned up")

    task = actor.spawn(work(), "work")
    await asyncio.sleep(0)
    await actor.stop()
    assert task.cancelled()
    assert steps == ["cleaned up"]


async def test_stop_fails_open_questions_as_cancelled(start: Start) -> None:
    asker, answerer = await start(Actor("a")), await start(Actor("b"))

    async def never(body: Any, envelope: Envelope) -> Control:
        await asyncio.Event().wait()
        return Done()

    answerer.handle(Close, never)
    asking = asyncio.create_task(asker.ask(answerer.address, Close(1, 2), timeout=PATIENCE_S))
    await until(lambda: len(asker._pending) == 1)
    await asker.stop()
    with pytest.raises(ZrtError) as raised:
        await asking
    assert raised.value.kind == "cancelled"


async def _answer(body: Any, envelope: Envelope) -> Control:
    return Done()


@pytest.mark.parametrize(
    "handler", [_answer, lambda body, envelope: _answer(body, envelope)], ids=["a coroutine", "hands one on"]
)
@pytest.mark.parametrize("when", ["it stops as it hears", "it has too much to do"])
async def test_a_handler_that_is_never_begun_leaves_nothing_behind(
    start: Start, handler: Handler[Any], when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left behind is told by the interpreter as it collects it, and fails the test."""
    asker, actor = await start(Actor("a")), await start(Actor("b"))
    came, stops = asyncio.Event(), []

    def hand_on(body: Any, envelope: Envelope) -> Answer | Awaitable[Answer]:
        answer = handler(body, envelope)
        if when == "it stops as it hears":
            stops.append(actor.spawn(actor.stop(), "stop"))  # begun before the handler's task, which it cancels
        came.set()
        return answer

    actor.handle(Close, hand_on)
    if when == "it has too much to do":
        monkeypatch.setattr(tasks, "MOST", 0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        asker.tell(actor.address, Close(1, 2))
        async with asyncio.timeout(PATIENCE_S):
            await came.wait()
            await asyncio.gather(*stops)
        gc.collect()
    assert [str(each.message) for each in told if each.category is RuntimeWarning] == []


async def test_a_handler_can_stop_its_own_actor(start: Start) -> None:
    asker, actor = await start(Actor("a")), await start(Actor("b"))

    async def stop(body: Any, envelope: Envelope) -> Control:
        await actor.stop()
        return Done()

    actor.handle(Shutdown, stop)
    with pytest.raises(ZrtError) as raised:
        await asker.ask(actor.address, Shutdown(), timeout=PATIENCE_S)
    assert raised.value.kind == "stage_lost"


async def test_a_stopped_actor_refuses_work_by_name(start: Start) -> None:
    actor, other = await start(Actor("a")), await start(Actor("b"))
    await actor.stop()
    await actor.stop()  # once is enough, twice does no harm
    with pytest.raises(ZrtError) as told:
        actor.tell(other.address, Credit(1, 1, 1))
    with pytest.raises(ZrtError) as spawned:
        actor.spawn(asyncio.sleep(0), "late")
    assert (told.value.kind, spawned.value.kind) == ("cancelled", "cancelled")


async def test_an_actor_started_again_is_a_new_incarnation(start: Start) -> None:
    asker, actor = await start(Actor("a")), await start(Actor("b"))
    actor.handle(Shutdown, lambda body, envelope: Done())
    first = actor.address
    await actor.stop()
    await actor.start()
    assert 0 < actor.incarnation < 2**63
    assert actor.incarnation != first.incarnation
    assert (await asker.ask(actor.address, Shutdown(), timeout=PATIENCE_S)).body == Done()


async def test_starting_twice_is_an_error(start: Start) -> None:
    actor = await start(Actor("a"))
    with pytest.raises(ZrtError) as raised:
        await actor.start()
    assert raised.value.kind == "internal"


async def test_a_start_on_a_taken_port_leaves_nothing(start: Start) -> None:
    first = await start(Actor("a"))
    before = _descriptors()
    second = Actor("b", listen=first.endpoint)
    with pytest.raises(ZrtError, match="is taken by another process") as raised:
        await second.start()
    assert raised.value.kind == "bad_config"
    await until(lambda: _descriptors() <= before)
    await first.stop()
    await second.start()
    await second.stop()


@pytest.mark.parametrize("name", ["", "x" * 65, "é" * 33])
def test_a_name_has_1_to_64_bytes(name: str) -> None:
    with pytest.raises(ZrtError, match="1 to 64") as raised:
        Actor(name)
    assert raised.value.kind == "bad_config"


async def test_an_owned_task_that_fails_is_logged_by_name(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    actor = await start(Actor("a"))

    async def fail() -> None:
        raise ZeroDivisionError

    with caplog.at_level(logging.ERROR):
        task = actor.spawn(fail(), "sums")
        await asyncio.wait([task])
        await asyncio.sleep(0)
    assert "task sums failed" in caplog.text


async def test_something_periodic_goes_on_after_it_failed(start: Start) -> None:
    actor = await start(Actor("a"))
    times = 0

    def tick() -> None:
        nonlocal times
        times += 1
        if times == 1:
            raise ZeroDivisionError

    periodic = actor.every(0.005, tick)
    await until(lambda: times >= 3)
    periodic.cancel()
    seen, others = times, []
    actor.every(0.005, lambda: others.append(times))
    await until(lambda: len(others) == 5)
    assert times == seen


async def test_a_loop_that_was_held_up_knows_by_how_much(start: Start) -> None:
    actor = await start(Actor("a"))
    calls = 0

    def tick() -> None:
        nonlocal calls
        calls += 1

    actor.every(0.05, tick)
    time.sleep(0.4)  # noqa: ASYNC251
    await until(lambda: calls >= 1)
    assert actor.lag_ms >= 300
    assert calls == 1  # what was missed is not made up for


async def test_lateness_is_the_worst_of_the_last_one_to_two_windows() -> None:
    lateness = Lateness(window_s=0.1)
    lateness.note(0.5)
    lateness.note(0.2)
    assert lateness.seconds == 0.5
    await until(lambda: lateness.seconds == 0.0)
    await asyncio.sleep(0.3)
    lateness.note(0.1)
    assert lateness.seconds == 0.1


async def test_a_periodic_keeps_its_pace() -> None:
    """Each call is due a period after the last one was due, not after it ran, so that lateness does
    not add up."""
    times: list[float] = []
    started = time.monotonic()
    periodic = Periodic(0.02, lambda: times.append(time.monotonic()), Lateness())
    await until(lambda: len(times) >= 25)
    periodic.cancel()
    assert min(moment - started - 0.02 * (index + 1) for index, moment in enumerate(times)) > -0.005
