"""Connections that end: the death of a peer, its last words, and endpoints that change hands."""

import asyncio
import gc
import os
import signal
import socket
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from typing import Any

import pytest
import zmq
from support.peers import PATIENCE_S, Start, no_descriptors, raw, until

from zrt.runtime.actor.actor import Actor
from zrt.runtime.actor.envelope import Answer, Envelope
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.control import Address, Control, Done
from zrt.runtime.messages.members import Shutdown
from zrt.runtime.messages.sessions import Close, Credit, Opened
from zrt.runtime.transport.link import Link
from zrt.runtime.transport.outbox import Frames
from zrt.runtime.transport.sockets import Sockets


async def _never(body: Any, envelope: Envelope) -> Control:
    await asyncio.Event().wait()
    return Done()


@pytest.fixture
def free_port() -> int:
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


async def test_the_death_of_a_peer_fails_its_questions_and_is_told_once(start: Start) -> None:
    asker, answerer = await start(Actor("a")), await start(Actor("b"))
    answerer.handle(Close, _never)
    address = answerer.address
    deaths: list[Address] = []
    asker.on_peer_death(deaths.append)
    asking = [asyncio.ensure_future(asker.ask(address, Close(1, 2), timeout=PATIENCE_S)) for _ in range(3)]
    await until(lambda: len(asker._pending) == 3)
    await answerer.stop()
    for result in await asyncio.gather(*asking, return_exceptions=True):
        assert isinstance(result, ZrtError)
        assert result.kind == "stage_lost"
    with pytest.raises(ZrtError) as raised:  # a new connection is tried, and refused
        await asker.ask(address, Close(1, 2), timeout=PATIENCE_S)
    assert raised.value.kind == "stage_lost"
    assert deaths == [address]


async def test_a_question_that_failed_is_let_go_of_with_its_error(start: Start) -> None:
    """Without the garbage collector, which may come late."""
    asker, answerer = await start(Actor("a")), await start(Actor("b"))
    answerer.handle(Close, _never)
    gc.disable()
    try:
        try:
            await asker.ask(answerer.address, Close(1, 2), timeout=0.05)
        except ZrtError as error:
            assert error.kind == "deadline"
            left = weakref.ref(error)
        await asyncio.sleep(0)  # the loop has the future whose end woke us until then
        assert left() is None
    finally:
        gc.enable()


async def test_a_peer_that_was_never_there_is_a_death(start: Start, free_port: int) -> None:
    asker = await start(Actor("a"))
    deaths: list[Address] = []
    asker.on_peer_death(deaths.append)
    nobody = Address("nobody", 77, f"tcp://127.0.0.1:{free_port}")
    asker.tell(nobody, Credit(1, 1, 1))
    await until(lambda: bool(deaths))
    assert deaths == [nobody]


async def test_what_a_peer_said_before_it_died_arrives(start: Start) -> None:
    """Replies sent in the same moment as the connection is closed: none may be lost, and none may
    come after the death."""
    asker = await start(Actor("a"))
    for _ in range(10):
        answerer = Actor("b")
        questions: list[Envelope] = []
        all_there = asyncio.Event()

        async def answer_at_once(
            body: Any, envelope: Envelope, questions: list[Envelope] = questions, all_there: asyncio.Event = all_there
        ) -> Control:
            questions.append(envelope)
            if len(questions) == 200:
                all_there.set()
            await all_there.wait()
            return Opened(len(questions))

        answerer.handle(Close, answer_at_once)
        await answerer.start()
        asking = [
            asyncio.ensure_future(asker.ask(answerer.address, Close(1, 2), timeout=PATIENCE_S)) for _ in range(200)
        ]
        await all_there.wait()
        while len(answerer._tasks):  # noqa: ASYNC110  until every reply has been handed to the socket, and not a moment longer
            await asyncio.sleep(0)
        await answerer.stop()
        for reply in await asyncio.gather(*asking):
            assert reply.body == Opened(200)


async def test_a_peer_can_end_right_after_its_reply_to_shutdown(start: Start) -> None:
    asker, answerer = await start(Actor("a")), Actor("b")
    await answerer.start()

    def shutdown(body: Any, envelope: Envelope) -> Answer:
        answerer.ended.set()
        return Done()

    answerer.handle(Shutdown, shutdown)
    asking = asyncio.ensure_future(asker.ask(answerer.address, Shutdown(), timeout=PATIENCE_S))
    await answerer.ended.wait()
    await answerer.stop()
    assert (await asking).body == Done()


async def test_forgetting_a_peer_tells_no_death_and_it_can_be_reached_again(start: Start) -> None:
    asker, answerer = await start(Actor("a")), await start(Actor("b"))
    answerer.handle(Shutdown, lambda body, envelope: Done())
    deaths: list[Address] = []
    asker.on_peer_death(deaths.append)
    for _ in range(3):
        await asker.ask(answerer.address, Shutdown(), timeout=PATIENCE_S)
        asker.forget(answerer.address)
    assert deaths == []


async def test_a_peer_that_lives_on_after_its_connection_broke_is_reached_again(start: Start) -> None:
    asker, answerer = await start(Actor("a")), await start(Actor("b"))
    answerer.handle(Shutdown, lambda body, envelope: Done())
    deaths: list[Address] = []
    asker.on_peer_death(deaths.append)
    for breaks in range(1, 4):
        await asker.ask(answerer.address, Shutdown(), timeout=PATIENCE_S)
        link = asker._link_pool.get(answerer.address)
        link._over()  # as libzmq's report of a broken connection does
        assert len(deaths) == breaks


async def test_an_endpoint_that_changed_hands_belongs_to_the_new_incarnation(start: Start, free_port: int) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port}"
    asker, first = await start(Actor("a")), await start(Actor("first", listen=endpoint))
    deaths: list[Address] = []
    asker.on_peer_death(deaths.append)
    first.handle(Shutdown, lambda body, envelope: Done())
    await asker.ask(first.address, Shutdown(), timeout=PATIENCE_S)
    old = first.address
    await first.stop()
    second = await start(Actor("second", listen=endpoint))
    second.handle(Shutdown, lambda body, envelope: Done())
    reply = await asker.ask(second.address, Shutdown(), timeout=PATIENCE_S)
    assert reply.header.sender == "second"
    with pytest.raises(ZrtError, match="second has its endpoint now") as raised:
        asker.tell(old, Credit(1, 1, 1))
    assert raised.value.kind == "stage_lost"
    assert deaths == [old]


# ---- links by themselves -------------------------------------------------------------------------


class Watched:
    """A link and what it said."""

    def __init__(self, sockets: Sockets, endpoint: str, *, reconnect: bool = False) -> None:
        self._serial = count()
        self.ups = 0
        self.downs = 0
        self.messages: list[list[bytes | memoryview]] = []
        self.link = Link(
            sockets,
            endpoint,
            self,
            limit=2**20,
            reconnect=reconnect,
            lost_kind="coordinator_lost",
        )

    def new_routing_id(self) -> bytes:
        return b"test.%d" % next(self._serial)

    def on_link_message(self, link: Link, frames: Frames) -> None:
        self.messages.append(list(frames))

    def on_link_up(self, link: Link) -> None:
        self.ups += 1

    def on_link_down(self, link: Link) -> None:
        self.downs += 1


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        server.setblocking(False)
        yield server


def _endpoint(server: socket.socket) -> str:
    return f"tcp://127.0.0.1:{server.getsockname()[1]}"


async def test_a_peer_that_does_not_speak_zmtp_is_lost(listener: socket.socket) -> None:
    made = Sockets(connect_ms=500)
    watched = Watched(made, _endpoint(listener))
    connection, _ = await asyncio.get_running_loop().sock_accept(listener)
    with closing(connection):
        connection.send(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        await until(lambda: watched.downs == 1)
    assert (watched.ups, watched.link.closed) == (0, True)
    await made.close()


async def test_a_peer_that_accepts_and_stays_silent_is_lost(listener: socket.socket) -> None:
    made = Sockets(connect_ms=200)
    watched = Watched(made, _endpoint(listener))
    await until(lambda: watched.downs == 1)
    await made.close()


async def test_a_stopped_peer_is_lost() -> None:
    """SIGSTOP: its kernel keeps the connection open, but nothing answers ZMTP's heartbeats."""
    made = Sockets(ping_timeout_ms=600)
    program = (
        "import zmq; s = zmq.Context().socket(zmq.ROUTER);"
        "print(s.bind_to_random_port('tcp://127.0.0.1'), flush=True); s.recv_multipart()"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        port = int(await asyncio.wait_for(process.stdout.readline(), PATIENCE_S))
        watched = Watched(made, f"tcp://127.0.0.1:{port}")
        await until(lambda: watched.ups == 1)
        os.kill(process.pid, signal.SIGSTOP)
        await until(lambda: watched.downs == 1)
    finally:
        process.kill()
        await process.wait()
    await made.close()


async def test_a_reconnecting_link_comes_back_and_sends_nothing_meanwhile() -> None:
    made = Sockets()
    with raw(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        watched = Watched(made, f"tcp://127.0.0.1:{port}", reconnect=True)
        await until(lambda: watched.ups == 1)
        watched.link.send([b"one"])
        assert (await asyncio.to_thread(router.recv_multipart))[1:] == [b"one"]
    await until(lambda: watched.downs >= 1)
    with pytest.raises(ZrtError) as raised:
        watched.link.send([b"lost"])
    assert raised.value.kind == "coordinator_lost"
    with raw(zmq.ROUTER) as router:
        router.bind(f"tcp://127.0.0.1:{port}")
        await until(lambda: watched.ups == 2)
        watched.link.send([b"two"])
        assert (await asyncio.to_thread(router.recv_multipart))[1:] == [b"two"]
    watched.link.close()
    await made.close()


async def test_a_reconnecting_link_outlives_a_time_without_descriptors(caplog: pytest.LogCaptureFixture) -> None:
    made = Sockets()
    with raw(zmq.ROUTER) as router:
        watched = Watched(made, f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}", reconnect=True)
        await until(lambda: watched.ups == 1)
        with no_descriptors() as take:
            watched.link.renew()
            ends = time.monotonic() + 0.5
            while time.monotonic() < ends:
                take()
                await asyncio.sleep(0.005)
            assert watched.ups == 1
            with pytest.raises(ZrtError, match="no socket can be made: Too many open files"):
                Sockets()
        await until(lambda: watched.ups == 2)
        watched.link.close()
    await made.close()
    assert not caplog.records


async def test_a_reconnecting_link_outlives_a_stranger_at_the_endpoint(listener: socket.socket) -> None:
    made = Sockets()
    watched = Watched(made, _endpoint(listener), reconnect=True)
    for _ in range(2):
        connection, _ = await asyncio.wait_for(asyncio.get_running_loop().sock_accept(listener), PATIENCE_S)
        with closing(connection):
            connection.send(b"220 smtp.example ready\r\n")
    port = listener.getsockname()[1]
    listener.close()
    with raw(zmq.ROUTER) as router:
        router.bind(f"tcp://127.0.0.1:{port}")
        await until(lambda: watched.ups == 1)
    watched.link.close()
    await made.close()
