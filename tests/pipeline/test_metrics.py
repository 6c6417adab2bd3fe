"""The coordinator's HTTP port, with a real cluster behind it."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from support.clusters import Local, local_cluster

from zrt.actors.coordinator import metrics_server
from zrt.actors.coordinator.metrics_server import MetricsServer
from zrt.runtime.errors import ZrtError


class Silent:
    """A cluster without metrics, in good health."""

    async def exposition(self) -> bytes:
        return b""

    def unready(self) -> str:
        return ""


async def ask(port: int, request: bytes) -> tuple[int, str]:
    """Status and body."""
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        answer = (await reader.read()).decode()
        writer.close()
    head, _, body = answer.partition("\r\n\r\n")
    return int(head.split(" ")[1]), body


async def get(cluster: Local, path: str) -> tuple[int, str]:
    assert cluster.coordinator.metrics is not None
    return await ask(cluster.coordinator.metrics.port, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())


async def test_a_cluster_tells_its_metrics_and_its_health(make_model: Callable[..., Path]) -> None:
    """Healthy while every stage has a ready replica: not while the only one of a stage is
    drained."""
    async with local_cluster(
        make_model("llama"), ["0-1", "2-3"], metrics_listen="tcp://127.0.0.1:0", model_context=512
    ) as cluster:
        ids = await cluster.greedy([5, 17, 99], 12)
        status, text = await get(cluster, "/metrics")
        assert status == 200
        assert f"zrt_tokens_total {len(ids)}.0" in text
        assert "zrt_first_token_seconds_count 1.0" in text
        assert f"zrt_inter_token_seconds_count {len(ids) - 1}.0" in text
        assert await get(cluster, "/healthz?x=1") == (200, "ready\n")
        await cluster.client.drain("stage1", timeout=0)
        assert await get(cluster, "/healthz") == (503, "no replica is ready of stage 1 (stage1 is drained)\n")
        assert 'zrt_drains_total{state="drained"} 1.0' in (await get(cluster, "/metrics"))[1]
        await cluster.client.undrain("stage1")
        assert (await get(cluster, "/healthz"))[0] == 200


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /secrets HTTP/1.1\r\n\r\n", 404),
        (b"POST /metrics HTTP/1.1\r\n\r\n", 405),
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", 400),
        (b"GET /metrics SPDY/9\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\n" + b"x: y\r\n" * 20_000, 400),
    ],
)
async def test_a_stranger_gets_a_short_answer(request_: bytes, status: int) -> None:
    server = MetricsServer("tcp://127.0.0.1:0", Silent())
    await server.start()
    try:
        assert (await ask(server.port, request_))[0] == status
    finally:
        server.close()


async def test_one_who_says_nothing_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "REQUEST_S", 0.1)
    server = MetricsServer("tcp://127.0.0.1:0", Silent())
    await server.start()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        async with asyncio.timeout(5):
            assert await reader.read() == b""
        writer.close()
        with pytest.raises(ZrtError, match="cannot be had") as raised:
            await MetricsServer(f"tcp://127.0.0.1:{server.port}", Silent()).start()
        assert raised.value.kind == "bad_config"
    finally:
        server.close()
