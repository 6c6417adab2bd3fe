"""The roll call of `zrt up`: which of its processes are up, and yet not with the coordinator.

The coordinator itself tells which of the processes it knows fall silent. A process that hangs while
there is no coordinator is unknown to the next one.
"""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, NoReturn

from zrt.actors.node.console import Console
from zrt.actors.node.process_losses import COORDINATOR
from zrt.runtime.actor.member import PAUSE_MOST_S, SILENCE_S, Member
from zrt.runtime.client.client import Client
from zrt.runtime.errors import ZrtError
from zrt.runtime.process.supervisor import Supervisor

log = logging.getLogger(__name__)

EVERY_S: Final = 10.0
ASK_S: Final = 1.0
ABSENT: Final = round((PAUSE_MOST_S + SILENCE_S) / ASK_S)
"""How many answers in a row a process may be missing from before it is taken for hung: a
registration that failed is tried again within PAUSE_MOST_S, and a process that says nothing for
SILENCE_S is lost. Answers are counted, not seconds: while the machine is suspended there are
none."""


class Absentees:
    """The roll call of the children of `supervisor` that have been ready: held whenever the
    coordinator takes `member`, which belongs to `zrt up`, and every EVERY_S. A child that hangs is
    killed, and so starts again; `console` says so."""

    def __init__(self, member: Member, supervisor: Supervisor, console: Console) -> None:
        self._member = member
        self._children = supervisor.children
        self._console = console
        self._anew = asyncio.Event()
        member.on_registered(lambda again: self._anew.set())

    async def follow(self, client: Client) -> NoReturn:
        """Hold the roll call until cancelled, through the coordinator's own death."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(EVERY_S):
                    await self._anew.wait()
            self._anew.clear()
            try:
                await self._hold(client)
            except ZrtError as error:
                log.info("no roll call: %s", error)

    async def _hold(self, client: Client) -> None:
        """Ask until no process is missing, or one was for too long. Only the coordinator that has
        taken our member is believed, for as long as it does: another cluster's may have its port
        meanwhile. ZrtError as Client.status."""
        missing = self._present()
        for _ in range(ABSENT - 1):
            missing = await self._missing(client, missing)
            if not missing:
                return
            await asyncio.sleep(ASK_S)
        for name, pid in (await self._missing(client, missing)).items():
            self._console.say(
                f"zrt: {name} (process {pid}) has not joined the coordinator for {ABSENT * ASK_S:g} s and is killed"
            )
            self._children[name].kill()

    async def _missing(self, client: Client, before: Mapping[str, int]) -> dict[str, int]:
        """Return those of the processes that were missing `before` that still run and that the
        coordinator does not know now either."""
        cluster = await client.status()
        if self._anew.is_set() or not self._member.registered.is_set():
            return {}
        known = {actor.name for actor in cluster.actors if actor.pid}
        present = self._present()
        return {name: pid for name, pid in before.items() if present.get(name) == pid and name not in known}

    def _present(self) -> dict[str, int]:
        """Return the processes that the coordinator is to know, by name. One that is starting or
        ending has a deadline of its own."""
        if self._member.ended.is_set() or self._member.goes_down:
            return {}
        children = self._children.values()
        return {child.name: child.pid for child in children if child.incarnation and child.name != COORDINATOR}
