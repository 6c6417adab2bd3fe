"""Clients that go away, or that do not read: their sessions end, memory stays bounded, and nobody
else notices."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq
from support.clusters import local_cluster

TWO: list[str | None] = ["0-1", "2-3"]
PROMPT = [5, 17, 99, 3]


@pytest.fixture
def stranger() -> Iterator[Callable[[str], Any]]:
    """Makes raw DEALERs that read only when told to."""
    context: zmq.Context[Any] = zmq.Context()
    made = []

    def make(endpoint: str) -> Any:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 1)
        socket.setsockopt(zmq.RCVBUF, 4096)
        socket.setsockopt(zmq.RCVTIMEO, 20_000)
        socket.connect(endpoint)
        made.append(socket)
        return socket

    yield make
    for socket in made:
        socket.close()
    context.term()


def generate(request: str) -> bytes:
    asked = {"type": "generate", "id": request, "token_ids": PROMPT, "max_tokens": 240, "ignore_eos": True}
    return msgspec.msgpack.encode(asked)


async def receive(socket: Any) -> dict[str, Any]:
    return msgspec.msgpack.decode(await asyncio.to_thread(socket.recv))


async def test_a_client_that_is_gone_loses_its_sessions_when_its_lease_ends(
    make_model: Callable[..., Path], stranger: Callable[[str], Any]
) -> None:
    """The context is so long that the sessions would run for a while."""
    folder = make_model("llama", max_position_embeddings=4096)
    async with local_cluster(folder, TWO, limits_lease_s=0.5, model_context=4096) as cluster:
        socket = stranger(cluster.coordinator.endpoint)
        for request in ("1", "2"):
            socket.send(
                msgspec.msgpack.encode({"type": "generate", "id": request, "token_ids": PROMPT, "ignore_eos": True})
            )
        assert (await receive(socket))["type"] == "accepted"
        socket.close()
        await cluster.settled()
        assert len(await cluster.greedy(PROMPT, 8)) == 8


async def test_a_client_that_does_not_read_costs_no_memory_and_no_time(
    make_model: Callable[..., Path], stranger: Callable[[str], Any]
) -> None:
    async with local_cluster(make_model("llama"), TWO, limits_lease_s=1.0) as cluster:
        wanted = await cluster.greedy(PROMPT, 60)
        socket = stranger(cluster.coordinator.endpoint)
        before = psutil.Process().memory_info().rss
        status = msgspec.msgpack.encode({"type": "status", "id": "x" * 64})
        for _ in range(30_000):
            socket.send(status)
            if _ % 500 == 0:
                await asyncio.sleep(0)
        socket.send(generate("unread"))
        results = await asyncio.gather(*(cluster.greedy(PROMPT, 60) for _ in range(4)))
        assert results == [wanted] * 4
        await cluster.settled()
        assert psutil.Process().memory_info().rss - before < 100 << 20


async def test_a_slow_client_gets_every_token_once(
    make_model: Callable[..., Path], stranger: Callable[[str], Any]
) -> None:
    """It does not read until the session has come to its end, or to where its credit ends."""
    async with local_cluster(make_model("llama"), TWO) as cluster:
        _, wanted, _ = await cluster.generate(token_ids=PROMPT, max_tokens=240, ignore_eos=True)
        socket = stranger(cluster.coordinator.endpoint)
        socket.send(generate("slow"))
        await cluster.generate(token_ids=PROMPT, max_tokens=240, ignore_eos=True)
        ids: list[int] = []
        while (event := await receive(socket))["type"] != "finished":
            if event["type"] == "piece":
                assert event["index"] == len(ids)
                ids += event["token_ids"]
    assert ids == wanted
