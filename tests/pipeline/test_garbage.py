"""A whole cluster under garbage: every kind of message, spoilt, at the coordinator's endpoint and a
block server's mailbox."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from support.clusters import Local, local_cluster, make_server
from support.mutants import CLIENT, CONTROL, OBEYED, Kind, Mutants, Speaker
from support.peers import raw, until

TWO: list[str | None] = ["0-1", "2-3"]
PROMPT = [5, 17, 99, 3]
MAILBOX: tuple[Kind, ...] = ("control", "control", "control", "step", "bare")
FRONT: tuple[Kind, ...] = ("control", "control", "step", "client")


def mutants(speaker: Speaker, kinds: tuple[Kind, ...], count: int) -> Mutants:
    """A source whose first `count` are drawn by hypothesis (so that what raises here, in a reader,
    is shrunk), and kept in `sent`."""
    source = Mutants(random.Random(0), speaker)
    sent: list[list[bytes]] = []

    @settings(deadline=None, derandomize=True, max_examples=count, database=None)
    @given(st.randoms(use_true_random=False))
    def draw(rng: random.Random) -> None:
        source.rng = rng
        sent.append(source.next(kinds).frames)

    draw()
    source.rng = random.Random(len(kinds))
    while len(sent) < 6 * count:
        sent.append(source.next(kinds).frames)
    source.sent = sent  # type: ignore[attr-defined]
    return source


async def pelt(endpoint: str, frames: list[list[bytes]]) -> None:
    """Send all of it over one connection, reading (and forgetting) what comes back."""
    with raw(zmq.DEALER) as socket:
        socket.connect(endpoint)
        for number, one in enumerate(frames):
            socket.send_multipart(one)
            while socket.poll(0):
                socket.recv_multipart()
            if number % 20 == 0:
                await asyncio.sleep(0)


@pytest.mark.parametrize("name", ["coordinator", "\x1b[31mred\n"])
async def test_names_that_would_mislead_are_refused(
    name: str, make_model: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    async with local_cluster(make_model("llama"), [None]) as cluster:
        stranger = make_server(name, cluster.coordinator.endpoint)
        await stranger.start()
        try:
            await until(lambda: f"no process here may be called {name!r}" in caplog.text)
            assert not stranger.registered.is_set()
        finally:
            await stranger.stop()


async def quiet(cluster: Local) -> None:
    await cluster.settled()
    for server in cluster.servers:
        while await server.bare.make_room():
            pass


@pytest.mark.parametrize("forged", [False, True], ids=["a stranger", "in the coordinator's name"])
async def test_a_cluster_under_garbage_goes_on(make_model: Callable[..., Path], forged: bool) -> None:
    """A stranger may know the sessions that live. In the coordinator's name only sessions of its
    own are touched: its valid orders are obeyed."""
    async with local_cluster(make_model("llama"), TWO, limits_lease_s=0.5, kv_bytes="8MiB") as cluster:
        wanted = await cluster.greedy(PROMPT, 30)
        before = psutil.Process().memory_info().rss
        running = [asyncio.ensure_future(cluster.greedy(PROMPT, 200)) for _ in range(0 if forged else 2)]
        await until(lambda: len(cluster.coordinator.generations) == len(running))
        live = [(info.session, epoch) for info in cluster.coordinator.generations.infos() for epoch in (1, 2)]
        speaker = Speaker(sessions=live)
        if forged:
            speaker = Speaker("coordinator", cluster.coordinator.incarnation, orders=False)
        for target in (cluster.servers[0], cluster.servers[1], cluster.coordinator):
            source = mutants(speaker, FRONT if target is cluster.coordinator else MAILBOX, 100)
            assert sum(source.headers.values()) >= 0.3 * sum(source.seen.values())
            await pelt(target.endpoint, source.sent)  # type: ignore[attr-defined]
        assert all(answer[:30] == wanted for answer in await asyncio.gather(*running))
        await quiet(cluster)
        for server in cluster.servers:
            for session in list(server.routed._sessions):
                server.routed._forget(session)
        await cluster.settled()
        assert await cluster.greedy(PROMPT, 30) == wanted
        await cluster.settled()
        for server in cluster.servers:
            await server.turns.executor.run(lambda: None)
            stats = server.load().kv
            assert (len(server.routed), len(server.bare), stats.used) == (0, 0, 0)
            assert stats.free + stats.cached == stats.total
        assert psutil.Process().memory_info().rss - before < 150 << 20


def test_every_type_is_among_the_mutants_and_each_is_whole_at_times() -> None:
    source = Mutants(random.Random(7), Speaker())
    for _ in range(8000):
        source.next(("client", "control", "step", "bare"))
    types = {*CLIENT, *CONTROL, "InferenceRequest", "bare InferenceRequest"}
    assert set(source.seen) == types
    assert {name for name in types if source.whole[name] > 0} == types - OBEYED
