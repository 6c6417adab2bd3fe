"""Beats that are asked for, so that what is told of the processes is true at the time of the
question, and not as of their last beat."""

import asyncio
from contextlib import suppress
from typing import Final

from zrt.actors.coordinator.fleet.roster import Roster
from zrt.runtime.actor.actor import Actor
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.control import Address
from zrt.runtime.messages.members import BeatNow

ROUND_S: Final = 0.25
"""How long a round of beats is waited for."""
ANSWER_S: Final = 3.0
"""How long a process that let a round go by is asked nothing again."""


class FreshBeats:
    """Rounds of beats, in which the coordinator `actor` asks every process of the roster at once.
    There is one round at a time, for all who wait: whoever asks while one runs waits for the next,
    two rounds at most."""

    def __init__(self, actor: Actor, roster: Roster) -> None:
        self._actor = actor
        self._roster = roster
        self._running: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None
        self._asked: dict[Address, asyncio.Task[None]] = {}

    async def gather(self) -> None:
        """Return once every process has sent a beat that is no older than this call. One that does
        not answer in time, or did not in an earlier round, is left as it is known: `silent_ms` says
        how old that is."""
        if self._next is None:
            try:
                self._next = self._actor.spawn(self._round(self._running), "beats")
            except ZrtError:
                return  # the coordinator stops, or has too much to do: older beats are better than none
        await asyncio.wait([self._next])

    async def _round(self, before: "asyncio.Task[None] | None") -> None:
        if before is not None:
            await asyncio.wait([before])
        self._running, self._next = self._next, None
        asked = [task for record in self._roster.all() if (task := self._ask(record.address)) is not None]
        if asked:
            await asyncio.wait(asked, timeout=ROUND_S)

    def _ask(self, address: Address) -> "asyncio.Task[None] | None":
        """Ask a process for a beat, unless it has yet to answer."""
        if address in self._asked:
            return None
        with suppress(ZrtError):
            task = self._asked[address] = self._actor.spawn(self._answer(address), f"beat of {address.name}")
            task.add_done_callback(lambda _: self._asked.pop(address, None))
            return task
        return None

    async def _answer(self, address: Address) -> None:
        with suppress(ZrtError):  # its beats, or their lack, say how it is
            await self._actor.ask(address, BeatNow(), timeout=ANSWER_S)
