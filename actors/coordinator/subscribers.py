"""Subscribers, who asked to hear of the cluster: when each is told, what has changed since, and up
to where each knows the event log.

A snapshot is made once for all subscribers, and each is sent only what is different from what it
was told last. A subscriber that has yet to take what it was told is left alone until it has, so
what waits for it never grows.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from zrt.actors.coordinator.event_log import EventLog
from zrt.runtime.actor.actor import Actor
from zrt.runtime.actor.envelope import Bare
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.client import Changes, Cluster, Error, Subscribe
from zrt.runtime.wire.clients import encode_event
from zrt.runtime.wire.cluster_changes import between

MOST: Final = 64
PUBLISH_S: Final = 0.1
"""The shortest time between two messages to a subscriber."""
BEAT_S: Final = 1.0
"""The pace of beats, which bring the news by themselves; for a subscriber who wants them sooner
processes are asked."""


@dataclass(slots=True)
class Subscriber:
    """One client's subscription. `due` is when the client is told next, whatever changes (monotonic
    seconds); `told` is the cluster it knows of, `heard` the serial of the last event before;
    `serial` counts the changes it was told since it was told all."""

    bare: Bare
    every_s: float
    due: float = 0.0
    told: Cluster | None = None
    heard: int = 0
    serial: int = 0


class Subscribers:
    """The subscribers of one cluster. `snapshot()` is the cluster as it is known, but for its event
    log; `refresh()` has its processes say how they are, and takes a moment at most."""

    def __init__(
        self,
        actor: Actor,
        snapshot: Callable[[], Cluster],
        refresh: Callable[[], Awaitable[None]],
        event_log: EventLog,
    ) -> None:
        self._actor = actor
        self._snapshot = snapshot
        self._refresh = refresh
        self._event_log = event_log
        self._all: dict[tuple[bytes, str], Subscriber] = {}
        self._wake = asyncio.Event()
        self._news = False

    def __len__(self) -> int:
        return len(self._all)

    def add(self, bare: Bare, request: Subscribe) -> None:
        """Tell a client of the whole cluster now, and of changes from now on. ZrtError
        overloaded."""
        key = bare.peer, request.id
        if key not in self._all and len(self._all) >= MOST:
            raise ZrtError("overloaded", f"{MOST} subscribers already")
        self._all[key] = Subscriber(bare._replace(frame=b""), request.every_ms / 1000)
        self._tell([key])
        self._wake.set()  # so that the time until it is due is looked at

    def remove(self, peer: bytes, request: str) -> None:
        """Tell a client nothing more for this request."""
        self._all.pop((peer, request), None)

    def end(self, error: ZrtError) -> None:
        """Tell all subscribers why nothing comes any more."""
        for (_, request), one in self._all.items():
            said = Error(id=request, kind=error.kind, message=error.message, where=error.where)
            with suppress(ZrtError):  # it takes nothing, and misses this
                self._actor.reply_bare(one.bare, encode_event(said))
        self._all.clear()

    def changed(self) -> None:
        """Let all subscribers hear soon that something changed."""
        self._news = True
        self._wake.set()

    async def publish(self) -> None:
        """Tell subscribers of changes, a few times a second at most, until cancelled; without
        subscribers nothing is worked out."""
        while True:
            try:
                async with asyncio.timeout(self._pause()):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            if any(one.due <= time.monotonic() and one.every_s < BEAT_S for one in self._all.values()):
                await self._refresh()
            now = time.monotonic()
            news, self._news = self._news, False
            self._tell([key for key, one in self._all.items() if news or one.due <= now])
            await asyncio.sleep(PUBLISH_S)

    def _pause(self) -> float | None:
        """Return the seconds until the next subscriber is due; None without any."""
        if not self._all:
            return None
        return max(0.0, min(one.due for one in self._all.values()) - time.monotonic())

    def _tell(self, keys: list[tuple[bytes, str]]) -> None:
        """Tell these subscribers of one snapshot; its difference from what they were told last is
        worked out once for all who were told the same."""
        ready = []
        for key in keys:
            one = self._all[key]
            one.due = time.monotonic() + one.every_s
            if not self._actor.behind(one.bare):
                ready.append(key)
        if not ready:
            return
        now = self._snapshot()
        worked_out: dict[tuple[int, int], Changes] = {}
        for key in ready:
            one = self._all[key]
            event: Cluster | Changes
            if one.told is None:
                event = replace(now, id=key[1], happened=self._event_log.since(one.heard))
                one.serial = 0
            else:
                same = id(one.told), one.heard
                if same not in worked_out:
                    worked_out[same] = between(one.told, replace(now, happened=self._event_log.since(one.heard)))
                one.serial += 1
                event = replace(worked_out[same], id=key[1], serial=one.serial)
            one.told, one.heard = now, self._event_log.last
            try:
                there = self._actor.reply_bare(one.bare, encode_event(event))
            except ZrtError:
                there = False
            if not there:
                del self._all[key]
