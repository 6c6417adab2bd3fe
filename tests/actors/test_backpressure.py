"""What happens when a peer takes less than it is sent: bounded outboxes, refusal, waiting for room,
and nobody else held up."""

import asyncio
import time
from collections.abc import Callable

import pytest
import zmq
from support.peers import PATIENCE_S, Start, raw, until
from support.stalls import StallMeter

from zrt.runtime.actor.actor import Actor
from zrt.runtime.actor.envelope import Bare
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.control import Address
from zrt.runtime.messages.header import Step
from zrt.runtime.messages.inference import InferenceRequest
from zrt.runtime.messages.sessions import Credit
from zrt.runtime.transport import outbox
from zrt.runtime.transport.outbox import Outbox
from zrt.runtime.wire.envelopes import decode


class Lent:
    """A tracker as libzmq's."""

    done = False


@pytest.mark.parametrize(
    ("waiting", "size", "takes"),
    [
        ([], 10**9, True),  # whatever its size, the first one fits
        ([10], outbox.BYTES - 10, True),
        ([10], outbox.BYTES - 9, False),
        ([1] * (outbox.MESSAGES - 1), 1, True),
        ([1] * outbox.MESSAGES, 1, False),
    ],
)
def test_an_outbox_is_bounded_in_messages_and_bytes(waiting: list[int], size: int, takes: bool) -> None:
    box = Outbox()
    for length in waiting:
        box.push([b""], length)
    assert box.takes(size) is takes


def test_buffers_lent_to_libzmq_count_until_it_lets_go() -> None:
    box, lent = Outbox(), Lent()
    box.lend(lent, outbox.BYTES)
    assert not box.takes(1)
    lent.done = True
    assert box.takes(1)
    assert box.idle


def _until_refused(send: Callable[[int], object]) -> int:
    """Send 0, 1, 2 … until `send` is refused as overloaded; how many were taken."""
    for number in range(1_000_000):
        try:
            send(number)
        except ZrtError as error:
            if error.kind != "overloaded":
                raise
            return number
    raise AssertionError("nothing was ever refused")


def _fill(sender: Actor, to: Address, size: int) -> int:
    data = memoryview(bytes(size))

    def send(number: int) -> None:
        request = InferenceRequest(number, 0, "hidden_states", [1, 1, size // 2], data)
        sender.tell(to, request, steps=[Step(number, 1, 0, 1)], dtype="float16")

    return _until_refused(send)


@pytest.mark.parametrize("size", [2000, 100_000, 1_000_000], ids=["messages", "bytes", "lent bytes"])
async def test_a_peer_that_does_not_read_is_refused_more_and_loses_nothing_once_it_reads(
    start: Start, size: int
) -> None:
    sender = await start(Actor("a"))
    with raw(zmq.ROUTER, RCVHWM=1, RCVBUF=65536) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        address = Address("b", 5, f"tcp://127.0.0.1:{port}")
        await sender.room(address, timeout=1)  # there is room as long as nothing was sent
        taken = _fill(sender, address, size)
        with pytest.raises(ZrtError, match="outbox stayed full") as raised:
            await sender.room(address, timeout=0.05)
        assert raised.value.kind == "deadline"

        def read_all() -> list[int]:
            return [_session(router.recv_multipart()) for _ in range(taken)]

        reading = asyncio.create_task(asyncio.to_thread(read_all))
        await sender.room(address, timeout=PATIENCE_S)
        assert await reading == list(range(taken))
    assert taken >= outbox.MESSAGES or taken * size >= outbox.BYTES - size


def _session(frames: list[bytes]) -> int:
    return decode(frames[1:])[0].steps[0].session


async def test_who_waits_for_room_learns_that_the_peer_is_gone(start: Start) -> None:
    sender = await start(Actor("a"))
    with raw(zmq.ROUTER, RCVHWM=1) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        address = Address("b", 5, f"tcp://127.0.0.1:{port}")
        _fill(sender, address, 100_000)
        waiting = asyncio.create_task(sender.room(address, timeout=PATIENCE_S))
        await asyncio.sleep(0)
    with pytest.raises(ZrtError) as raised:
        await waiting
    assert raised.value.kind == "stage_lost"


async def test_a_client_that_does_not_read_is_refused_and_others_are_served(start: Start) -> None:
    actor = await start(Actor("a"))
    bares: dict[bytes, Bare] = {}
    actor.handle_bare(lambda bare: bares.__setitem__(bytes(bare.frame), bare))
    with raw(zmq.DEALER, RCVHWM=1, RCVBUF=65536) as deaf, raw(zmq.DEALER) as keen:
        for client, name in ((deaf, b"deaf"), (keen, b"keen")):
            client.connect(actor.endpoint)
            client.send(name)
        await until(lambda: len(bares) == 2)

        taken = _until_refused(lambda number: actor.reply_bare(bares[b"deaf"], b"%d" % number + bytes(20_000)))
        assert actor.reply_bare(bares[b"keen"], b"hello")
        assert await asyncio.to_thread(keen.recv) == b"hello"

        def read_all() -> list[int]:
            return [int(deaf.recv().rstrip(b"\0")) for _ in range(taken)]

        reading = asyncio.create_task(asyncio.to_thread(read_all))
        await actor.room(bares[b"deaf"].peer, timeout=PATIENCE_S)
        assert await reading == list(range(taken))
        await until(lambda: not actor._mailbox._outboxes)  # nothing is kept for a client that has everything


async def test_a_client_that_goes_while_it_is_blocked_leaves_nothing_behind(start: Start) -> None:
    actor = await start(Actor("a"))
    bares: list[Bare] = []
    actor.handle_bare(bares.append)
    with raw(zmq.DEALER, RCVHWM=1) as client:
        client.connect(actor.endpoint)
        client.send(b"hello")
        await until(lambda: bool(bares))
        _until_refused(lambda number: actor.reply_bare(bares[0], bytes(20_000)))
        waiting = asyncio.create_task(actor.room(bares[0].peer, timeout=PATIENCE_S))
        await asyncio.sleep(0)
    with pytest.raises(ZrtError) as raised:
        await waiting
    assert raised.value.kind == "stage_lost"
    assert actor.reply_bare(bares[0], b"anybody?") is False
    assert not actor._mailbox._outboxes


async def test_a_flood_does_not_hold_up_the_loop(start: Start) -> None:
    """A peer that sends as fast as it can: the loop still gets its turn between a bounded number of
    messages."""
    actor = await start(Actor("a"))
    served = 0

    def handler(bare: Bare) -> None:
        nonlocal served
        served += 1
        spin_until = time.perf_counter() + 0.0002
        while time.perf_counter() < spin_until:
            pass

    actor.handle_bare(handler)
    with raw(zmq.DEALER) as client:
        client.connect(actor.endpoint)
        for _ in range(3000):  # 0.6 s of work for the handler
            client.send(b"x")
        with StallMeter() as meter:
            await until(lambda: served == 3000)
    assert meter.worst_ms < 300


async def test_two_actors_at_full_speed_both_ways_miss_no_wake_up(start: Start) -> None:
    """Each send may swallow the news of an arrival: if one is missed, a reply never comes."""
    left, right = await start(Actor("a")), await start(Actor("b"))
    got: dict[str, int] = {"a": 0, "b": 0}

    async def pump(me: Actor, other: Actor) -> None:
        me.handle(Credit, lambda body, envelope: got.__setitem__(me.name, got[me.name] + 1))
        for number in range(1000):
            for _ in range(number % 4):
                me.tell(other.address, Credit(1, 1, number))
            reply = await me.ask(other.address, Credit(2, 2, number), timeout=PATIENCE_S)
            assert reply.header.sender == other.name

    await asyncio.gather(pump(left, right), pump(right, left))
    await until(lambda: got == {"a": 2500, "b": 2500})
