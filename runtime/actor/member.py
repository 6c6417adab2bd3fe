"""A member: an actor that joins a coordinator, sends beats, and joins again whenever the
coordinator is new or no longer knows it."""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, TypeVar

from zrt.runtime.actor.actor import Actor
from zrt.runtime.actor.envelope import Answer, Envelope, Handler
from zrt.runtime.actor.timers import Periodic
from zrt.runtime.errors import ZrtError
from zrt.runtime.host_memory import available_memory, resident_memory
from zrt.runtime.messages.control import Address, Control, Done
from zrt.runtime.messages.members import ActorKind, ActorState, Beat, BeatNow, GoingDown, Register, Registered, Shutdown
from zrt.runtime.messages.stats import Load
from zrt.runtime.transport.link import Link
from zrt.runtime.transport.outbox import Frames
from zrt.runtime.wire.envelopes import Body
from zrt.runtime.wire.limits import MAX_CLIENT_FRAME, MAX_FRAME

log = logging.getLogger(__name__)

_Order = TypeVar("_Order", bound=Control)
REGISTER_S: Final = 5.0
"""How long a coordinator may take to answer a registration."""
SILENCE_S: Final = 3.0
"""How long a coordinator may leave a beat unanswered before it counts as lost."""
UNANSWERED_S: Final = 5.0
"""How long to wait for a connection before the first warning; twice as long before each further
one, so that the log does not grow."""
PAUSE_FIRST_S: Final = 0.2
PAUSE_MOST_S: Final = 5.0
_LEAST_BEAT_S: Final = 0.05


class Member(Actor):
    """An actor that joins the coordinator at the endpoint `join`. That endpoint is configured, so
    the link is made again once the coordinator is back.

    `start` returns when the mailbox is bound; `registered` is set while the coordinator knows this
    incarnation, `heard` is when the coordinator last answered anything (monotonic seconds). A
    subclass describes itself in `registration()` and `load()`. The coordinator's `Shutdown` sets
    `ended`; after its `GoingDown` this process waits for the next coordinator at the same
    endpoint.
    """

    def __init__(
        self,
        name: str,
        kind: ActorKind,
        *,
        join: str,
        listen: str = "tcp://127.0.0.1:0",
        advertise: str | None = None,
        limit: int = MAX_FRAME,
        cluster: str = "",
    ) -> None:
        super().__init__(name, listen=listen, advertise=advertise, limit=limit)
        self.kind: ActorKind = kind
        self.memory_bytes = 0
        """The most memory this process may take; 0: no limit of its own."""
        self.state: ActorState = "starting"
        self.coordinator = Address("coordinator", 0, join)
        self.cluster = cluster
        self.registered = asyncio.Event()
        self.heard = time.monotonic()
        self.goes_down = False
        self._put_off = 0  # orders that wait for a registration, and those behind them
        self._in_order = asyncio.Lock()
        self._up = asyncio.Event()
        self._astray = asyncio.Event()
        self._on_registered_fns: list[Callable[[bool], None]] = []
        self._on_lost_fns: list[Callable[[], None]] = []
        self.obey(Shutdown, self._on_shutdown)
        self.obey(GoingDown, self._on_going_down)
        self.obey(BeatNow, self._on_beat_now)

    async def start(self) -> None:
        self._put_off, self._in_order = 0, asyncio.Lock()
        await super().start()
        assert self._sockets is not None
        self._joined = Link(
            self._sockets,
            self.coordinator.endpoint,
            self,
            limit=MAX_CLIENT_FRAME,
            reconnect=True,
            lost_kind="coordinator_lost",
        )
        log.info(
            "%s: a %s, is joining the coordinator at %s", self.name, self.kind.replace("_", " "), self._joined.endpoint
        )
        self.depend(self._membership(), "membership")

    async def there(self) -> None:
        """Wait until the coordinator knows this process: from then on the coordinator notices this
        process's silence."""
        await self.registered.wait()

    async def stop(self) -> None:
        if self._sockets is not None:
            self._joined.close()
            self._up.clear()
            self.registered.clear()
        await super().stop()

    # ---- for a subclass --------------------------------------------------------------------------

    def registration(self) -> Register:
        """Return the message by which this process joins the coordinator, each time it does."""
        return Register(
            self.kind,
            self.endpoint,
            os.getpid(),
            socket.gethostname(),
            self.state,
            memory_bytes=self.memory_bytes,
            room_bytes=self._room_bytes(),
            cluster=self.cluster,
            restarts=self.restarts,
        )

    def load(self) -> Load | None:
        """Return this process's load, which each beat reports; None: nothing to report."""
        return None

    async def settled(self) -> None:
        """Wait, a moment at most, until what was asked of this process so far shows in its load."""

    def obey(self, body_type: type[_Order], fn: Handler[_Order]) -> None:
        """Handle a message that only the coordinator may send, as `handle` does. From any other
        sender, a former coordinator included, the message counts as stale and is refused as
        `unauthorized`."""

        def checked(body: _Order, envelope: Envelope) -> Answer | Awaitable[Answer]:
            known = self.is_coordinator(envelope)
            if known and not self._put_off:
                return fn(body, envelope)
            if not known and self.registered.is_set():
                raise self._not_obeyed(envelope)
            self._put_off += 1
            return self._obey_later(body, envelope, fn)

        self.handle(body_type, checked)

    def is_coordinator(self, envelope: Envelope) -> bool:
        """Return whether the coordinator that knows this process sent `envelope`."""
        return self.coordinator.incarnation != 0 and envelope.header.incarnation == self.coordinator.incarnation

    async def _obey_later(self, body: _Order, envelope: Envelope, fn: Handler[_Order]) -> Answer:
        """Handle an order in turn, once this process is registered: a new coordinator's first order
        may arrive before its answer to the registration."""
        due = asyncio.get_running_loop().time() + REGISTER_S
        try:
            async with self._in_order:
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(due):
                        await self.registered.wait()
                if not self.is_coordinator(envelope):
                    raise self._not_obeyed(envelope)
                answer = fn(body, envelope)
        finally:
            self._put_off -= 1
        return await answer if isinstance(answer, Awaitable) else answer

    def _not_obeyed(self, envelope: Envelope) -> ZrtError:
        self.counters.stale += 1
        what = type(envelope.body).__name__
        return ZrtError("unauthorized", f"only the coordinator this process has joined may send {what}", self.name)

    def on_registered(self, fn: Callable[[bool], None]) -> None:
        """Call `fn(again)` after every registration; `again` is true when the same incarnation of
        the coordinator took this process before."""
        self._on_registered_fns.append(fn)

    def on_coordinator_lost(self, fn: Callable[[], None]) -> None:
        """Call `fn()` once per registration that ends: the connection broke, beats stay unanswered,
        or the coordinator no longer knows this process."""
        self._on_lost_fns.append(fn)

    def tell_coordinator(self, body: Body) -> bool:
        """Send the coordinator a message and return True. While not registered send nothing and
        return False: the next registration reports the state anyway. ZrtError as for `tell`."""
        if not self.registered.is_set():
            return False
        self._tell(self._joined, self.coordinator, body)
        return True

    async def ask_coordinator(self, body: Body, *, timeout: float) -> Envelope:
        """Send the coordinator a request and wait for its reply, as `ask` does. ZrtError
        coordinator_lost while not registered, and where `ask` raises stage_lost."""
        if not self.registered.is_set():
            raise ZrtError("coordinator_lost", f"not registered at {self.coordinator.endpoint}", self.name)
        return await self._ask(self._joined, self.coordinator, body, timeout)

    async def catch_up(self) -> None:
        """Wait until the coordinator has received all that it was sent so far; return at once while
        not registered.

        A reply to the coordinator's own request goes another way, and may overtake messages sent
        before.
        """
        if self.registered.is_set():
            await self._send_beat(self._beats)

    async def _on_beat_now(self, body: BeatNow, envelope: Envelope) -> Control:
        await self.settled()
        await self.catch_up()
        return Done()

    # ---- the link to the coordinator -------------------------------------------------------------

    def new_routing_id(self) -> bytes:
        return self._routing_ids.next()

    def on_link_up(self, link: Link) -> None:
        self._up.set()

    def on_link_message(self, link: Link, frames: Frames) -> None:
        self.heard = time.monotonic()
        self._dispatcher.on_reply(link, frames)

    # ---- joining ---------------------------------------------------------------------------------

    def _on_shutdown(self, body: Shutdown, envelope: Envelope) -> Control:
        log.info("%s: the cluster goes down, and this process with it", self.name)
        self.ended.set()
        return Done()

    def _on_going_down(self, body: GoingDown, envelope: Envelope) -> Control:
        self.goes_down = True
        return Done()

    def on_link_down(self, link: Link) -> None:
        self._up.clear()
        self._pending.fail(link.lost(), link)
        self._lose("the connection broke")

    async def _membership(self) -> None:
        pause = PAUSE_FIRST_S
        while True:
            await self._connected()
            try:
                await self._register()
            except ZrtError as error:
                what = "does not answer" if error.kind == "coordinator_lost" else "does not take this process"
                self._log_limiter.add("registration", f"{self.coordinator.endpoint} {what}: {error}")
                await asyncio.sleep(pause)
                pause = min(2 * pause, PAUSE_MOST_S)
            else:
                pause = PAUSE_FIRST_S
                await self._astray.wait()

    async def _connected(self) -> None:
        pause = UNANSWERED_S
        while not self._up.is_set():
            try:
                async with asyncio.timeout(pause):
                    await self._up.wait()
            except TimeoutError:
                log.warning("%s: nobody answers at %s yet; retrying", self.name, self.coordinator.endpoint)
                pause *= 2

    async def _register(self) -> None:
        unknown = Address(self.coordinator.name, 0, self.coordinator.endpoint)
        reply = await self._ask(self._joined, unknown, self.registration(), REGISTER_S)
        if not isinstance(reply.body, Registered):
            raise ZrtError("bad_request", f"the answer to a registration is a {type(reply.body).__name__}")
        if not self._joined.up:
            raise self._joined.lost()
        self.cluster = self.cluster or reply.body.cluster
        again = reply.body.incarnation == self.coordinator.incarnation
        self.coordinator = Address(reply.header.sender, reply.body.incarnation, unknown.endpoint)
        log.info("%s: joined the coordinator at %s", self.name, unknown.endpoint)
        self._astray.clear()
        self.goes_down = False
        self.registered.set()
        self._beats = self.every(max(reply.body.beat_ms / 1000, _LEAST_BEAT_S), self._beat)
        for fn in self._on_registered_fns:
            self._call(fn, again)

    def _beat(self) -> None:
        self.spawn(self._send_beat(self._beats), "beat")

    async def _send_beat(self, beats: Periodic) -> None:
        beat = Beat(self.state, self.lag_ms, resident_memory(), self.load(), self._room_bytes())
        try:
            await self.ask_coordinator(beat, timeout=SILENCE_S)
        except ZrtError as error:
            if beats is self._beats:  # else it belongs to an earlier registration
                self._lose(str(error))

    def _room_bytes(self) -> int:
        """Return the bytes a blank process could grow to, by which the coordinator gives it blocks;
        0 for any other process."""
        if self.state != "blank":
            return 0
        try:
            return available_memory() + resident_memory()
        except OSError:
            return 0  # no descriptor is left to read with: until one is, this process takes nothing

    def _lose(self, why: str) -> None:
        if not self.registered.is_set():
            return
        if self.goes_down:
            log.info("%s: the cluster went down; waiting until it is back at %s", self.name, self.coordinator.endpoint)
        else:
            log.warning("%s: lost the coordinator: %s", self.name, why)
        self.registered.clear()
        self._astray.set()
        self._beats.cancel()
        for fn in self._on_lost_fns:
            self._call(fn)

    def _call(self, fn: Callable[..., None], *arguments: bool) -> None:
        try:
            fn(*arguments)
        except Exception:
            log.exception("%s: %s failed", self.name, fn)
