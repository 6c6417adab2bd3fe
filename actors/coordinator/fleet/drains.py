"""Drains: block servers taken out of service with nothing lost, and put back; and the whole cluster
before it goes down.

A drain looks at the sessions that still run there whenever one left or may leave: as soon as
another replica of the stage is ready they move to it (a re-route to what the pipeline offers, as
after a death), else they may finish until the time is up, and are parked then.
"""

import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

from msgspec.structs import replace

from zrt.actors.coordinator.event_log import EventLog
from zrt.actors.coordinator.fleet.process_record import ProcessRecord
from zrt.actors.coordinator.fleet.roster import Roster
from zrt.actors.coordinator.sessions.generation import Generation
from zrt.actors.coordinator.sessions.generations import Generations
from zrt.runtime.actor.actor import Actor
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.client import Drain, Drained
from zrt.runtime.messages.cluster import DrainInfo
from zrt.runtime.messages.control import Address
from zrt.runtime.messages.members import Serving, SetState

TELL_S = 0.5  # how often the asker hears how the drain gets on
STATE_DEADLINE_S = 5.0
KEPT = 32  # drains that are remembered


class Drains:
    """The drains of one cluster, those that run and the last that did. `changed` is called when a
    block server's state is another."""

    def __init__(
        self,
        actor: Actor,
        roster: Roster,
        generations: Generations,
        event_log: EventLog,
        *,
        changed: Callable[[], None],
    ) -> None:
        self._actor = actor
        self._roster = roster
        self._generations = generations
        self._rerouting = generations.rerouting
        self._event_log = event_log
        self._changed = changed
        self._hurry = False
        self._kept: deque[DrainProgress] = deque(maxlen=KEPT)
        self.ended: Counter[str] = Counter()
        """How many ended, by how: drained, failed."""

    def infos(self) -> list[DrainInfo]:
        """Return the drains that run and the last ones that did."""
        return [self._info(progress) for progress in self._kept]

    def _info(self, progress: "DrainProgress") -> DrainInfo:
        """Return what people are shown of a drain. What it emptied may be gone: for now, if only
        its connection broke."""
        record, info = self._roster.find(progress.address.name), progress.info()
        there = record is not None and record.address == progress.address
        return info if there or info.state != "drained" else replace(info, state="gone")

    async def drain(self, request: Drain, asker: str, tell: Callable[[Drained], object]) -> Drained:
        """Drain a block server for `asker`, and return what became of its sessions; `tell` hears of
        that meanwhile. ZrtError as the message Drain says."""
        record = self._roster.drain(request.name)
        progress = DrainProgress(request, asker, record.address)
        self._kept.append(progress)
        self._event_log.add("drain", request.name, f"is being drained for {request.timeout_ms / 1000:g} s at most")
        self._changed()
        try:
            await self._set_state(record.address, "draining")
            account = Account(request, self._rerouting.through(record.address))
            progress.follow(lambda: account.event(self._rerouting.through(record.address), "draining"))
            await self._empty(record.address, account, time.monotonic() + request.timeout_ms / 1000, tell)
            self._draining(record.address).serve("drained")
            self._changed()
            await self._set_state(record.address, "drained")
        except BaseException:
            progress.end("failed")
            self.ended["failed"] += 1
            self._event_log.add("drain", request.name, "could not be drained")
            self._reverse(record.address)
            raise
        progress.end("drained")
        self.ended["drained"] += 1
        self._event_log.add("drain", request.name, "is drained")
        return account.event(self._rerouting.through(record.address), "drained")

    async def undrain(self, name: str) -> None:
        """Let a block server serve again, once it has loaded if it lost a part. ZrtError
        bad_request: the block server is not drained; or what keeps it from hearing of it."""
        address = self._roster.undrain(name).address
        await self._let_serve(address)
        for progress in self._kept:
            if progress.state == "drained" and progress.address == address:
                progress.end("undrained")
        self._event_log.add("drain", name, "is undrained")
        self._changed()

    async def all_finished(self, seconds: float) -> None:
        """Take no new session, and wait until none is left, `seconds` at most; return at once, as
        do those who wait, when this was asked before."""
        if self._generations.closed:
            self._hurry = True
            self._rerouting.tell_news()
        self._generations.close()
        until = time.monotonic() + seconds
        while len(self._generations) and not self._hurry and (left := until - time.monotonic()) > 0:
            self._rerouting.expect_news()
            await self._rerouting.wait_for_news(left)

    async def _empty(
        self, address: Address, account: "Account", until: float, tell: Callable[[Drained], object]
    ) -> None:
        """Move or park sessions until none runs there. ZrtError cancelled, stage_lost: the block
        server no longer drains."""
        tells = time.monotonic()
        while running := self._rerouting.through(address):
            self._rerouting.expect_news()
            now = time.monotonic()
            late = now >= until
            for generation in running:
                moved = self._rerouting.move_off(generation, address, f"{address.name} is being drained")
                if late and not moved:
                    account.park(generation.id)
                    self._rerouting.park(generation, f"{address.name} is drained and its stage has no other replica")
            if now >= tells:
                tells = now + TELL_S
                tell(account.event(self._rerouting.through(address), "draining"))
            await self._rerouting.wait_for_news((tells if late else min(tells, until)) - now)
            self._draining(address)

    def _draining(self, address: Address) -> ProcessRecord:
        """Return the record of a block server that is still being drained. ZrtError as `_empty`."""
        record = self._roster.find(address.name)
        if record is None or record.address != address:
            text = "died while it was drained; what ran there goes on with another replica, or once one has loaded"
            raise ZrtError("stage_lost", f"{address.name} {text}")
        if record.state == "loading":
            raise ZrtError(
                "stage_lost", f"{address.name} lost a part while it was being drained: it loads anew, and serves then"
            )
        if record.state != "draining":
            raise ZrtError("cancelled", f"{address.name} was undrained")
        return record

    def _reverse(self, address: Address) -> None:
        """Let the block server of a drain that failed serve on, if it is there."""
        record = self._roster.find(address.name)
        if record is not None and record.address == address and record.state in ("draining", "drained"):
            record.serve("ready")
            self._changed()
            with suppress(ZrtError):  # the coordinator stops
                self._actor.spawn(self._reversed(address), f"undrain {address.name}")

    async def _reversed(self, address: Address) -> None:
        with suppress(ZrtError):  # that it cannot be told may be why the drain failed
            await self._let_serve(address)
            self._changed()

    async def _let_serve(self, address: Address) -> None:
        await self._set_state(address, "ready")
        record = self._roster.find(address.name)
        if record is not None and record.address == address and record.state == "drained":
            record.serve("ready")  # that it is drained it said before it heard this

    async def _set_state(self, address: Address, state: Serving) -> None:
        await self._actor.ask(address, SetState(state), timeout=STATE_DEADLINE_S)


class DrainProgress:
    """One drain of the process at `address`, for people."""

    def __init__(self, request: Drain, asker: str, address: Address) -> None:
        self.address = address
        self._account: Callable[[], Drained] | None = None
        self._began = time.monotonic()
        self._told = DrainInfo(request.name, "draining", asker, request.timeout_ms, 0)

    @property
    def state(self) -> str:
        return self._told.state

    def follow(self, account: Callable[[], Drained]) -> None:
        """Ask `account` from now on, until the end, what became of the sessions so far."""
        self._account = account

    def info(self) -> DrainInfo:
        """Return how the drain is now, or how it ended; what was returned earlier stays as it
        was."""
        if self._told.state == "draining":
            spent_ms = int((time.monotonic() - self._began) * 1000)
            self._told = replace(self._told, spent_ms=spent_ms)
            if self._account is not None:
                now = self._account()
                self._told = replace(
                    self._told, left=now.left, moved=now.moved, finished=now.finished, parked=now.parked
                )
        return self._told

    def end(self, state: Literal["drained", "failed", "undrained", "gone"]) -> None:
        """Note how the drain ended, or what became of the drained process."""
        self._told = replace(self.info(), state=state)
        self._account = None


class Account:
    """What became of the sessions that ran on a block server when its drain began."""

    def __init__(self, request: Drain, began: list[Generation]) -> None:
        self._parked: set[int] = set()
        self._request = request
        self._began = began

    def park(self, session: int) -> None:
        """Note that a session is parked."""
        self._parked.add(session)

    def event(self, running: list[Generation], state: Literal["draining", "drained"]) -> Drained:
        """Return what the asker is told; `running` are the sessions that are still there."""
        left = {generation.id for generation in running}
        gone = [generation for generation in self._began if generation.id not in left]
        parked = sum(generation.id in self._parked for generation in gone)
        finished = sum(generation.session.finished and generation.id not in self._parked for generation in gone)
        return Drained(
            id=self._request.id,
            name=self._request.name,
            state=state,
            left=len(left),
            moved=len(gone) - parked - finished,
            finished=finished,
            parked=parked,
        )
