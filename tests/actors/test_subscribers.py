"""What subscribers are told by whoever publishes, and when: real messages to plain sockets."""

import asyncio
from collections.abc import Callable

import pytest
import zmq
from support.peers import Start, raw, until
from support.snapshots import cluster

from zrt.actors.coordinator.event_log import EventLog
from zrt.actors.coordinator.subscribers import Subscribers
from zrt.runtime.actor.actor import Actor
from zrt.runtime.actor.envelope import Bare
from zrt.runtime.messages.client import Changes, Cluster, Subscribe
from zrt.runtime.wire.clients import decode_event
from zrt.runtime.wire.cluster_changes import Snapshots

SMALL = 64 * 1024


class Publisher(Actor):
    """Tells `make(n)` the n-th time it is asked, to whoever sends anything."""

    def __init__(self, make: Callable[[int], Cluster], every_ms: int = 100) -> None:
        super().__init__("publisher")
        self.told = self.refreshed = 0
        self._make = make
        self._every_ms = every_ms
        self.event_log = EventLog()
        self.subscribers = Subscribers(self, self._snapshot, self._refresh, self.event_log)
        self.handle_bare(lambda bare: self.add(bare))

    def add(self, bare: Bare) -> None:
        self.subscribers.add(bare, Subscribe(id=bytes(bare.frame).decode(), every_ms=self._every_ms))

    async def start(self) -> None:
        await super().start()
        self.depend(self.subscribers.publish(), "publish")

    async def _refresh(self) -> None:
        self.refreshed += 1

    def _snapshot(self) -> Cluster:
        self.told += 1
        return self._make(self.told)


def heard(socket: "zmq.Socket[bytes]") -> Cluster | Changes:
    event = decode_event(socket.recv())
    assert isinstance(event, Cluster | Changes)
    return event


async def test_changes_follow_a_whole_snapshot_and_another_request_begins_anew(start: Start) -> None:
    publisher = await start(Publisher(lambda number: cluster(tokens=number)))
    with raw(zmq.DEALER) as script:
        script.connect(publisher.endpoint)
        for _ in range(2):
            script.send(b"s")
            await until(lambda: len(publisher.subscribers) == 1)
            event = await asyncio.to_thread(heard, script)
            while not isinstance(event, Cluster):
                event = await asyncio.to_thread(heard, script)
            for serial in (1, 2):
                changes = await asyncio.to_thread(heard, script)
                assert isinstance(changes, Changes)
                assert (changes.serial, changes.id, changes.actors, changes.sessions) == (serial, "s", {}, {})
                assert changes.cluster == {"tokens": event.tokens + serial}


async def test_what_is_told_to_many_is_worked_out_once(start: Start) -> None:
    publisher = await start(Publisher(lambda number: cluster(tokens=number)))
    with raw(zmq.DEALER) as script:
        script.connect(publisher.endpoint)
        for name in (b"a", b"b", b"c"):
            script.send(name)
        await until(lambda: len(publisher.subscribers) == 3)
        await until(lambda: all(one.told is not None for one in publisher.subscribers._all.values()))
        began = publisher.told
        await until(lambda: publisher.told >= began + 4)
        for one in publisher.subscribers._all.values():
            assert one.told is not None
        assert len({one.told.tokens for one in publisher.subscribers._all.values() if one.told}) == 1


async def test_one_that_reads_nothing_is_left_alone_and_then_hears_all_that_changed(start: Start) -> None:
    def large(number: int) -> Cluster:
        made = cluster(sessions=400)
        for one in made.sessions:
            one.client = f"{number} " * 500
        return made

    publisher = await start(Publisher(large))
    with raw(zmq.DEALER, RCVHWM=1, RCVBUF=SMALL) as script, raw(zmq.DEALER) as other:
        script.connect(publisher.endpoint)
        script.send(b"slow")
        await until(lambda: len(publisher.subscribers) == 1)
        slow = next(iter(publisher.subscribers._all.values()))
        told, rounds = slow.serial, 0
        while rounds < 5:  # the kernel may take some more for it
            due = slow.due
            await until(lambda: slow.due != due)  # noqa: B023
            rounds = rounds + 1 if publisher.behind(slow.bare) and told == slow.serial else 0
            told = slow.serial
        other.connect(publisher.endpoint)
        other.send(b"quick")
        for serial in range(5):
            event = await asyncio.to_thread(heard, other)
            assert isinstance(event, Cluster) or event.serial == serial
        assert slow.serial <= told + 1  # of the five changes the other has heard
        seen, last = Snapshots(), None
        for serial in range(slow.serial + 2):
            event = await asyncio.to_thread(heard, script)
            assert isinstance(event, Cluster) or event.serial == serial
            last = seen.take(event)
        assert last is not None
        assert int(last.sessions[0].client.split()[0]) > told + 4


@pytest.mark.parametrize(("every_ms", "asked"), [(100, True), (1000, False)])
async def test_processes_are_asked_for_those_who_want_news_sooner_than_beats_bring_them(
    every_ms: int, asked: bool, start: Start
) -> None:
    publisher = await start(Publisher(lambda number: cluster(tokens=number), every_ms))
    with raw(zmq.DEALER) as script:
        script.connect(publisher.endpoint)
        script.send(b"s")
        for _ in range(3):
            event = await asyncio.to_thread(heard, script)
        assert isinstance(event, Changes)
    assert (publisher.refreshed > 0) is asked
