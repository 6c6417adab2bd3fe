"""The scripted client against a live cluster in this process, and against peers that are no
good."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path

import pytest
import pytest_asyncio
import zmq.asyncio
from support.clusters import Local, local_cluster

from zrt.runtime.client import client as client_module
from zrt.runtime.client import connection
from zrt.runtime.client.client import Client
from zrt.runtime.client.stream import Stream
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.client import Accepted, Finished, Ok, Piece, Progress
from zrt.runtime.wire.clients import encode_event

PROMPT = [5, 17, 99]
LONG = 3000
WAIT_S = 30.0


@pytest_asyncio.fixture
async def cluster(make_model: Callable[..., Path]) -> AsyncIterator[Local]:
    """One stage of a model that never ends an answer by itself."""
    folder = make_model("llama", eos_token_id=None, max_position_embeddings=4096)
    async with local_cluster(folder, [None], model_context=4096) as local:
        yield local


def ask(client: Client, tokens: int = LONG) -> Stream:
    return client.generate(token_ids=PROMPT, max_tokens=tokens, temperature=0.0)


async def begin(stream: Stream) -> None:
    while not isinstance(await stream.next_event(), Piece):
        pass


async def until_sessions(client: Client, count: int) -> None:
    async with asyncio.timeout(WAIT_S), aclosing(client.watch()) as watch:
        async for state in watch:
            if len(state.sessions) == count:
                return


async def fault(stream: Stream) -> ZrtError:
    with pytest.raises(ZrtError) as raised:
        async for _ in stream:
            pass
    return raised.value


async def test_events_come_in_the_documented_order(cluster: Local) -> None:
    stream = ask(cluster.client, 5)
    events = [await stream.next_event()]
    while not isinstance(events[-1], Finished):
        events.append(await stream.next_event())
    assert isinstance(events[0], Accepted)
    assert (stream.accepted, events[0].prompt_tokens) == (events[0], len(PROMPT))
    pieces = [event for event in events if isinstance(event, Piece)]
    assert [piece.index for piece in pieces] == [0, 1, 2, 3, 4]
    assert any(isinstance(event, Progress) for event in events)
    assert (stream.finished.reason, stream.finished.completion_tokens) == ("length", 5)
    with pytest.raises(ZrtError, match="the generation is over"):
        await stream.next_event()


async def test_many_generations_share_a_connection(cluster: Local) -> None:
    wanted = await cluster.greedy(PROMPT, 12)
    assert await asyncio.gather(*(cluster.greedy(PROMPT, 12) for _ in range(8))) == [wanted] * 8


async def test_cancel_ends_a_generation_with_what_it_had(cluster: Local) -> None:
    stream = ask(cluster.client)
    tokens = 0
    async for piece in stream:
        tokens += len(piece.token_ids)
        if tokens == 3:
            stream.cancel()
    assert stream.finished.reason == "cancelled"
    assert 3 <= stream.finished.completion_tokens == tokens < LONG


async def test_another_client_cancels_by_session_id(cluster: Local) -> None:
    stream = ask(cluster.client)
    await begin(stream)
    assert stream.accepted is not None
    async with Client(cluster.client.endpoint) as other:
        await other.cancel(stream.accepted.session)
        async for _ in stream:
            pass
        assert stream.finished.reason == "cancelled"
        with pytest.raises(ZrtError) as raised:
            await other.cancel(stream.accepted.session)
    assert raised.value.kind == "unknown_session"


async def test_a_stream_that_is_left_is_cancelled(cluster: Local) -> None:
    async with aclosing(ask(cluster.client)) as stream:
        await begin(stream)
    assert [piece async for piece in stream] == []
    await until_sessions(cluster.client, 0)


async def test_a_client_that_ends_cancels_what_it_left_open(cluster: Local) -> None:
    async with Client(cluster.client.endpoint) as client:
        streams = [ask(client), ask(client)]
        for stream in streams:
            await begin(stream)
    first, second = [await fault(stream) for stream in streams]
    assert first.kind == second.kind == "cancelled"
    assert first is not second  # each is raised anew: a shared one's traceback would name, and keep, all that waited
    await until_sessions(cluster.client, 0)


async def test_an_error_ends_the_stream(cluster: Local) -> None:
    stream = cluster.client.generate(token_ids=[10_000])
    assert (await fault(stream)).kind == "bad_request"
    assert [piece async for piece in stream] == []


async def test_a_watch_tells_every_change_until_it_is_left(cluster: Local) -> None:
    seen = []
    async with asyncio.timeout(WAIT_S), aclosing(cluster.client.watch()) as watch:
        async for state in watch:
            seen.append(len(state.sessions))
            if seen == [0]:
                stream = ask(cluster.client)
                await begin(stream)
            elif seen[-1] == 1:
                await stream.aclose()
            elif 1 in seen:
                break
    assert seen[0] == seen[-1] == 0
    while cluster.coordinator._subscribers:
        await asyncio.wait_for(cluster.client.status(), WAIT_S)


async def test_a_cluster_that_goes_is_noticed(cluster: Local) -> None:
    """Generations that run are told why they end; requests that come later meet a broken
    connection."""

    async def go() -> None:
        await cluster.coordinator.ended.wait()
        await cluster.coordinator.stop()

    async with Client(cluster.client.endpoint) as client:
        stream = ask(client)
        await begin(stream)
        going = asyncio.create_task(go())
        await client.down(timeout=0)
        await going
        error = await fault(stream)
        assert (error.kind, error.message) == ("cancelled", "the cluster was shut down")
        with pytest.raises(ZrtError) as raised:
            await client.status()
        assert raised.value.kind == "coordinator_lost"
        assert (await fault(ask(client))).kind == "coordinator_lost"


async def test_nobody_is_there() -> None:
    with pytest.raises(ZrtError) as raised:
        async with Client("tcp://127.0.0.1:1"):
            pass
    assert raised.value.kind == "coordinator_lost"


async def test_no_endpoint_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ZRT_HOME", str(tmp_path))
    monkeypatch.delenv("ZRT_ENDPOINT", raising=False)
    with pytest.raises(ZrtError, match="no cluster runs here"):
        Client()


async def test_the_environment_names_the_cluster(cluster: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZRT_ENDPOINT", cluster.client.endpoint)
    async with Client() as client:
        assert (await client.status()).ready


async def test_a_cluster_that_says_nothing_counts_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "SILENCE_S", 0.2)
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as silent:
        port = silent.bind_to_random_port("tcp://127.0.0.1")
        async with Client(f"tcp://127.0.0.1:{port}") as client:
            with pytest.raises(ZrtError, match="has been silent"):
                await client.status()
            assert "has been silent" in str(await fault(ask(client)))


async def test_a_cluster_that_does_not_go_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It agrees, and stays."""
    monkeypatch.setattr(client_module, "DOWN_S", 0.2)
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as stubborn:
        port = stubborn.bind_to_random_port("tcp://127.0.0.1")

        async def agree() -> None:
            peer, _ = await stubborn.recv_multipart()
            await stubborn.send_multipart([peer, encode_event(Ok(id="1"))])

        async with Client(f"tcp://127.0.0.1:{port}") as client:
            answer = asyncio.create_task(agree())
            with pytest.raises(ZrtError, match="is still there") as raised:
                await client.down(timeout=0)
            await answer
    assert raised.value.kind == "deadline"
