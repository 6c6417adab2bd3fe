"""A client whose connection breaks goes on where it was: no token missing, none twice, and the same
text as if nothing had happened."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import zmq.asyncio
from support.clusters import Local, local_cluster
from support.peers import until
from support.proxies import Proxy, proxy

from zrt.runtime.client import connection
from zrt.runtime.client.client import Client
from zrt.runtime.client.stream import Stream
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.client import Finished, Piece

TWO: list[str | None] = ["0-1", "2-3"]
PROMPT = [5, 17, 99]
WAIT_S = 30.0
REQUESTS: dict[str, dict[str, Any]] = {
    "text": {"max_tokens": 120, "temperature": 1.0, "seed": 3, "stop": ["\u00e9\u00e9"]},
    "log-probabilities": {"max_tokens": 60, "temperature": 0.0, "logprobs": 2},
    "three answers": {"max_tokens": 60, "temperature": 1.0, "seed": 3, "n": 3},
}


@pytest_asyncio.fixture
async def cluster(speaking: Callable[..., Path]) -> AsyncIterator[Local]:
    """Two stages of a model that speaks single bytes, so that its text comes in pieces of several
    tokens."""
    async with local_cluster(speaking("byte-level", max_position_embeddings=4096), TWO, model_context=4096) as local:
        yield local


@pytest_asyncio.fixture
async def cut(cluster: Local) -> AsyncIterator[tuple[Proxy, Client]]:
    """A client behind a proxy."""
    async with proxy(cluster.coordinator.endpoint) as network, Client(network.endpoint) as client:
        yield network, client


class Answers:
    """What a stream said, by choice; that pieces follow each other is checked as they come."""

    def __init__(self) -> None:
        self.text: dict[int, str] = {}
        self.ids: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[Any]] = {}
        self.ends: dict[int, tuple[str, int]] = {}

    def take(self, event: object) -> None:
        if isinstance(event, Piece):
            ids = self.ids.setdefault(event.choice, [])
            assert event.index == len(ids)
            ids += event.token_ids
            self.text[event.choice] = self.text.get(event.choice, "") + event.text
            self.logprobs.setdefault(event.choice, []).extend(event.logprobs or [])
        elif isinstance(event, Finished):
            assert event.choice not in self.ends
            self.ends[event.choice] = (event.reason, event.completion_tokens)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Answers) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]


async def answers(stream: Stream, on_piece: Callable[[int], None] = lambda count: None) -> Answers:
    """All of it; `on_piece` hears the number of each piece."""
    got, pieces = Answers(), 0
    async with asyncio.timeout(WAIT_S):
        while not stream.over:
            event = await stream.next_event()
            got.take(event)
            if isinstance(event, Piece):
                pieces += 1
                on_piece(pieces)
    return got


async def begin(stream: Stream, pieces: int = 1) -> None:
    async with asyncio.timeout(WAIT_S):
        while pieces and not stream.over:  # what is told late comes in few
            pieces -= isinstance(await stream.next_event(), Piece)


async def fault(stream: Stream) -> ZrtError:
    """How it ends, whatever has come of it before."""
    with pytest.raises(ZrtError) as raised:
        await begin(stream, sys.maxsize)
    return raised.value


@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)
async def test_a_stream_that_is_cut_again_and_again_is_the_uncut_one(
    request_: dict[str, Any], cluster: Local, cut: tuple[Proxy, Client]
) -> None:
    network, client = cut
    wanted = await answers(cluster.client.generate(token_ids=PROMPT, **request_))

    def break_it(piece: int) -> None:
        if piece % 15 == 5:
            network.cut()
        elif piece % 15 == 10:
            network.cut_after(37 * piece % 211)

    network.cut_after(300)  # on the way to the first piece
    assert await answers(client.generate(token_ids=PROMPT, **request_), break_it) == wanted
    assert network.connections > 3


async def test_what_came_meanwhile_is_told_when_the_network_is_back(cluster: Local, cut: tuple[Proxy, Client]) -> None:
    """While it is away the session uses up its credit and waits."""
    network, client = cut
    request = {"token_ids": PROMPT, "max_tokens": 100, "temperature": 0.0}
    wanted = await answers(cluster.client.generate(**request))
    stream = client.generate(**request)
    got = Answers()
    while not got.ids:
        got.take(await stream.next_event())
    network.shut()
    asking = asyncio.create_task(stream.next_event())
    (live,) = cluster.coordinator.generations._live.values()
    await until(lambda: live.delivery.stalled and len(live.session.tokens) >= live.session.credit)
    (session,) = (await cluster.client.status()).sessions
    assert session.completion_tokens < 60
    await network.open()
    got.take(await asking)
    while not stream.over:
        got.take(await stream.next_event())
    assert got == wanted


async def test_an_answer_that_ended_meanwhile_is_told_to_its_end(cluster: Local, cut: tuple[Proxy, Client]) -> None:
    network, client = cut
    request = {"token_ids": PROMPT, "max_tokens": 12, "temperature": 0.0}
    wanted = await answers(cluster.client.generate(**request))
    stream = client.generate(**request)
    got = Answers()
    got.take(await stream.next_event())
    network.shut()
    await cluster.settled()
    await network.open()
    while not stream.over:
        got.take(await stream.next_event())
    assert got == wanted


async def test_a_request_that_was_never_answered_is_asked_again(cluster: Local, cut: tuple[Proxy, Client]) -> None:
    network, client = cut
    network.cut_after(1)
    got = await answers(client.generate(token_ids=PROMPT, max_tokens=8, temperature=0.0))
    assert got == await answers(cluster.client.generate(token_ids=PROMPT, max_tokens=8, temperature=0.0))


async def test_a_connection_that_is_silent_is_made_anew(
    cluster: Local, cut: tuple[Proxy, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing tells the client that it is dead. Whoever holds the old connection hears that the
    session has left it."""
    monkeypatch.setattr(connection, "STALL_S", 1.2)
    network, client = cut
    stream = client.generate(token_ids=PROMPT, max_tokens=3000, temperature=0.0)
    await begin(stream)
    before = network.connections
    network.hold()
    asking = asyncio.create_task(begin(stream, 400))
    await until(lambda: network.connections > before)
    network.go_on()
    await asking
    await stream.aclose()


async def test_whoever_was_stopped_has_not_waited_meanwhile(
    cluster: Local, cut: tuple[Proxy, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A suspended process finds its deadlines past, and the word that it waits for unread."""
    network, client = cut
    request = {"token_ids": PROMPT, "max_tokens": 60, "temperature": 0.0}
    wanted = await answers(cluster.client.generate(**request))
    stream = client.generate(**request)
    got = Answers()
    while not got.ids:
        got.take(await stream.next_event())
    monkeypatch.setattr(connection, "SILENCE_S", 0.4)
    monkeypatch.setattr(connection, "STALL_S", 0.2)
    stream._events.patience = 0.0
    network.shut()
    asking = asyncio.create_task(stream.next_event())
    await asyncio.sleep(0)
    time.sleep(1.0)  # noqa: ASYNC251  nobody runs meanwhile
    await network.open()
    got.take(await asking)
    while not stream.over:
        got.take(await stream.next_event())
    assert got == wanted


async def test_a_cancel_in_the_dark_is_heard_later(cluster: Local, cut: tuple[Proxy, Client]) -> None:
    network, client = cut
    stream = client.generate(token_ids=PROMPT, max_tokens=3000, temperature=0.0)
    await begin(stream)
    network.shut()
    await until(lambda: not client.connected)
    stream.cancel()
    await network.open()
    async with asyncio.timeout(WAIT_S):
        async for _ in stream:
            pass
    assert stream.finished.reason == "cancelled"


async def test_a_watch_and_a_question_outlive_their_connection(cut: tuple[Proxy, Client]) -> None:
    network, client = cut
    async with asyncio.timeout(WAIT_S), aclosing(client.watch()) as watch:
        assert (await anext(watch)).ready
        network.cut()
        await until(lambda: not client.connected)
        assert (await client.status()).ready
        assert (await anext(watch)).ready


# ---- the lease -----------------------------------------------------------------------------------


async def test_whoever_comes_too_late_hears_that(speaking: Callable[..., Path]) -> None:
    """Its session has ended, and what it held has come back."""
    async with (
        local_cluster(speaking("byte-level"), TWO, limits_lease_s=0.5) as cluster,
        proxy(cluster.coordinator.endpoint) as network,
        Client(network.endpoint) as client,
    ):
        for tokens in (8, 200):
            stream = client.generate(token_ids=PROMPT, max_tokens=tokens, temperature=0.0)
            await begin(stream)
            network.shut()
            await cluster.settled()
            generations = cluster.coordinator.generations
            await until(lambda held=generations: len(held._over) == 0)  # type: ignore[misc]
            await network.open()
            assert (await fault(stream)).kind == "resume_expired"
        assert generations._tending is None


async def test_a_cluster_that_cannot_be_reached_again_is_lost(
    cut: tuple[Proxy, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "SILENCE_S", 0.3)
    network, client = cut
    stream = client.generate(token_ids=PROMPT, max_tokens=200, temperature=0.0)
    await begin(stream)
    stream._events.patience = 0.0
    network.shut()
    error = await fault(stream)
    assert (error.kind, "could not be made again" in error.message) == ("coordinator_lost", True)


# ---- without our client --------------------------------------------------------------------------


class Script:
    """Anything that speaks msgpack over a DEALER."""

    def __init__(self, context: "zmq.asyncio.Context", endpoint: str) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)

    async def say(self, **request: Any) -> None:
        await self._socket.send(msgspec.msgpack.encode(request))

    async def hear(self, *types: str) -> dict[str, Any]:
        """The next event of one of these types."""
        async with asyncio.timeout(WAIT_S):
            while True:
                event: dict[str, Any] = msgspec.msgpack.decode(await self._socket.recv())
                if event["type"] in types:
                    return event

    def close(self) -> None:
        self._socket.close()


@pytest_asyncio.fixture
async def script(cluster: Local) -> AsyncIterator[Callable[[], Script]]:
    with zmq.asyncio.Context() as context:
        made: list[Script] = []

        def make() -> Script:
            made.append(Script(context, cluster.coordinator.endpoint))
            return made[-1]

        yield make
        for one in made:
            one.close()


async def test_a_script_resumes_from_any_token(cluster: Local, script: Callable[[], Script]) -> None:
    """Also after the end, as often as it likes, and from within a piece."""
    wanted = await answers(cluster.client.generate(token_ids=PROMPT, max_tokens=20, temperature=0.0))
    text, ids = wanted.text[0], wanted.ids[0]
    first, second = script(), script()
    await first.say(type="generate", id="a", token_ids=PROMPT, max_tokens=20, temperature=0)
    accepted = await first.hear("accepted")
    await first.hear("finished")
    for index in (0, 7, 19, 20):
        chars = index * len(text) // 20
        name = f"b{index}"
        await second.say(
            type="resume", id=name, session=accepted["session"], resume=accepted["resume"], index=index, chars=chars
        )
        assert await second.hear("accepted") == {**accepted, "id": name}
        event = await second.hear("piece", "finished")
        if index < 20:
            assert (event["index"], event["token_ids"], event["text"]) == (index, ids[index:], text[chars:])
            event = await second.hear("finished")
        assert (event["id"], event["completion_tokens"]) == (name, 20)


async def test_a_live_session_leaves_the_connection_it_was_on(script: Callable[[], Script]) -> None:
    first, second = script(), script()
    await first.say(type="generate", id="a", token_ids=PROMPT, max_tokens=3000, ignore_eos=True)
    accepted = await first.hear("accepted")
    await first.hear("piece")
    await second.say(type="resume", id="b", session=accepted["session"], resume=accepted["resume"])
    assert (await second.hear("piece"))["index"] == 0
    assert (await first.hear("error"))["kind"] == "cancelled"
    await second.say(type="cancel", id="c", request="b")
    assert (await second.hear("finished"))["reason"] == "cancelled"


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"resume": "guess"}, "unauthorized"),
        ({"index": 5000}, "bad_request"),
        ({"chars": 50000}, "bad_request"),
        ({"session": 7}, "resume_expired"),
        ({"session": 7, "resume": "0123456789abcdef.0123"}, "coordinator_lost"),
        ({"resume": 7}, "bad_request"),
    ],
)
async def test_a_stranger_resumes_nothing(change: dict[str, Any], kind: str, script: Callable[[], Script]) -> None:
    """And the client that runs the session notices nothing."""
    owner, stranger = script(), script()
    await owner.say(type="generate", id="a", token_ids=PROMPT, max_tokens=30, ignore_eos=True)
    accepted = await owner.hear("accepted")
    own = {"session": accepted["session"], "resume": accepted["resume"]}
    await stranger.say(type="resume", id="b", **{**own, **change})
    assert (await stranger.hear("accepted", "piece", "error"))["kind"] == kind
    assert (await owner.hear("finished", "error"))["type"] == "finished"
