"""The requests of an actor that wait for their replies, and the ways each can end: its reply, its
deadline, or the loss of the peer it was sent to."""

import asyncio
from collections.abc import Callable
from typing import Final, Literal, NamedTuple

from zrt.runtime.actor.envelope import Envelope
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.control import Address, Failed
from zrt.runtime.transport.link import Link

MOST: Final = 4096
"""The most requests one actor may have pending."""


class _PendingRequest(NamedTuple):
    reply: "asyncio.Future[Envelope]"
    link: Link
    to: Address
    text: str


class PendingRequests:
    """The pending requests of one actor. Their ids are never used twice, so a late reply matches no
    other request."""

    def __init__(self) -> None:
        self._open: dict[int, _PendingRequest] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._open)

    async def ask(self, link: Link, to: Address, what: str, timeout: float, send: Callable[[int], None]) -> Envelope:
        """Send a request with `send(id)` and wait for its reply.

        ZrtError: the one the peer answered with; deadline after `timeout` seconds; the link's
        `lost_kind`; overloaded: MOST are open; what `send` raises.
        """
        if len(self._open) >= MOST:
            raise ZrtError("overloaded", f"{MOST} requests are pending already")
        loop = asyncio.get_running_loop()
        self._serial += 1
        request = self._serial
        pending = _PendingRequest(
            loop.create_future(), link, to, f"{to.name} did not answer {what} within {timeout:g} s"
        )
        self._open[request] = pending
        # What has arrived may be due to be read on the loop's next turn, and some loops look at
        # their timers before that.
        timer = loop.call_later(timeout, loop.call_soon, self._expire, pending)
        try:
            send(request)
            return await pending.reply
        finally:
            timer.cancel()
            del self._open[request]
            del pending  # else its error's traceback holds this frame, and this frame the error

    def settle(self, link: Link, reply: Envelope) -> Literal["answered", "unknown", "stale"]:
        """Give a reply to its request; return "unknown" if no request waits for it on this link,
        "stale" if it comes from another incarnation."""
        pending = self._open.get(reply.header.request) if reply.header.reply else None
        if pending is None or pending.link is not link or pending.reply.done():
            return "unknown"
        if pending.to.incarnation not in (0, reply.header.incarnation):
            return "stale"
        if isinstance(reply.body, Failed):
            fault = reply.body.fault
            pending.reply.set_exception(ZrtError.of(fault.kind, fault.message, fault.where or reply.header.sender))
        else:
            pending.reply.set_result(reply)
        return "answered"

    def fail(self, error: ZrtError, link: Link | None = None) -> None:
        """Fail the pending requests with `error`: all, or those sent over `link`."""
        for pending in self._open.values():
            if link in (None, pending.link) and not pending.reply.done():
                pending.reply.set_exception(error.anew())

    def _expire(self, pending: _PendingRequest) -> None:
        if not pending.reply.done():
            pending.reply.set_exception(ZrtError("deadline", pending.text))
