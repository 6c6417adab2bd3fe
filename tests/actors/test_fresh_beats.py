"""Beats that are asked for: a coordinator with a real roster, members over real sockets."""

import asyncio
import time

import pytest
from support.peers import Start, until

from zrt.actors.coordinator.fleet import fresh_beats
from zrt.actors.coordinator.fleet.fresh_beats import FreshBeats
from zrt.actors.coordinator.fleet.roster import Roster
from zrt.runtime.actor.actor import Actor
from zrt.runtime.actor.envelope import Envelope
from zrt.runtime.actor.member import Member
from zrt.runtime.cluster.seats import Seat
from zrt.runtime.messages.control import Address, Control, Done
from zrt.runtime.messages.members import Beat, Register, Registered
from zrt.runtime.messages.stats import Load

NEVER_MS = 3_600_000
"""The pace of beats in these tests: none comes by itself."""

LONG_S = 10.0
"""Longer than any machine takes for an answer, and than what nobody should wait for."""


class NoMemory:
    def needed_bytes(self, first: int, last: int) -> int:
        return 0

    def kv_pages(self, seat: Seat) -> int:
        return 0


class Asker(Actor):
    """A coordinator that has nothing but a roster."""

    def __init__(self) -> None:
        super().__init__("coordinator")
        self.roster = Roster([], NoMemory())
        self.beats = 0
        self.fresh = FreshBeats(self, self.roster)
        self.handle(Register, self._on_register)
        self.handle(Beat, self._on_beat)

    def _on_register(self, message: Register, envelope: Envelope) -> Control:
        header = envelope.header
        self.roster.register(Address(header.sender, header.incarnation, message.endpoint), message, time.monotonic())
        return Registered(self.incarnation, NEVER_MS)

    def _on_beat(self, message: Beat, envelope: Envelope) -> Control:
        self.beats += 1
        sender = Address(envelope.header.sender, envelope.header.incarnation, "")
        self.roster.beat(sender, message, time.monotonic())
        return Done()

    def sessions(self) -> list[int]:
        return [info.sessions for info in self.roster.infos(0.0)]


class Busy(Member):
    """A member with so many sessions, which hangs while `hung` is not set."""

    def __init__(self, name: str, join: str) -> None:
        super().__init__(name, "block_server", join=join)
        self.sessions = self.asked = 0
        self.hung = asyncio.Event()
        self.hung.set()

    async def settled(self) -> None:
        self.asked += 1
        await self.hung.wait()

    def load(self) -> Load:
        return Load(sessions=self.sessions)


async def joined(start: Start, count: int) -> tuple[Asker, list[Busy]]:
    asker = await start(Asker())
    assert isinstance(asker, Asker)
    members = []
    for number in range(count):
        member = await start(Busy(f"stage{number}", asker.endpoint))
        assert isinstance(member, Busy)
        await member.there()
        members.append(member)
    return asker, members


async def test_what_is_known_of_every_process_is_no_older_than_the_question(start: Start) -> None:
    asker, members = await joined(start, 3)
    for now in range(1, 4):
        for member in members:
            member.sessions = now
        await asker.fresh.gather()
        assert asker.sessions() == [now] * 3


async def test_a_process_that_hangs_delays_one_question_a_little_and_later_ones_not_at_all(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    asker, members = await joined(start, 3)
    members[1].hung.clear()
    for now in (1, 2):
        for member in members:
            member.sessions = now
        with monkeypatch.context() as patch:
            if now == 2:
                patch.setattr(fresh_beats, "ROUND_S", 2 * LONG_S)
            async with asyncio.timeout(LONG_S):
                await asker.fresh.gather()
        assert asker.sessions() == [now, 0, now]
    assert members[1].asked == 1
    members[1].hung.set()
    await until(lambda: asker.sessions() == [2, 2, 2])
    members[1].sessions = 3
    async with asyncio.timeout(LONG_S):
        while asker.sessions() != [2, 3, 2]:  # it is asked again once its answer is here, which follows its beat
            await asker.fresh.gather()


async def test_many_questions_at_once_are_two_rounds(start: Start) -> None:
    """Whoever asks while a round runs waits for the next: what is changed now may be too late for
    the one that runs."""
    asker, members = await joined(start, 2)
    first = asyncio.create_task(asker.fresh.gather())
    await until(lambda: all(member.asked for member in members))
    for member in members:
        member.sessions = 5
    rest = [asyncio.create_task(asker.fresh.gather()) for _ in range(50)]
    await asyncio.gather(*rest)
    assert first.done()
    assert asker.sessions() == [5, 5]
    assert asker.beats == 4


async def test_without_processes_and_after_the_end_nothing_is_waited_for(start: Start) -> None:
    asker, _ = await joined(start, 0)
    async with asyncio.timeout(LONG_S):
        await asker.fresh.gather()
    await asker.stop()
    async with asyncio.timeout(LONG_S):
        await asker.fresh.gather()


@pytest.mark.parametrize("harm", ["stops", "refuses"])
async def test_a_process_that_does_not_answer_as_it_should_is_left_as_it_is_known(harm: str, start: Start) -> None:
    asker, members = await joined(start, 2)
    if harm == "stops":
        await members[0].stop()
    else:
        members[0].coordinator = Address("coordinator", 1, "")
    members[1].sessions = 4
    async with asyncio.timeout(2 * fresh_beats.ROUND_S + 1.0):
        await asker.fresh.gather()
    assert asker.sessions() == [0, 4]
