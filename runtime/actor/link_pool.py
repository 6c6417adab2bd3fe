"""An actor's links to other actors, by endpoint, and the incarnations that were lost."""

from collections.abc import Callable
from typing import Final

from zrt.runtime.actor.dispatcher import Dispatcher
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.control import Address
from zrt.runtime.transport.link import Link
from zrt.runtime.transport.outbox import Frames
from zrt.runtime.transport.sockets import Sockets
from zrt.runtime.wire.limits import MAX_FRAME

_LOST_KEPT: Final = 1024


class RoutingIds:
    """The routing ids of one incarnation of an actor at its peers' mailboxes, each used once."""

    def __init__(self, name: str, incarnation: int) -> None:
        self._name = name
        self._incarnation = incarnation
        self._serial = 0

    def next(self) -> bytes:
        """Return an id that was not used before."""
        self._serial += 1
        return f"{self._name}.{self._incarnation:x}.{self._serial:x}".encode()


class LinkPool:
    """An actor's links. Their endpoints (port 0) are never bound again once their holder is dead,
    so a broken connection means a lost peer. Replies that come over a link go to `dispatcher`.

    `on_lost(address, link, news)` is called for every link that ends by itself; `news` is true once
    per incarnation. Should the peer live after all (a network that broke), the next `get` connects
    again, and a connection that came up makes it a peer like any other.
    """

    def __init__(
        self,
        sockets: Sockets,
        routing_ids: RoutingIds,
        dispatcher: Dispatcher,
        on_lost: Callable[[Address, Link, bool], None],
    ) -> None:
        self._sockets = sockets
        self._routing_ids = routing_ids
        self._dispatcher = dispatcher
        self._on_lost = on_lost
        self._links: dict[str, tuple[Address, Link]] = {}
        self._lost: dict[int, None] = {}

    def get(self, to: Address) -> Link:
        """Return the link to the incarnation `to` (0: whoever is there), making one if need be.
        ZrtError stage_lost: another incarnation has the endpoint now."""
        known = self._links.get(to.endpoint)
        if known is not None:
            address, link = known
            if to.incarnation in (0, address.incarnation):
                return link
            if address.incarnation == 0:
                self._links[to.endpoint] = to, link
                return link
            if to.incarnation in self._lost:
                raise ZrtError("stage_lost", f"{to.name} is gone: {address.name} has its endpoint now")
            self._end(address, link)  # a port has one holder, so whoever held it before is dead
        link = Link(
            self._sockets,
            to.endpoint,
            self,
            limit=MAX_FRAME,
        )
        self._links[to.endpoint] = to, link
        return link

    def forget(self, to: Address) -> Link | None:
        """Close and return the link to the incarnation `to`, if there is one, without calling
        `on_lost`; forget that the incarnation was lost."""
        self._lost.pop(to.incarnation, None)
        known = self._links.get(to.endpoint)
        if known is None or known[0].incarnation not in (0, to.incarnation):
            return None
        del self._links[to.endpoint]
        known[1].close()
        return known[1]

    def close(self) -> None:
        for _, link in self._links.values():
            link.close()
        self._links.clear()

    def new_routing_id(self) -> bytes:
        return self._routing_ids.next()

    def on_link_message(self, link: Link, frames: Frames) -> None:
        self._dispatcher.on_reply(link, frames)

    def on_link_up(self, link: Link) -> None:
        address, current = self._links[link.endpoint]
        if current is link:
            self._lost.pop(address.incarnation, None)

    def on_link_down(self, link: Link) -> None:
        self._end(self._links[link.endpoint][0], link)

    def _end(self, address: Address, link: Link) -> None:
        del self._links[address.endpoint]
        link.close()
        news = address.incarnation not in self._lost
        if address.incarnation and news:
            self._lost[address.incarnation] = None
            if len(self._lost) > _LOST_KEPT:
                del self._lost[next(iter(self._lost))]
        self._on_lost(address, link, news)
