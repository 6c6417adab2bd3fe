"""Endpoints: what is bound, what is advertised, and what is refused by name."""

import socket
from collections.abc import AsyncIterator
from contextlib import closing

import pytest
import pytest_asyncio
import zmq

from zrt.runtime.endpoints import split_endpoint
from zrt.runtime.errors import ZrtError
from zrt.runtime.transport.sockets import Sockets


@pytest_asyncio.fixture
async def made() -> AsyncIterator[Sockets]:
    sockets = Sockets()
    yield sockets
    await sockets.close()


@pytest.mark.parametrize(
    ("endpoint", "host", "port"),
    [
        ("tcp://127.0.0.1:7411", "127.0.0.1", 7411),
        ("tcp://127.0.0.1", "127.0.0.1", 0),
        ("tcp://box.example:0", "box.example", 0),
        ("tcp://[::1]:7411", "::1", 7411),
        ("tcp://*:7411", "0.0.0.0", 7411),
        ("tcp://*:*", "0.0.0.0", 0),
        ("tcp://[fe80::1%eth0]:5", "fe80::1%eth0", 5),
        ("TCP://Box.example:", "box.example", 0),
    ],
)
def test_an_endpoint_is_a_host_and_a_port(endpoint: str, host: str, port: int) -> None:
    assert split_endpoint(endpoint) == (host, port)


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "127.0.0.1:7411",
        "ipc:///tmp/x",
        "tcp://",
        "tcp://a:99999",
        "tcp://a:b",
        "tcp://a:1/path",
        "tcp://u@a:1",
        "tcp://[::1",
    ],
)
def test_anything_else_is_refused_by_name(endpoint: str) -> None:
    with pytest.raises(ZrtError) as raised:
        split_endpoint(endpoint)
    assert raised.value.kind == "bad_config"
    assert repr(endpoint) in raised.value.message


@pytest.mark.parametrize(
    ("listen", "advertise", "shown"),
    [
        ("tcp://127.0.0.1:0", None, "tcp://127.0.0.1:{port}"),
        ("tcp://0.0.0.0:0", "tcp://10.1.2.3", "tcp://10.1.2.3:{port}"),
        ("tcp://*:0", "tcp://box.example:0", "tcp://box.example:{port}"),
        ("tcp://127.0.0.1:0", "tcp://[fd00::1]:7000", "tcp://[fd00::1]:7000"),
    ],
)
async def test_others_are_told_a_port_that_is_bound(
    made: Sockets, listen: str, advertise: str | None, shown: str
) -> None:
    router, endpoint = made.router(listen, advertise, limit=1000)
    last = router.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(last, bytes)
    bound = last.rstrip(b"\0").decode().rpartition(":")[2]
    router.close()
    assert bound != "0"
    assert endpoint == shown.format(port=bound)


@pytest.mark.parametrize(
    ("listen", "advertise", "text"),
    [
        ("tcp://0.0.0.0:0", None, "--advertise"),
        ("tcp://127.0.0.1:0", "tcp://0.0.0.0", "names no host"),
        ("tcp://127.0.0.1:0", "box", "'box'"),
        ("tcp://192.0.2.1:0", None, "not an address of this machine"),
        ("tcp://nosuchdevice:0", None, "not an address of this machine"),
    ],
)
async def test_a_place_nobody_could_reach_is_refused(
    made: Sockets, listen: str, advertise: str | None, text: str
) -> None:
    with pytest.raises(ZrtError, match=text) as raised:
        made.router(listen, advertise, limit=1000)
    assert raised.value.kind == "bad_config"


async def test_a_taken_port_is_named_with_the_way_out(made: Sockets) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        endpoint = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ZrtError, match="port 0 picks a free one") as raised:
            made.router(endpoint, None, limit=1000)
    assert raised.value.kind == "bad_config"
    assert endpoint in raised.value.message


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1", "tcp://*:7411", "tcp://0.0.0.0:7411", "nonsense"])
async def test_a_place_to_connect_to_has_a_host_and_a_port(made: Sockets, endpoint: str) -> None:
    with pytest.raises(ZrtError) as raised:
        made.dealer(b"x", endpoint, limit=1000)
    assert raised.value.kind == "bad_config"


async def test_a_socket_left_open_is_reported_rather_than_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zrt.runtime.transport.sockets.CLOSE_S", 0.2)
    sockets = Sockets()
    router, _ = sockets.router("tcp://127.0.0.1:0", None, limit=1000)
    with pytest.raises(ZrtError, match="left open"):
        await sockets.close()
    router.close()
