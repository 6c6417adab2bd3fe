"""A client's connection to a coordinator, made again when it breaks, and the requests that are open
over it."""

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Final, Self

from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.client import Cancel, ClientEvent, ClientRequest, Error
from zrt.runtime.transport.link import Link
from zrt.runtime.transport.outbox import Frames
from zrt.runtime.transport.sockets import Sockets
from zrt.runtime.wire.clients import decode_event, encode_client
from zrt.runtime.wire.limits import MAX_CLIENT_FRAME

CONNECT_S: Final = 5.0
SILENCE_S: Final = 10.0
"""How long a cluster may be silent before it counts as lost; it sends something about every live
request once a second."""
STALL_S: Final = 5.0
"""How long a connection may be silent before another one is tried: it may be dead without our
having been told."""

UNREAD_BYTES: Final = 64 << 10
"""The most bytes the kernel holds for a client that is stopped: with more, the cluster would notice
later that the client takes nothing, and compute on for it until then."""


class Connection:
    """A connection to the coordinator at `endpoint`, while the context manager is entered. ZrtError
    coordinator_lost when no coordinator answers."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.open: dict[str, Events] = {}
        self._watchers: list[Callable[[bool], None]] = []
        self._serial = 0

    @property
    def connected(self) -> bool:
        """Whether there is a connection now."""
        return self._link.up

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._first: asyncio.Future[None] = loop.create_future()
        self._up = asyncio.Event()
        self._down = asyncio.Event()
        self._up_since = 0.0
        self._sockets = Sockets(receive_bytes=UNREAD_BYTES)
        try:
            self._link = Link(
                self._sockets,
                self.endpoint,
                self,
                limit=MAX_CLIENT_FRAME,
                reconnect=True,
                lost_kind="coordinator_lost",
            )
        except ZrtError:
            await self._sockets.close()
            raise
        try:
            async with asyncio.timeout(CONNECT_S):
                await self._first
        except (TimeoutError, ZrtError):
            await self._close()
            text = f"no cluster answers at {self.endpoint}: is it up? `zrt up` starts one"
            raise ZrtError("coordinator_lost", text) from None
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def _close(self) -> None:
        """Cancel the generations that are still open, which nobody reads any more, and close the
        connection."""
        for id_, events in self.open.items():
            if events.abandon:
                with suppress(ZrtError):  # the coordinator is not reached, and will notice by itself that we are gone
                    self.send(Cancel(id=f"cancel-{id_}"[:64], request=id_))
        self._end(ZrtError("cancelled", "the client was closed"))
        await self._sockets.close()

    def _end(self, error: ZrtError) -> None:
        """Close the link for good and fail the open requests."""
        self._link.close()
        for events in self.open.values():
            events.fail(error)

    # ---- for whoever makes requests --------------------------------------------------------------

    def next_id(self) -> str:
        self._serial += 1
        return str(self._serial)

    @contextmanager
    def watched(self, fn: Callable[[bool], None]) -> Iterator[None]:
        """Call `fn(False)` when the connection breaks and `fn(True)` when there is one again, while
        the context is entered."""
        self._watchers.append(fn)
        if not self.connected:
            fn(False)
        try:
            yield
        finally:
            self._watchers.remove(fn)

    async def there(self) -> None:
        """Wait for the connection if it is broken just now. ZrtError coordinator_lost: it cannot be
        made again."""
        if self._link.closed:
            raise self.broken()
        try:
            async with asyncio.timeout(CONNECT_S):
                await self._up.wait()
        except TimeoutError:
            raise self.broken() from None

    def send(self, request: ClientRequest) -> None:
        self._link.send([encode_client(request)])

    # ---- what the link says ----------------------------------------------------------------------

    def new_routing_id(self) -> bytes:
        return b"client." + secrets.token_hex(8).encode()

    def on_link_up(self, link: Link) -> None:
        self._down.clear()
        self._up.set()
        for fn in self._watchers:
            fn(True)
        self._up_since = asyncio.get_running_loop().time()
        if not self._first.done():
            self._first.set_result(None)
        for events in list(self.open.values()):
            events.go_on()

    def on_link_down(self, link: Link) -> None:
        news = self._up.is_set()  # else one more attempt has failed
        self._up.clear()
        self._down.set()
        if not self._first.done():
            self._first.set_exception(self.broken())
        for events in self.open.values():
            events.broke(self.broken())
        for fn in self._watchers if news else ():
            fn(False)

    def _renew_if_stalled(self) -> None:
        """Try another connection if this one has been up for STALL_S; called when nothing came for
        so long."""
        if self._link.up and asyncio.get_running_loop().time() - self._up_since >= STALL_S:
            self._link.renew()

    def broken(self) -> ZrtError:
        return ZrtError("coordinator_lost", f"the connection to {self.endpoint} broke")

    def _silent(self, seconds: float) -> ZrtError:
        if self._link.up:
            return ZrtError("coordinator_lost", f"{self.endpoint} has been silent for {seconds:g} s")
        text = f"the connection to {self.endpoint} broke, and could not be made again for {seconds:g} s"
        return ZrtError("coordinator_lost", text)

    def on_link_message(self, link: Link, frames: Frames) -> None:
        event = decode_event(frames[-1])
        events = self.open.get(event.id)
        if events is not None:
            events.put(event)


class Events:
    """The events of one open request, in order. `abandon`: the request goes on at the cluster until
    it is cancelled. `again()` returns the requests to send over a new connection; without it the
    request ends with its connection. `note(event)` is called with each event as it arrives, and
    returns False for one to be dropped. `patience`: seconds without an event after which the
    cluster counts as lost, at least SILENCE_S."""

    def __init__(
        self,
        connection: Connection,
        id_: str,
        *,
        abandon: bool = False,
        again: Callable[[], Sequence[ClientRequest]] | None = None,
        note: Callable[[ClientEvent], bool] | None = None,
    ) -> None:
        self.abandon = abandon
        self.patience = 0.0
        self._connection = connection
        self._id = id_
        self._again = again
        self._note = note
        self._waiting: deque[ClientEvent] = deque()
        self._failed: ZrtError | None = None
        self._some = asyncio.Event()

    def __enter__(self) -> Self:
        if self._connection._link.closed:
            raise self._connection.broken()
        self._connection.open[self._id] = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.open.pop(self._id, None)

    def put(self, event: ClientEvent) -> None:
        if self._note is None or self._note(event):
            self._waiting.append(event)
            self._some.set()

    def fail(self, error: ZrtError) -> None:
        self._failed = error
        self._some.set()

    def broke(self, error: ZrtError) -> None:
        """Fail the request with `error`, unless it can go on over a new connection."""
        if self._again is None:
            self.fail(error)

    def go_on(self) -> None:
        """Send over the new connection what makes the request go on."""
        try:
            for request in self._again() if self._again is not None else ():
                self._connection.send(request)
        except ZrtError as error:
            if error.kind != "coordinator_lost":  # else the connection is gone again, and the next one sends them
                self.fail(error)

    async def next(self) -> ClientEvent:
        """Return the next event; raise an `error` event. ZrtError coordinator_lost: the connection
        broke for good, or nothing comes over it."""
        loop = asyncio.get_running_loop()
        waited = 0.0
        while not self._waiting:
            if self._failed is not None:
                raise self._failed.anew()
            patience = max(SILENCE_S, self.patience)
            if waited >= patience:
                raise self._connection._silent(patience)
            self._some.clear()
            began, wait = loop.time(), min(patience - waited, STALL_S)
            try:
                async with asyncio.timeout(wait):
                    await self._some.wait()
            except TimeoutError:
                self._connection._renew_if_stalled()
            # if the wait lasted longer, this process was stopped and could not receive anything
            waited += min(wait, loop.time() - began)
        event = self._waiting.popleft()
        if isinstance(event, Error):
            raise ZrtError.of(event.kind, event.message, event.where)
        return event
