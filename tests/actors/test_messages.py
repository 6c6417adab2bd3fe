"""Questions and tells between two actors: what comes back, in which order, and what is counted when
nothing can."""

import asyncio
import logging
import os
import threading
import time
from typing import Any

import pytest
from support.peers import PATIENCE_S, Start, arrives, elsewhere, until

from zrt.runtime.actor import pending
from zrt.runtime.actor.actor import Actor
from zrt.runtime.actor.envelope import Answer, Envelope, Handler
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.control import Address, Control, Done, Failed, Fault
from zrt.runtime.messages.header import Step
from zrt.runtime.messages.inference import InferenceRequest
from zrt.runtime.messages.members import ChildDied, Shutdown
from zrt.runtime.messages.sessions import Close, Credit, Opened


async def _later(body: Any, envelope: Envelope) -> Control:
    await asyncio.sleep(0)
    return Opened(5)


def _raise(error: Exception) -> Handler[Any]:
    def handler(body: Any, envelope: Envelope) -> Answer:
        raise error

    return handler


async def _raise_later(body: Any, envelope: Envelope) -> Control:
    await asyncio.sleep(0)
    raise ZrtError("kv_full", "no page left", "there")


async def _never(body: Any, envelope: Envelope) -> Control:
    await asyncio.Event().wait()
    return Done()


@pytest.mark.parametrize(
    ("handler", "reply"),
    [
        (lambda body, envelope: Opened(7), Opened(7)),
        (lambda body, envelope: None, Done()),
        (_later, Opened(5)),
    ],
    ids=["a body", "nothing", "a body, later"],
)
async def test_a_question_gets_what_its_handler_returns(start: Start, handler: Handler[Any], reply: Control) -> None:
    asker, answerer = await start(Actor("a")), await start(Actor("b"))
    answerer.handle(Close, handler)
    envelope = await asker.ask(answerer.address, Close(1, 2), timeout=PATIENCE_S)
    assert (envelope.body, envelope.header.sender, envelope.peer) == (reply, "b", b"")


@pytest.mark.parametrize(
    ("handler", "kind", "text"),
    [
        (_raise(ZrtError("kv_gap", "replay from 3")), "kv_gap", "replay from 3"),
        (_raise_later, "kv_full", "no page left"),
        (_raise(ZeroDivisionError("by zero")), "internal", "ZeroDivisionError"),
        (lambda body, envelope: Failed(Fault("draining", "come later")), "draining", "come later"),
        (
            lambda body, envelope: Failed(Fault("brand_new_kind", "from a later version")),
            "internal",
            "from a later version",
        ),
    ],
    ids=["raises", "raises later", "has a bug", "returns Failed", "a kind nobody knows"],
)
async def test_a_question_that_fails_raises_at_the_asker(
    start: Start, handler: Handler[Any], kind: str, text: str
) -> None:
    asker, answerer = await start(Actor("a")), await start(Actor("b"))
    answerer.handle(Close, handler)
    with pytest.raises(ZrtError, match=text) as raised:
        await asker.ask(answerer.address, Close(1, 2), timeout=PATIENCE_S)
    assert raised.value.kind == kind
    assert raised.value.where in ("b", "there")


async def test_a_question_nobody_handles_is_an_unknown_op(start: Start) -> None:
    asker, answerer = await start(Actor("a")), await start(Actor("b"))
    with pytest.raises(ZrtError, match="Close") as raised:
        await asker.ask(answerer.address, Close(1, 2), timeout=PATIENCE_S)
    assert raised.value.kind == "unknown_op"
    assert answerer.counters.refused == 1


async def test_an_actor_can_ask_itself(start: Start) -> None:
    actor = await start(Actor("a"))
    actor.handle(Close, lambda body, envelope: Opened(1))
    assert (await actor.ask(actor.address, Close(1, 2), timeout=PATIENCE_S)).body == Opened(1)


async def test_a_question_that_is_not_answered_in_time_fails_with_deadline_and_its_late_reply_is_dropped(
    start: Start,
) -> None:
    asker, answerer = await start(Actor("a")), await start(Actor("b"))
    allowed = asyncio.Event()

    async def slow(body: Any, envelope: Envelope) -> Control:
        await allowed.wait()
        return Done()

    answerer.handle(Close, slow)
    with pytest.raises(ZrtError, match="b did not answer Close within") as raised:
        await asker.ask(answerer.address, Close(1, 2), timeout=0.05)
    assert raised.value.kind == "deadline"
    allowed.set()
    await until(lambda: asker.counters.dropped == 1)


@pytest.mark.parametrize("swallowed", [False, True], ids=["told", "its news swallowed by a send"])
async def test_a_reply_that_came_while_the_loop_was_held_up_beats_the_deadline(start: Start, swallowed: bool) -> None:
    asker, answerer = await start(Actor("a")), Actor("b")
    asked = threading.Event()

    def answer(body: Any, envelope: Envelope) -> Done:
        asked.set()
        return Done()

    answerer.handle(Close, answer)
    answerer.handle(Credit, lambda body, envelope: None)
    async with elsewhere(answerer) as address:
        await asker.ask(address, Close(1, 2), timeout=PATIENCE_S)
        asked.clear()
        asking = asyncio.ensure_future(asker.ask(address, Close(1, 2), timeout=0.2))
        await asyncio.sleep(0)
        assert asked.wait(PATIENCE_S)  # holds this loop up, not the answerer's
        time.sleep(0.5)  # noqa: ASYNC251  past the deadline
        if swallowed:
            asker.tell(address, Credit(1, 1, 1))
        assert (await asking).body == Done()


async def test_a_send_that_swallows_the_news_of_a_reply_does_not_swallow_the_reply(start: Start) -> None:
    """libzmq tells of an arrival once, and any call on the socket may take note of it."""
    asker, answerer = await start(Actor("a")), Actor("b")
    allowed = threading.Event()
    allowed.set()

    def answer(body: Any, envelope: Envelope) -> Done:
        allowed.wait(PATIENCE_S)  # holds the answerer's loop up
        return Done()

    answerer.handle(Close, answer)
    answerer.handle(Credit, lambda body, envelope: None)
    async with elsewhere(answerer) as address:
        await asker.ask(address, Close(1, 2), timeout=PATIENCE_S)
        allowed.clear()
        asking = asyncio.ensure_future(asker.ask(address, Close(1, 2), timeout=PATIENCE_S))
        await asyncio.sleep(0)
        arrives(asker._link(address)._mailbox, allowed.set)
        asker.tell(address, Credit(1, 1, 1))
        async with asyncio.timeout(PATIENCE_S / 2):
            assert (await asking).body == Done()


async def test_a_cancelled_question_is_forgotten(start: Start) -> None:
    asker, answerer = await start(Actor("a")), await start(Actor("b"))
    answerer.handle(Close, _never)
    asking = asyncio.ensure_future(asker.ask(answerer.address, Close(1, 2), timeout=PATIENCE_S))
    await until(lambda: len(asker._pending) == 1)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert len(asker._pending) == 0


async def test_open_questions_are_bounded(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending, "MOST", 8)
    asker, answerer = await start(Actor("a")), await start(Actor("b"))
    answerer.handle(Close, _never)
    asking = [asyncio.ensure_future(asker.ask(answerer.address, Close(1, 2), timeout=PATIENCE_S)) for _ in range(8)]
    await until(lambda: len(asker._pending) == 8)
    with pytest.raises(ZrtError, match="8 requests are pending") as raised:
        await asker.ask(answerer.address, Close(1, 2), timeout=PATIENCE_S)
    assert raised.value.kind == "overloaded"
    for task in asking:
        task.cancel()


async def test_tells_arrive_once_and_in_order(start: Start) -> None:
    sender, receiver = await start(Actor("a")), await start(Actor("b"))
    got: list[int] = []
    receiver.handle(Credit, lambda body, envelope: got.append(envelope.body.upto))  # type: ignore[union-attr]
    for number in range(3000):
        sender.tell(receiver.address, Credit(1, 1, number))
    await until(lambda: len(got) >= 3000)
    assert got == list(range(3000))


async def test_a_tell_that_fails_is_counted_and_logged_once_in_a_while_and_not_answered(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    sender, receiver = await start(Actor("a")), await start(Actor("b"))
    receiver.handle(Credit, _raise(ZeroDivisionError("by zero")))
    with caplog.at_level(logging.WARNING):
        for number in range(100):
            sender.tell(receiver.address, Credit(1, 1, number))
        await until(lambda: receiver.counters.failed == 100)
    lines = [record for record in caplog.records if "handling Credit failed" in record.message]
    assert len(lines) == 7  # the 1st, 2nd, 4th … 64th
    assert all(record.exc_info for record in lines)
    assert sender.counters.dropped == 0


async def test_a_message_for_another_incarnation_is_dropped_and_counted(start: Start) -> None:
    sender, receiver = await start(Actor("a")), await start(Actor("b"))
    got: list[Envelope] = []
    receiver.handle(Credit, lambda body, envelope: got.append(envelope))
    sender.tell(Address("b", receiver.incarnation + 1, receiver.endpoint), Credit(1, 1, 1))
    await until(lambda: receiver.counters.stale == 1)
    assert got == []


async def test_incarnation_0_reaches_whoever_is_there(start: Start) -> None:
    asker, answerer = await start(Actor("a")), await start(Actor("b"))
    answerer.handle(Shutdown, lambda body, envelope: Done())
    envelope = await asker.ask(Address("b", 0, answerer.endpoint), Shutdown(), timeout=PATIENCE_S)
    assert envelope.header.incarnation == answerer.incarnation


@pytest.mark.parametrize("rows", [1, 100, 2000], ids=["inline", "a frame of its own", "lent to libzmq"])
async def test_hidden_states_arrive_as_they_were_sent(start: Start, rows: int) -> None:
    sender, receiver = await start(Actor("a")), await start(Actor("b"))
    got: list[Envelope] = []
    receiver.handle(InferenceRequest, lambda body, envelope: got.append(envelope))
    sent = [os.urandom(rows * 96 * 2) for _ in range(20)]
    for number, data in enumerate(sent):
        request = InferenceRequest(number, 0, "hidden_states", [1, rows, 96], memoryview(data))
        sender.tell(receiver.address, request, steps=[Step(number, 1, 0, rows)], dtype="bfloat16")
    await until(lambda: len(got) == 20)
    for number, (envelope, data) in enumerate(zip(got, sent, strict=True)):
        body = envelope.body
        assert isinstance(body, InferenceRequest)
        assert body.session_id == number
        assert bytes(body.data) == data


@pytest.mark.parametrize(
    "reply", [Failed(Fault("internal", "x" * 2000)), ChildDied("x" * 2000, 1, 1, False)], ids=["fault", "body"]
)
async def test_a_reply_that_is_too_large_is_answered_by_the_reason(start: Start, reply: Control) -> None:
    asker, answerer = await start(Actor("a")), await start(Actor("b", limit=1000))
    answerer.handle(Close, lambda body, envelope: reply)
    with pytest.raises(ZrtError, match="the limit is 1000") as raised:
        await asker.ask(answerer.address, Close(1, 2), timeout=PATIENCE_S)
    assert raised.value.kind == "too_large"
