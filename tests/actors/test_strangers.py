"""Bare peers, and peers that send what no actor would: each gets an answer or nothing, and the
actor goes on."""

import asyncio
import logging
import socket
from contextlib import closing

import msgspec
import pytest
import zmq
from support.peers import PATIENCE_S, Start, arrives, raw, until

from zrt.runtime.actor.actor import Actor
from zrt.runtime.actor.envelope import Bare
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.control import Address, Done, Failed
from zrt.runtime.messages.header import PROTOCOL, Header
from zrt.runtime.messages.members import Shutdown
from zrt.runtime.messages.sessions import Close
from zrt.runtime.wire.envelopes import decode, encode


async def _echo(start: Start, **options: int) -> Actor:
    actor = await start(Actor("a", **options))  # type: ignore[arg-type]

    def exclaim(bare: Bare) -> None:
        assert actor.reply_bare(bare, bytes(bare.frame) + b"!")

    actor.handle_bare(exclaim)
    actor.handle(Shutdown, lambda body, envelope: Done())
    return actor


async def _still_serves(actor: Actor) -> bool:
    with raw(zmq.DEALER) as client:
        client.connect(actor.endpoint)
        client.send(b"there")
        return await asyncio.to_thread(client.recv) == b"there!"


@pytest.mark.parametrize("size", [0, 5, 100_000])
async def test_a_single_frame_gets_single_frame_replies(start: Start, size: int) -> None:
    actor = await _echo(start)
    with raw(zmq.DEALER) as client:
        client.connect(actor.endpoint)
        client.send(bytes(size))
        assert await asyncio.to_thread(client.recv_multipart) == [bytes(size) + b"!"]


async def test_the_empty_frame_of_a_req_socket_is_echoed(start: Start) -> None:
    actor = await _echo(start)
    with raw(zmq.REQ) as client:
        client.connect(actor.endpoint)
        for _ in range(3):
            client.send(b"hello")
            assert await asyncio.to_thread(client.recv) == b"hello!"


async def test_a_bare_handler_that_fails_is_counted_and_nothing_else_happens(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    actor = await start(Actor("a"))

    def fail(bare: Bare) -> None:
        raise ZeroDivisionError

    actor.handle_bare(fail)
    with raw(zmq.DEALER) as client, caplog.at_level(logging.WARNING):
        client.connect(actor.endpoint)
        for _ in range(16):
            client.send(b"x")
        await until(lambda: actor.counters.failed == 16)
    assert len(caplog.records) == 5


async def test_an_actor_without_a_bare_handler_counts_bare_messages(start: Start) -> None:
    actor = await start(Actor("a"))
    with raw(zmq.DEALER) as client:
        client.connect(actor.endpoint)
        client.send(b"x")
        await until(lambda: actor.counters.refused == 1)


def _header(**fields: object) -> Header:
    header = Header(PROTOCOL, "stranger", 9)
    for name, value in fields.items():
        setattr(header, name, value)
    return header


def _pack(header: Header) -> bytes:
    return msgspec.msgpack.encode(header)


@pytest.mark.parametrize(
    ("frames", "request_id", "kind"),
    [
        ([b"\xff\xff", b"\xff"], 0, "bad_request"),
        ([_pack(_header(request=4, body="control")), b"\xc1"], 4, "bad_request"),
        ([_pack(_header(request=4, body="control")), b"\x81\xa4type\xa4nope"], 4, "unknown_op"),
        ([_pack(_header(request=4, body="nope")), b"\x80"], 4, "unknown_op"),
        ([_pack(_header(request=4, version=99, body="control")), b"\x80"], 4, "bad_request"),
        ([_pack(_header(request=4, body="control")), b"\x80", b"", b"", b""], 4, "bad_request"),
        ([b"", b"", b""], 0, "bad_request"),
    ],
)
async def test_what_does_not_decode_gets_a_typed_error(
    start: Start, frames: list[bytes], request_id: int, kind: str
) -> None:
    actor = await _echo(start)
    with raw(zmq.DEALER) as client:
        client.connect(actor.endpoint)
        client.send_multipart(frames)
        header, body = decode(await asyncio.to_thread(client.recv_multipart))
    assert isinstance(body, Failed)
    assert (header.request, header.reply, body.fault.kind, body.fault.where) == (request_id, True, kind, "a")
    assert actor.counters.undecodable == 1
    assert await _still_serves(actor)


@pytest.mark.parametrize(
    "frames",
    [
        [_pack(_header(reply=True, request=3, body="control")), b"\xc1"],
        encode(_header(reply=True, request=3), Done()),
        encode(_header(to=12345, request=3), Shutdown()),
        [_pack(_header(to=12345, request=3, body="control")), b"\xc1"],
    ],
    ids=["undecodable reply", "reply to nothing", "stale", "stale and undecodable"],
)
async def test_an_error_is_never_answered_and_neither_is_what_was_meant_for_another(
    start: Start, frames: list[bytes]
) -> None:
    actor = await _echo(start)
    with raw(zmq.DEALER) as client:
        client.connect(actor.endpoint)
        client.send_multipart(frames)
        client.send(b"next")
        assert await asyncio.to_thread(client.recv_multipart) == [b"next!"]
    counters = actor.counters
    assert counters.undecodable + counters.dropped + counters.stale == 1


async def test_a_reply_that_does_not_decode_fails_its_question(start: Start) -> None:
    asker = await start(Actor("a"))
    with raw(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        asking = asyncio.create_task(
            asker.ask(Address("b", 0, f"tcp://127.0.0.1:{port}"), Close(1, 2), timeout=PATIENCE_S)
        )
        peer = (await asyncio.to_thread(router.recv_multipart))[0]
        router.send_multipart([peer, _pack(_header(reply=True, request=1, body="control")), b"\xc1"])
        with pytest.raises(ZrtError, match="the reply does not decode") as raised:
            await asking
    assert raised.value.kind == "bad_request"


async def test_a_peer_of_ours_that_answers_with_garbage_is_counted_and_the_question_ends_in_time(start: Start) -> None:
    asker = await start(Actor("a"))
    with raw(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        asking = asyncio.create_task(asker.ask(Address("b", 0, f"tcp://127.0.0.1:{port}"), Close(1, 2), timeout=0.5))
        peer = (await asyncio.to_thread(router.recv_multipart))[0]
        for garbage in ([b""], [b"\xc1", b"x"], encode(_header(reply=True, request=77), Done()), [b""] * 50):
            router.send_multipart([peer, *garbage])
        with pytest.raises(ZrtError) as raised:
            await asking
    assert raised.value.kind == "deadline"
    assert (asker.counters.undecodable, asker.counters.dropped) == (3, 1)


async def test_a_frame_over_the_limit_ends_that_connection_alone(start: Start) -> None:
    actor = await _echo(start, limit=10_000)
    with raw(zmq.DEALER) as client, raw(zmq.DEALER) as other:
        monitor = client.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        monitor.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        for each in (client, other):
            each.connect(actor.endpoint)
        other.send(b"a")
        assert await asyncio.to_thread(other.recv) == b"a!"
        client.send(bytes(10_001))
        await asyncio.to_thread(monitor.recv_multipart)
        other.send(b"b")
        assert await asyncio.to_thread(other.recv) == b"b!"
        client.disable_monitor()
        monitor.close()


async def test_a_reply_to_one_client_does_not_swallow_the_message_of_another(start: Start) -> None:
    """libzmq tells of an arrival once, and any call on the socket may take note of it."""
    actor = await start(Actor("a"))
    got: list[Bare] = []
    actor.handle_bare(got.append)
    with raw(zmq.DEALER) as first, raw(zmq.DEALER) as second:
        for client in (first, second):
            client.connect(actor.endpoint)
            client.send(b"hello")
        await until(lambda: len(got) == 2)
        arrives(actor._mailbox, lambda: second.send(b"news"))
        assert actor.reply_bare(got[0], b"hello")
        await until(lambda: len(got) == 3)


@pytest.mark.parametrize(
    "noise",
    [b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\xff" * 200, b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x00NULL" + bytes(500)],
    ids=["nothing", "HTTP", "random", "a greeting and no more"],
)
async def test_noise_on_the_port_harms_nobody(start: Start, noise: bytes) -> None:
    actor = await _echo(start)
    host, port = actor.endpoint.removeprefix("tcp://").split(":")
    for _ in range(20):
        with closing(socket.create_connection((host, int(port)))) as connection:
            connection.sendall(noise)
    assert await _still_serves(actor)


async def test_a_client_that_comes_back_under_its_own_routing_id_takes_over(start: Start) -> None:
    """Its old connection may still look alive: a cable was pulled, a laptop slept."""
    actor = await _echo(start)
    with raw(zmq.DEALER) as before, raw(zmq.DEALER) as after:
        for client in (before, after):
            client.setsockopt(zmq.ROUTING_ID, b"me")
            client.connect(actor.endpoint)
            client.send(b"hello")
            assert await asyncio.to_thread(client.recv) == b"hello!"
