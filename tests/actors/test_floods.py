"""Who sends more than is read, and who breaks its connection in the middle of it: nobody's process
ends, or grows without bound."""

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import psutil
import pytest
import zmq
from support.peers import PATIENCE_S, raw
from support.zmtp import message, ping, stranger

from zrt.runtime.transport import flood_guard
from zrt.runtime.transport.flood_guard import FloodGuard
from zrt.runtime.transport.sockets import Socket, Sockets, readable

ECHO = """
import asyncio, sys
from zrt.runtime.actor.actor import Actor

async def main():
    actor = Actor("a")
    actor.handle_bare(lambda bare: bare.frame != b"?" or actor.reply_bare(bare, b"!"))
    await actor.start()
    print(actor.endpoint, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await actor.stop()

asyncio.run(main())
"""
"""An actor in a process of its own, since its end is what is feared here. It answers a question
mark."""
FLOOD_S = 15.0
MOST = 700 << 20
"""Bytes of resident memory that a flood of the shortest messages may take: 64 for each that libzmq
holds until the flood is noticed."""
PING_S = 2.0
"""How often libzmq pings."""


@pytest.fixture
def echo() -> Iterator[tuple[str, psutil.Process]]:
    """Where it listens, and its process."""
    process = subprocess.Popen([sys.executable, "-c", ECHO], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip(), psutil.Process(process.pid)
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()


def answers(endpoint: str) -> bool:
    with raw(zmq.DEALER) as asker:
        asker.connect(endpoint)
        asker.send(b"?")
        return asker.recv() == b"!"


def test_a_connection_that_breaks_before_all_of_it_is_read(echo: tuple[str, psutil.Process]) -> None:
    """What is left of it holds a PING, which wants an answer that cannot be given any more."""
    endpoint, _ = echo
    for number in range(60):
        with stranger(endpoint) as connection:
            connection.sendall(message(b"x") * (300 + 7 * number) + ping() + message(b"x") * 10)
    assert answers(endpoint)


def test_a_connection_that_breaks_after_its_routing_id_was_taken_over(echo: tuple[str, psutil.Process]) -> None:
    endpoint, _ = echo
    for _ in range(3):
        with stranger(endpoint, b"me") as before:
            before.sendall(message(b"x"))
            with stranger(endpoint, b"me") as after:
                after.sendall(message(b"?"))
                assert _reads(after, message(b"!"))  # the id is taken over
                before.sendall(message(b"x") * 3)
                time.sleep(0.1)  # what is on its way, and is read by nobody, shows nothing
    time.sleep(PING_S + 0.5)  # the moment that is feared
    assert answers(endpoint)


def _reads(connection: socket.socket, wanted: bytes) -> bool:
    """Whether that comes, among PINGs it may be."""
    got = b""
    while wanted not in got and (more := connection.recv(1024)):
        got += more
    return wanted in got


@pytest.mark.parametrize("size", [0, pytest.param(40, marks=pytest.mark.chaos)])
def test_who_sends_faster_than_is_read_is_cut_off_and_others_are_answered(
    echo: tuple[str, psutil.Process], size: int
) -> None:
    endpoint, process = echo
    block = message(bytes(size)) * (1_000_000 // (size + 2))
    until, most = time.monotonic() + FLOOD_S, 0
    with stranger(endpoint) as flood, ThreadPoolExecutor(1) as beside:
        meanwhile = beside.submit(answers, endpoint)
        try:
            while time.monotonic() < until:
                flood.sendall(block)
                most = max(most, process.memory_info().rss)
            pytest.fail("nobody stopped it")
        except ConnectionError:
            pass
    assert meanwhile.result()
    assert answers(endpoint)
    assert max(most, process.memory_info().rss) < MOST


def test_a_burst_is_no_flood(echo: tuple[str, psutil.Process]) -> None:
    with raw(zmq.DEALER) as sender:
        sender.connect(echo[0])
        for _ in range(10_000):
            sender.send(b"x")
        sender.send(b"?")
        assert sender.recv() == b"!"


def test_a_peer_that_is_stopped_is_lost_to_whoever_sends_to_it() -> None:
    """It answers nothing and takes nothing, while its kernel keeps the connection open."""
    made = Sockets(ping_timeout_ms=600)
    router, endpoint = made.router("tcp://127.0.0.1:0", None, limit=1 << 20)
    with closing(router), stranger(endpoint, b"me") as stopped:
        stopped.sendall(message(b"x"))
        assert router.recv_multipart() == [b"me", b"x"]
        assert _until(lambda: _refused(router, b"me") == zmq.EHOSTUNREACH)


def _refused(router: Socket, peer: bytes) -> int | None:
    """Why one more message cannot be sent."""
    readable(router)  # a connection's end is noted among what arrives
    try:
        router.send_multipart([peer, bytes(1 << 20)], zmq.DONTWAIT)
    except zmq.ZMQError as error:
        return error.errno
    return None


def _until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.002)
    return met


def test_what_waits_is_handed_on_peer_by_peer_and_in_each_ones_order() -> None:
    waiting = FloodGuard()
    for frame in (b"1", b"2", b"3"):
        waiting.push([b"many", frame])
    waiting.push([b"one", b"4"])
    assert [waiting.pop()[1] for _ in range(4)] == [b"1", b"4", b"2", b"3"]
    assert not waiting


@pytest.mark.parametrize("bound", ["MESSAGES", "BYTES"])
def test_when_too_much_waits_the_one_with_most_is_the_flood_until_it_is_over(
    bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flood_guard, bound, 5 if bound == "MESSAGES" else 5 * 12)
    waiting, frame = FloodGuard(), zmq.Frame(bytes(10))
    assert [waiting.push([peer, bytes(10)]) for peer in (b"a", b"b", b"b", b"c", b"b")] == [None] * 5
    assert waiting.push([b"c", bytes(10)]) == b"b"
    assert [waiting.pop()[0] for _ in range(3)] == [b"a", b"c", b"c"]
    assert not waiting
    assert waiting.refuses([b"b", bytes(10)], frame)
    assert not waiting.refuses([b"a", bytes(10)], frame)
    waiting.over()
    assert not waiting.refuses([b"b", bytes(10)], frame)
