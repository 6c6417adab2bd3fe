"""100,000 spoilt messages, and connections that are none, against real processes: nobody dies or
grows, and answers stay what they were."""

import asyncio
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, aclosing, closing, suppress
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq
from support.clusters import cluster_file
from support.mutants import CLIENT, CONTROL, OBEYED, Kind, Mutants, Speaker
from support.peers import raw
from support.results import tell
from support.running import Running, running

from zrt.runtime.client.client import Client
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.header import PROTOCOL, Header
from zrt.runtime.messages.members import Register
from zrt.runtime.wire.envelopes import decode, encode

PROMPT = [5, 17, 99, 3]
WARM, MUTANTS = 20_000, 100_000
GROWTH = 40 << 20
"""Bytes of resident memory a process may gain once it is warm: what its allocator has not given
back."""
DESCRIPTORS = 4
SETTLE_S = 60.0
BACK_S = 15.0
"""How long closed connections may stay descriptors."""
HALF = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x00NULL" + bytes(16)
NOISE = [
    b"",
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\xff" * 200,
    HALF,
    b"\xff\0\0\0\0\0\0\0\x01\x7f",  # ZMTP 2 and 3 tell each other apart after this
    b"\x01\0",  # a whole greeting of ZMTP 1
    b"\xff\0\0\0\0\0\0\0\x01\x7f\x01\x05\0\0",  # and of ZMTP 2
    b"\x01\0\x00\xff\x7f\xff\xff\xff\xff\xff\xff\xff",  # ZMTP 1, and a frame of 2^63 bytes
]


@pytest.fixture
def cluster(make_model: Callable[..., Path], tmp_path: Path) -> Iterator[Running]:
    model = make_model("llama", eos_token_id=None, max_position_embeddings=1 << 14)
    conf = tmp_path / "cluster.toml"
    conf.write_text(cluster_file(model, [None, None], model_context=12000, limits_lease_s=1.0, kv_bytes="64MiB"))
    with running(str(conf), home=tmp_path) as up:
        yield up
        assert up.end() == 0


async def answer(endpoint: str, tokens: int = 60) -> list[int]:
    """A greedy one; what strangers left in the queue may be in its way for a while."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        ids: list[int] = []
        try:
            async with Client(endpoint) as client:
                async for piece in client.generate(token_ids=PROMPT, max_tokens=tokens, temperature=0.0):
                    ids += piece.token_ids
            return ids
        except ZrtError as error:
            if error.kind != "overloaded" or time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.5)


async def settled(endpoint: str) -> dict[str, str]:
    """Wait until no session lives: the mailboxes by name."""
    async with asyncio.timeout(SETTLE_S), Client(endpoint) as client, aclosing(client.watch()) as watch:
        async for seen in watch:
            if not seen.sessions:  # its clients are gone: the lease ends them
                break
    assert seen.ready
    return {actor.name: actor.endpoint for actor in seen.actors if actor.name.startswith("stage")}


def sizes(cluster: Running) -> dict[str, tuple[int, int, int]]:
    """Process id, resident bytes and descriptors by name."""
    processes = cluster.children() | {"up": psutil.Process(cluster.process.pid)}
    return {name: (one.pid, one.memory_info().rss, one.num_fds()) for name, one in processes.items()}


async def sizes_within(cluster: Running, before: dict[str, tuple[int, int, int]], growth: int) -> None:
    """Nobody died, nor holds more than that beyond what it held, once what was let go is closed and
    given back."""

    def beyond(after: dict[str, tuple[int, int, int]]) -> list[str]:
        return [
            f"{name}: {(pid, rss, descriptors)} before, {after[name]} now"
            for name, (pid, rss, descriptors) in before.items()
            if after[name][1] - rss >= growth or after[name][2] - descriptors > DESCRIPTORS
        ]

    deadline = time.monotonic() + BACK_S
    while (much := beyond(after := sizes(cluster))) and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.2)
    assert {name: one[0] for name, one in after.items()} == {name: one[0] for name, one in before.items()}
    assert much == []


def incarnation(endpoint: str) -> int:
    """Of whoever is there: it says so in what it answers."""
    with raw(zmq.DEALER) as asker:
        asker.connect(endpoint)
        register = Register("block_server", "tcp://127.0.0.1:1", 1, "here", "blank")
        asker.send_multipart(encode(Header(PROTOCOL, "curious", 5, request=1), register))
        return decode(asker.recv_multipart())[0].incarnation


def throw(endpoint: str, source: Mutants, kinds: tuple[Kind, ...], count: int) -> None:
    """Over a connection for every thousand, reading what comes back."""
    for start in range(0, count, 1000):
        with raw(zmq.DEALER) as dealer:
            dealer.connect(endpoint)
            for _ in range(min(1000, count - start)):
                dealer.send_multipart(source.next(kinds).frames)
                while dealer.poll(0):
                    dealer.recv_multipart()
            until = time.monotonic() + 0.2
            while time.monotonic() < until and dealer.poll(50):
                dealer.recv_multipart()


@pytest.mark.chaos
@pytest.mark.timeout(600)
async def test_a_hundred_thousand_mutants(cluster: Running) -> None:
    servers = await settled(cluster.endpoint)
    wanted = await answer(cluster.endpoint)
    stranger = Speaker()
    forger = Speaker("coordinator", incarnation(cluster.endpoint), orders=False)
    sources = {name: Mutants(random.Random(seed), who) for seed, (name, who) in enumerate(
        [("stranger", stranger), ("forger", forger)]
    )}  # fmt: skip
    victims: Counter[str] = Counter()

    async def victim() -> None:
        """Its id and epochs are told to the stranger: it ends in an error, or with the right
        tokens."""
        ids: list[int] = []
        try:
            async with Client(cluster.endpoint) as client, asyncio.timeout(SETTLE_S):
                stream = client.generate(token_ids=PROMPT, max_tokens=300, temperature=0.0)
                async for piece in stream:
                    ids += piece.token_ids
                    assert stream.accepted is not None
                    session = stream.accepted.session
                    if all(session != known for known, _ in stranger.sessions):
                        stranger.sessions += [(session, epoch) for epoch in (1, 2, 3)]
                        del stranger.sessions[:-12]
            victims[stream.finished.reason] += 1
        except ZrtError as error:
            victims[error.kind] += 1
        assert ids[: len(wanted)] == wanted[: len(ids)]

    async def victims_for_ever() -> None:
        while True:
            await victim()
            await asyncio.sleep(0.05)

    async def attack(count: int) -> None:
        share = count // 5
        for name, source in sources.items():
            for endpoint in servers.values():
                mailbox: tuple[Kind, ...] = ("control", "control", "step", "bare")
                await asyncio.to_thread(throw, endpoint, source, mailbox, share)
            if name == "stranger":
                kinds: tuple[Kind, ...] = ("control", "step", "client")
                await asyncio.to_thread(throw, cluster.endpoint, source, kinds, share)

    await attack(WARM)
    await settled(cluster.endpoint)
    before = sizes(cluster)
    for source in sources.values():
        for count in (source.seen, source.headers, source.whole):
            count.clear()
    running_ = asyncio.ensure_future(victims_for_ever())
    started = time.monotonic()
    await attack(MUTANTS)
    spent = time.monotonic() - started
    assert not running_.done(), running_.exception()
    running_.cancel()
    await settled(cluster.endpoint)
    assert await answer(cluster.endpoint) == wanted
    await settled(cluster.endpoint)
    await sizes_within(cluster, before, GROWTH)
    after = sizes(cluster)
    seen = sum((source.seen for source in sources.values()), Counter())
    headers = sum(sum(source.headers.values()) for source in sources.values())
    whole = sum((source.whole for source in sources.values()), Counter())
    report = {
        "mutants": seen.total(), "seconds": round(spent, 1), "header read": round(headers / seen.total(), 3),
        "whole": round(whole.total() / seen.total(), 3), "victims": dict(victims),
        "rss MiB": {name: [before[name][1] >> 20, after[name][1] >> 20] for name in before if name in after},
        "descriptors": {name: [before[name][2], after[name][2]] for name in before if name in after},
    }  # fmt: skip
    tell(**report)
    assert seen.total() >= MUTANTS
    types = {*CLIENT, *CONTROL, "InferenceRequest", "bare InferenceRequest"}
    assert set(seen) == types
    assert set(+whole) == types - OBEYED
    assert headers >= 0.3 * seen.total()


async def test_connections_that_are_none(cluster: Running) -> None:
    """Made and left, or held open, 240 at a time; then all are let go."""
    servers = await settled(cluster.endpoint)
    wanted = await answer(cluster.endpoint, 20)
    before = sizes(cluster)
    rng = random.Random(5)
    for endpoint in (cluster.endpoint, *servers.values()):
        host, port = endpoint.removeprefix("tcp://").split(":")
        with ExitStack() as held:
            for number in range(240):
                noise = rng.choice([*NOISE, rng.randbytes(rng.randint(1, 300))])
                connection = held.enter_context(closing(socket.create_connection((host, int(port)))))
                with suppress(ConnectionError):
                    connection.sendall(noise)
                if number % 3 == 0:
                    connection.close()
            assert await answer(cluster.endpoint, 20) == wanted
        with raw(zmq.DEALER) as dealer:
            dealer.connect(endpoint)
            limit = 16 << 20 if endpoint == cluster.endpoint else 512 << 20
            dealer.send(bytes(min(limit, 16 << 20) + 1))
            dealer.send_multipart([msgspec.msgpack.encode(None), bytes(17 << 20)])
            with suppress(zmq.Again):
                dealer.setsockopt(zmq.RCVTIMEO, 500)
                dealer.recv_multipart()
    assert await answer(cluster.endpoint, 20) == wanted
    await sizes_within(cluster, before, GROWTH + (17 << 20))
