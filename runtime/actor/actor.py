"""An actor: a mailbox others send to, links to others, handlers by message type (dispatcher.py),
pending requests with deadlines, and tasks it owns."""

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

from msgspec import Struct

from zrt.runtime.actor.dispatcher import Dispatcher
from zrt.runtime.actor.envelope import Bare, Envelope, Handler
from zrt.runtime.actor.link_pool import LinkPool, RoutingIds
from zrt.runtime.actor.log_limiter import LogLimiter
from zrt.runtime.actor.pending import PendingRequests
from zrt.runtime.actor.tasks import Tasks
from zrt.runtime.actor.timers import Lateness, Periodic
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.control import Address
from zrt.runtime.messages.header import PROTOCOL, HandedOver, Header, Step
from zrt.runtime.transport.link import Link
from zrt.runtime.transport.mailbox import Mailbox
from zrt.runtime.transport.sockets import Sockets
from zrt.runtime.wire.envelopes import Body, encode
from zrt.runtime.wire.limits import MAX_FRAME

log = logging.getLogger(__name__)

STOP_S: Final = 5.0
"""How long the tasks an actor owns may take to end."""

_T = TypeVar("_T")
_S = TypeVar("_S", bound=Struct)


class Actor:
    """A participant in the cluster: its mailbox, links, handlers and tasks. `name` has 1 to 64
    bytes of UTF-8; frames over `limit` bytes are refused, sent or received.

    `listen` is where the mailbox binds (port 0: a free one), `advertise` what others connect to
    where that differs. Everything runs on one loop and one thread. An actor may be started again
    after it was stopped, as a new incarnation.
    """

    def __init__(
        self,
        name: str,
        *,
        listen: str = "tcp://127.0.0.1:0",
        advertise: str | None = None,
        limit: int = MAX_FRAME,
    ) -> None:
        if not 1 <= len(name.encode()) <= 64:
            raise ZrtError("bad_config", f"an actor's name has 1 to 64 bytes, got {name!r}")
        self.name = name
        self.incarnation = 0
        self.endpoint = ""
        self.ended = asyncio.Event()
        self.failed = False
        self.status = 0
        """The exit status of the actor's process, if it ends in good order."""
        self.restarts = 0
        """How often a parent has started the actor's process again."""
        self._listen = listen
        self._advertise = advertise
        self._limit = limit
        self._mourners: list[Callable[[Address], None]] = []
        self._sockets: Sockets | None = None
        self._pending = PendingRequests()
        self._tasks = Tasks(name)
        self._periodics: list[Periodic] = []
        self._lateness = Lateness()
        self._log_limiter = LogLimiter(name)
        self._dispatcher = Dispatcher(name, self._pending, self._log_limiter)
        self.counters = self._dispatcher.counters

    @property
    def address(self) -> Address:
        """The address by which others reach this incarnation; valid after `start`."""
        return Address(self.name, self.incarnation, self.endpoint)

    @property
    def lag_ms(self) -> int:
        """The longest delay of a periodic call on this loop, in milliseconds, over the last one to
        two seconds."""
        return int(self._lateness.seconds * 1000)

    # ---- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Bind the mailbox. ZrtError bad_config: the endpoint is taken or not valid."""
        if self._sockets is not None:
            raise ZrtError("internal", "the actor has been started already", self.name)
        self._loop = asyncio.get_running_loop()
        self.incarnation = secrets.randbelow(2**63 - 1) + 1
        sockets = Sockets()
        try:
            router, self.endpoint = sockets.router(self._listen, self._advertise, limit=self._limit)
        except ZrtError:
            await sockets.close()
            raise
        self._sockets = sockets
        self._tasks = Tasks(self.name)
        self._routing_ids = RoutingIds(self.name, self.incarnation)
        self._link_pool = LinkPool(sockets, self._routing_ids, self._dispatcher, self._on_lost)
        self._mailbox = Mailbox(router, self._dispatcher.on_frames, routed=True, limit=self._limit)
        self._dispatcher.open(self.incarnation, self._mailbox, self._tasks)

    async def there(self) -> None:
        """Wait until others can find this actor: from the start on, unless a subclass waits for
        more."""

    async def stop(self) -> None:
        """End what the actor owns: timers, tasks (cancelled and awaited), pending requests
        (`cancelled`), sockets."""
        sockets, self._sockets = self._sockets, None
        if sockets is None:
            return
        self._dispatcher.close()
        for periodic in self._periodics:
            periodic.cancel()
        self._periodics.clear()
        await self._tasks.close(STOP_S)
        stopping = ZrtError("cancelled", "the actor is stopping", self.name)
        self._pending.fail(stopping)
        self._link_pool.close()
        self._mailbox.close(stopping)
        await sockets.close()

    def spawn(self, coro: Coroutine[Any, Any, _T], name: str) -> "asyncio.Task[_T]":
        """Run a task that the actor owns: an exception is logged, `stop` cancels and awaits the
        task.

        ZrtError cancelled: the actor is stopping; overloaded: too many are running.
        """
        return self._tasks.spawn(coro, name)

    def depend(self, coro: Coroutine[Any, Any, None], name: str) -> None:
        """Run a task that the actor cannot do without: if the task fails, the actor ends (`ended`,
        `failed`) rather than idle on."""

        def over(task: "asyncio.Task[None]") -> None:
            if not task.cancelled() and task.exception() is not None:
                self.failed = True
                self.ended.set()

        self.spawn(coro, name).add_done_callback(over)

    def every(self, seconds: float, fn: Callable[[], None]) -> Periodic:
        """Call `fn` every `seconds` on the loop until `stop` or the returned object's `cancel()`;
        delays count in `lag_ms`."""
        periodic = Periodic(seconds, fn, self._lateness)
        self._periodics = [*(known for known in self._periodics if not known.cancelled), periodic]
        return periodic

    # ---- what others send ------------------------------------------------------------------------

    def handle(self, body_type: type[_S], fn: Handler[_S]) -> None:
        """Call `fn(body, envelope)` for every message with a body of `body_type`, in order of
        arrival. If `fn` is a coroutine function, each call runs as a task of its own.

        A request gets what `fn` returns as its reply (`Done` for None), or `Failed` when `fn`
        raises: a ZrtError as it is, anything else as `internal`, with the traceback logged. A
        message that expects no reply (`tell`) and whose handler raises is counted and logged.
        """
        self._dispatcher.handlers[body_type] = fn

    def handle_bare(self, fn: Callable[[Bare], None]) -> None:
        """Call `fn(bare)` for every single-frame message."""
        self._dispatcher.bare = fn

    def on_peer_death(self, fn: Callable[[Address], None]) -> None:
        """Call `fn(address)` once for each incarnation whose link broke or could not be made."""
        self._mourners.append(fn)

    # ---- what we send ----------------------------------------------------------------------------

    def tell(
        self,
        to: Address,
        body: Body,
        *,
        steps: Sequence[Step] = (),
        dtype: str = "",
        model: str = "",
        near: str = "",
        handed: HandedOver | None = None,
    ) -> None:
        """Send a message and expect no reply; the keywords are fields of the header. Order is kept
        per peer; nothing is lost while the connection lives.

        ZrtError overloaded: the peer's outbox is full (see `room`); stage_lost: its connection
        broke; too_large.
        """
        self._tell(self._link(to), to, body, model=model, dtype=dtype, steps=list(steps), near=near, handed=handed)

    async def ask(
        self, to: Address, body: Body, *, timeout: float, model: str = "", steps: Sequence[Step] = ()
    ) -> Envelope:
        """Send a request and wait for its reply.

        ZrtError: what the peer answered with `Failed`; deadline after `timeout` seconds; stage_lost
        when the peer's connection breaks meanwhile; overloaded when its outbox is full or 4,096
        requests are pending; too_large.
        """
        return await self._ask(self._link(to), to, body, timeout, model, steps)

    def reply_bare(self, bare: Bare, frame: bytes) -> bool:
        """Send an answer to a bare message, any number of times; return False if the peer is gone.
        ZrtError overloaded, too_large."""
        return self._mailbox.send([b"", frame] if bare.echo else [frame], bare.peer)

    def behind(self, bare: Bare) -> bool:
        """Return whether the sender of `bare` has yet to take earlier answers."""
        return self._mailbox.behind(bare.peer)

    async def room(self, to: Address | bytes, *, timeout: float) -> None:
        """Wait until the outbox of a peer (its address, or its routing id at our mailbox) is at
        most half full.

        All who wait go on at once, so the next send can still be refused. ZrtError deadline,
        stage_lost.
        """
        if isinstance(to, bytes):
            await self._mailbox.room(timeout, to)
        else:
            await self._link(to).room(timeout)

    def watch(self, to: Address) -> None:
        """Open a link to a peer, even if nothing is sent over it, so that the peer's death is
        noticed."""
        self._link(to)

    def forget(self, to: Address) -> None:
        """Close the link to a peer, if there is one: drop what waits for the peer, fail the
        requests pending there, and report no death."""
        if self._sockets is not None and (link := self._link_pool.forget(to)) is not None:
            self._pending.fail(link.lost(), link)

    def _tell(self, link: Link, to: Address, body: Body, **fields: Any) -> None:
        link.send(encode(Header(PROTOCOL, self.name, self.incarnation, to.incarnation, **fields), body))

    async def _ask(
        self, link: Link, to: Address, body: Body, timeout: float, model: str = "", steps: Sequence[Step] = ()
    ) -> Envelope:
        def send(request: int) -> None:
            silence_ms = int(timeout * 1000)
            self._tell(link, to, body, request=request, model=model, silence_ms=silence_ms, steps=list(steps))

        return await self._pending.ask(link, to, type(body).__name__, timeout, send)

    def _link(self, to: Address) -> Link:
        if self._sockets is None:
            raise ZrtError("cancelled", "the actor is not running", self.name)
        return self._link_pool.get(to)

    def _on_lost(self, address: Address, link: Link, news: bool) -> None:
        self._pending.fail(link.lost(), link)
        for mourner in self._mourners if news else ():
            try:
                mourner(address)
            except Exception:
                log.exception("%s: the death of %s could not be handled", self.name, address.name)
