"""What the coordinator tells those who watch: figures of sessions and processes, what happened,
drains, and the text of a session."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from support.clusters import Local, local_cluster
from support.loads import load

from zrt.runtime.actor.envelope import Envelope
from zrt.runtime.actor.member import Member
from zrt.runtime.client.client import Client
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.client import Finished, Piece
from zrt.runtime.messages.control import Control, Done
from zrt.runtime.messages.members import Kill

PROMPT = [5, 17, 99]
WAIT_S = 30.0


@pytest.fixture(scope="module")
def folder(make_model: Callable[..., Path]) -> Path:
    return make_model("llama")


@pytest.fixture
async def cluster(folder: Path) -> AsyncIterator[Local]:
    async with local_cluster(folder, ["0-1", "2-3"], replicas=2, model_context=512) as made:
        yield made


async def test_a_session_has_its_pace_and_the_time_of_each_hop(cluster: Local) -> None:
    async with load(cluster.client, 1, 400) as made:
        await made.have(30)
        (session,) = (await cluster.client.status()).sessions
        assert session.client.startswith("client.")
        assert session.tokens_s > 0
        assert 0 < len(session.gaps_ms) <= 24
        assert session.ttft_ms > 0
        assert session.kv_pages > 0
        assert [hop.name for hop in session.hops] == session.route
        assert all(hop.compute_ms > 0 for hop in session.hops)


async def test_a_block_server_tells_the_time_of_its_turns(cluster: Local) -> None:
    ids = await cluster.greedy(PROMPT, 30)
    seen = await cluster.until(lambda seen: any(actor.turn_p50_ms > 0 for actor in seen.actors))
    assert all(actor.turn_p50_ms <= actor.turn_p95_ms for actor in seen.actors)
    assert seen.tokens == len(ids)


async def test_a_watch_hears_of_tokens_at_its_own_pace(cluster: Local) -> None:
    async with load(cluster.client, 1, 400), aclosing(cluster.client.watch(every=0.1)) as watch:
        counts = [(await anext(watch)).tokens for _ in range(4)]
    assert counts == sorted(set(counts))


async def test_everything_that_happened_is_told_once_to_a_watch_and_again_to_whoever_asks(cluster: Local) -> None:
    async with asyncio.timeout(WAIT_S), aclosing(cluster.client.watch(every=0.1)) as watch:
        told = [happened.serial for happened in (await anext(watch)).happened]
        with pytest.raises(ZrtError):
            await cluster.client.drain("nobody")
        while not cluster.coordinator.event_log.errors["bad_request"] or told[-1] < cluster.coordinator.event_log.last:
            told += [happened.serial for happened in (await anext(watch)).happened]
    assert told == list(range(1, len(told) + 1))
    seen = await cluster.client.status()
    assert seen.errors == {"bad_request": 1}
    assert [happened.kind for happened in seen.happened][-1] == "refusal"


async def test_a_death_and_the_routes_it_changed_are_told(cluster: Local) -> None:
    async with load(cluster.client, 2, 400):
        (name, *_) = (await cluster.client.status()).sessions[0].route
        await cluster.lose(name)
        seen = await cluster.until(lambda seen: all(name not in one.route for one in seen.sessions))
        kinds = {happened.kind for happened in (await cluster.client.status()).happened if happened.where == name}
        assert seen.sessions
        assert {"state", "death", "reroute"} <= kinds


async def test_a_drain_is_remembered_with_who_asked(cluster: Local) -> None:
    await cluster.client.drain("stage0.0", timeout=9)
    (drain,) = (await cluster.client.status()).drains
    assert (drain.name, drain.state, drain.timeout_ms, drain.left) == ("stage0.0", "drained", 9000, 0)
    assert drain.asker.startswith("client.")


async def test_another_client_follows_a_session_from_its_beginning_to_its_end(cluster: Local) -> None:
    """And a third, which leaves early, changes nothing."""
    async with load(cluster.client, 1, 200) as made, Client(cluster.coordinator.endpoint) as other:
        session = (await other.status()).sessions[0].session
        async with aclosing(other.follow(session)) as left:
            await anext(left)
        ids: list[int] = []
        async with asyncio.timeout(WAIT_S), aclosing(other.follow(session)) as events:
            async for event in events:
                if isinstance(event, Piece):
                    assert event.index == len(ids)
                    ids += event.token_ids
                elif isinstance(event, Finished):
                    break
        assert [ids] == await made.over()


async def test_a_session_that_is_not_there_is_not_followed(cluster: Local) -> None:
    with pytest.raises(ZrtError) as raised:
        await anext(cluster.client.follow(1))
    assert raised.value.kind == "unknown_session"


async def test_a_restart_is_asked_of_the_parent(cluster: Local) -> None:
    with pytest.raises(ZrtError) as raised:
        await cluster.client.restart("stage0.0")
    assert raised.value.kind == "unsupported"
    killed: list[Kill] = []

    def kill(body: Any, envelope: Envelope) -> Control:
        assert isinstance(envelope.body, Kill)
        killed.append(envelope.body)
        return Done()

    parent = Member("up", "supervisor", join=cluster.coordinator.endpoint)
    parent.state = "ready"
    parent.obey(Kill, kill)
    await parent.start()
    try:
        await cluster.until(lambda seen: any(actor.kind == "supervisor" for actor in seen.actors))
        await cluster.client.restart("stage0.0")
        assert killed == [Kill("stage0.0", cluster.server("stage0.0").incarnation)]
        with pytest.raises(ZrtError) as raised:
            await cluster.client.restart("up")
        assert raised.value.kind == "bad_request"
    finally:
        await parent.stop()
