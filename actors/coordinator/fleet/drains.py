"""Taking a block server out of service with nothing lost, and back; and the whole cluster, before
it goes.

A drain looks at the sessions that still run there whenever one left or may leave: as soon as
another replica of the stage is ready they move to it (a re-route to what the pipeline offers, as
after a death), else they may finish until the time is up, and are parked then.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from typing import Literal

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

TELL_S = 0.5  # how often the asker hears how it gets on
STATE_DEADLINE_S = 5.0
KEPT = 32  # drains that are remembered


class Drains:
    """`changed` is called when a block server's state is another."""

    def __init__(self, actor: Actor, roster: Roster, generations: Generations, *, changed: Callable[[], None]) -> None:
        self._actor = actor
        self._roster = roster
        self._generations = generations
        self._moves = generations.moves
        self._changed = changed
        self._hurry = False
        self._records: deque[Record] = deque(maxlen=KEPT)
        self.ended: Counter[str] = Counter()
        """How many ended, by how: drained, failed."""

    def infos(self) -> list[DrainInfo]:
        """The drains that run and the last ones that did."""
        return [record.info() for record in self._records]

    async def drain(self, request: Drain, asker: str, tell: Callable[[Drained], object]) -> Drained:
        """Drain a block server for `asker`; what became of its sessions. `tell` hears how it gets
        on. ZrtError as the message says."""
        entry = self._roster.drain(request.name)
        record = Record(request, asker)
        self._records.append(record)
        happened = self._generations.happened
        happened.add("drain", request.name, f"is being drained for {request.timeout_ms / 1000:g} s at most")
        self._changed()
        try:
            await self._set_state(entry.address, "draining")
            account = Account(request, self._moves.through(entry.address))
            record.account = lambda: account.event(self._moves.through(entry.address), "draining")
            await self._empty(entry.address, account, time.monotonic() + request.timeout_ms / 1000, tell)
            self._draining(entry.address).state = "drained"
            self._changed()
            await self._set_state(entry.address, "drained")
        except BaseException:
            record.end("failed")
            self.ended["failed"] += 1
            happened.add("drain", request.name, "could not be drained")
            self._reverse(entry.address)
            raise
        record.end("drained")
        self.ended["drained"] += 1
        happened.add("drain", request.name, "is drained")
        return account.event(self._moves.through(entry.address), "drained")

    async def undrain(self, name: str) -> None:
        """Let it serve again, once it has loaded if it lost a part. ZrtError bad_request: it is not
        drained; what keeps it from hearing so."""
        await self._let_serve(self._roster.undrain(name).address)
        self._generations.happened.add("drain", name, "is undrained")
        self._changed()

    async def all_finished(self, seconds: float) -> None:
        """Take no new session, and wait until none is left, for so long at most; not at all when
        this was asked before."""
        if self._generations.closed:
            self._hurry = True
            self._moves.news.set()
        self._generations.closed = True
        until = time.monotonic() + seconds
        while len(self._generations) and not self._hurry and (left := until - time.monotonic()) > 0:
            self._moves.news.clear()
            await self._news(left)

    async def _empty(
        self, address: Address, account: "Account", until: float, tell: Callable[[Drained], object]
    ) -> None:
        """Until no session runs there. ZrtError cancelled, stage_lost: it no longer drains."""
        tells = time.monotonic()
        while running := self._moves.through(address):
            self._moves.news.clear()
            now = time.monotonic()
            late = now >= until
            for generation in running:
                moved = self._moves.move_off(generation, address, f"{address.name} is being drained")
                if late and not moved:
                    account.parked.add(generation.id)
                    self._moves.park(generation, f"{address.name} is drained and its stage has no other replica")
            if now >= tells:
                tells = now + TELL_S
                tell(account.event(self._moves.through(address), "draining"))
            await self._news((tells if late else min(tells, until)) - now)
            self._draining(address)

    async def _news(self, seconds: float) -> None:
        """Wait for some, so long at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._moves.news.wait()

    def _draining(self, address: Address) -> ProcessRecord:
        entry = self._roster.find(address.name)
        if entry is None or entry.address != address:
            text = "died while it was drained; what ran there goes on with another replica, or once one has loaded"
            raise ZrtError("stage_lost", f"{address.name} {text}")
        if entry.state == "loading":
            raise ZrtError(
                "stage_lost", f"{address.name} lost a part while it was being drained: it loads anew, and serves then"
            )
        if entry.state != "draining":
            raise ZrtError("cancelled", f"{address.name} was undrained")
        return entry

    def _reverse(self, address: Address) -> None:
        """The drain failed: the block server serves on, if it is there."""
        entry = self._roster.find(address.name)
        if entry is not None and entry.address == address and entry.state in ("draining", "drained"):
            entry.state = "ready"
            self._changed()
            with suppress(ZrtError):  # the coordinator stops
                self._actor.spawn(self._reversed(address), f"undrain {address.name}")

    async def _reversed(self, address: Address) -> None:
        with suppress(ZrtError):  # it may be why the drain failed
            await self._let_serve(address)
            self._changed()

    async def _let_serve(self, address: Address) -> None:
        await self._set_state(address, "ready")
        entry = self._roster.find(address.name)
        if entry is not None and entry.address == address and entry.state == "drained":
            entry.state = "ready"  # that it is drained it said before it heard this

    async def _set_state(self, address: Address, state: Serving) -> None:
        await self._actor.ask(address, SetState(state), timeout=STATE_DEADLINE_S)


class Record:
    """One drain, for people. `account` says what became of its sessions so far, until the end."""

    def __init__(self, request: Drain, asker: str) -> None:
        self.account: Callable[[], Drained] | None = None
        self._began = time.monotonic()
        self._info = DrainInfo(request.name, "draining", asker, request.timeout_ms, 0)

    def info(self) -> DrainInfo:
        info = self._info = copy(self._info)  # the last one was told as it was
        if info.state == "draining":
            info.spent_ms = int((time.monotonic() - self._began) * 1000)
            if self.account is not None:
                now = self.account()
                info.left, info.moved, info.finished, info.parked = now.left, now.moved, now.finished, now.parked
        return info

    def end(self, state: Literal["drained", "failed"]) -> None:
        self.info().state = state
        self.account = None


class Account:
    """What became of the sessions that ran there when a drain began."""

    def __init__(self, request: Drain, began: list[Generation]) -> None:
        self.parked: set[int] = set()
        self._request = request
        self._began = began

    def event(self, running: list[Generation], state: Literal["draining", "drained"]) -> Drained:
        """`running` are those that are still there."""
        left = {generation.id for generation in running}
        gone = [generation for generation in self._began if generation.id not in left]
        parked = sum(generation.id in self.parked for generation in gone)
        finished = sum(generation.session.finished and generation.id not in self.parked for generation in gone)
        return Drained(
            id=self._request.id,
            name=self._request.name,
            state=state,
            left=len(left),
            moved=len(gone) - parked - finished,
            finished=finished,
            parked=parked,
        )
