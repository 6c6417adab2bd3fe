"""A link: our DEALER to one peer's mailbox, and what libzmq reports of its connection."""

import asyncio
import struct
from typing import Final, Protocol

import zmq

from zrt.runtime.errors import Kind, ZrtError
from zrt.runtime.transport.mailbox import Mailbox
from zrt.runtime.transport.outbox import Frames
from zrt.runtime.transport.sockets import Socket, Sockets, descriptor

RETRY_FIRST_S: Final = 0.05
RETRY_MOST_S: Final = 1.0

_DONTWAIT: Final = int(zmq.DONTWAIT)
_EVENT: Final = struct.Struct("=Hi")
_UP: Final = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)


class LinkOwner(Protocol):
    """Whoever a link belongs to."""

    def new_routing_id(self) -> bytes:
        """Return a routing id for the link's next DEALER, never used before."""

    def on_link_message(self, link: "Link", frames: Frames) -> None:
        """Take a message that came over the link."""

    def on_link_up(self, link: "Link") -> None:
        """Hear that the link is connected."""

    def on_link_down(self, link: "Link") -> None:
        """Hear that the link's connection is gone, or could not be made."""


class Link:
    """A connection to the ROUTER at `endpoint`. Each DEALER lives for one connection and has a
    routing id of its own.

    The owner's `on_link_down` is called once when the connection breaks, cannot be made, or is not
    ZMTP, after everything that had arrived was handed to `on_link_message`. By default that is the
    end of the link. With `reconnect`, for an endpoint that is configured and so may come back, a
    new DEALER tries again, 50 ms to 1 s apart; `send` refuses while it is not up, so that nothing
    meant for one process reaches the next. `lost_kind` is the kind of error a lost peer means.
    """

    def __init__(
        self,
        sockets: Sockets,
        endpoint: str,
        owner: LinkOwner,
        *,
        limit: int,
        reconnect: bool = False,
        lost_kind: Kind = "stage_lost",
    ) -> None:
        self.endpoint = endpoint
        self.up = False
        self.closed = False
        self.lost_kind: Kind = lost_kind
        self._sockets = sockets
        self._owner = owner
        self._limit = limit
        self._reconnect = reconnect
        self._pause = RETRY_FIRST_S
        self._loop = asyncio.get_running_loop()
        self._again: asyncio.TimerHandle | None = None
        self._dealer: Socket | None = None
        self._open()  # ZrtError as for Sockets.dealer

    def send(self, frames: Frames) -> None:
        """Send a message. ZrtError `lost_kind`: not connected; overloaded, too_large: as for
        `Mailbox.send`."""
        if self._dealer is None or (self._reconnect and not self.up):
            raise self.lost()
        self._mailbox.send(frames)

    async def room(self, timeout: float) -> None:
        """Wait until the peer's outbox is at most half full, as `Mailbox.room` does. ZrtError
        `lost_kind`: not connected."""
        if self._dealer is None:
            raise self.lost()
        await self._mailbox.room(timeout)

    def renew(self) -> None:
        """Treat the connection as broken, since nothing comes over it."""
        if self._dealer is not None:
            self._over()

    def lost(self) -> ZrtError:
        return ZrtError(self.lost_kind, f"no connection to {self.endpoint}")

    def close(self) -> None:
        """Close the link for good, without calling `on_down`."""
        self.closed = True
        self._shut()
        if self._again is not None:
            self._again.cancel()

    def _open(self) -> None:
        self._again = None
        self._dealer, self._monitor = self._sockets.dealer(
            self._owner.new_routing_id(), self.endpoint, limit=self._limit
        )
        self._mailbox = Mailbox(self._dealer, self._hand_on, routed=False, limit=self._limit)
        self._watched = descriptor(self._monitor)
        self._loop.add_reader(self._watched, self._watch)
        self._loop.call_soon(self._watch)
        # Some strangers (an HTTP server) pass for a peer of ZMTP's first version and are never
        # reported.
        self._patience = self._loop.call_later(self._sockets.connect_ms / 1000, self._over)

    def _hand_on(self, frames: Frames) -> None:
        self._owner.on_link_message(self, frames)

    def _watch(self) -> None:
        """Read the connection's events. There is only a handful of them in its life, so they are
        read without giving the loop its turn."""
        while self._dealer is not None:
            try:
                report = self._monitor.recv_multipart(_DONTWAIT)
            except zmq.Again:
                return
            if _EVENT.unpack(report[0])[0] != _UP:
                self._over()
            elif not self.up:
                self.up = True
                self._patience.cancel()
                self._pause = RETRY_FIRST_S
                self._owner.on_link_up(self)

    def _over(self) -> None:
        # The last words of a peer that has gone may still be unread: a reply beats the news of its
        # sender's death.
        self._mailbox.drain()
        if self.closed:
            return
        self._shut()
        if self._reconnect:
            self._later()
        else:
            self.closed = True
        self._owner.on_link_down(self)

    def _later(self) -> None:
        self._again = self._loop.call_later(self._pause, self._try_again)
        self._pause = min(2 * self._pause, RETRY_MOST_S)

    def _try_again(self) -> None:
        try:
            self._open()
        except ZrtError:  # no descriptor is left, for now
            self._later()

    def _shut(self) -> None:
        self.up = False
        if self._dealer is None:
            return
        self._patience.cancel()
        self._loop.remove_reader(self._watched)
        self._dealer.disable_monitor()
        self._monitor.close(linger=0)
        self._dealer = None
        self._mailbox.close(self.lost())
