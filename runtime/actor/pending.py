"""The questions an actor has open, and the ways each can end: its reply, its deadline, or the loss
of whom it was put to."""

import asyncio
from collections.abc import Callable
from typing import Final, Literal, NamedTuple

from zrt.runtime.actor.envelope import Envelope
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.control import Address, Failed
from zrt.runtime.transport.link import Link

MOST: Final = 4096
"""Questions one actor may have open."""


class _PendingRequest(NamedTuple):
    reply: "asyncio.Future[Envelope]"
    link: Link
    to: Address
    text: str


class PendingRequests:
    """Request ids are never used twice, so a late reply meets no question."""

    def __init__(self) -> None:
        self._open: dict[int, _PendingRequest] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._open)

    async def ask(self, link: Link, to: Address, what: str, timeout: float, send: Callable[[int], None]) -> Envelope:
        """`send(request)` the question and wait for its reply.

        ZrtError: the peer's own; deadline after `timeout` seconds; the link's `lost_kind`;
        overloaded: MOST are open; what `send` raises.
        """
        if len(self._open) >= MOST:
            raise ZrtError("overloaded", f"{MOST} questions are open already")
        loop = asyncio.get_running_loop()
        self._serial += 1
        request = self._serial
        question = _PendingRequest(
            loop.create_future(), link, to, f"{to.name} did not answer {what} within {timeout:g} s"
        )
        self._open[request] = question
        # What has arrived may be due to be read on the loop's next turn, and some loops look at
        # their timers before that.
        timer = loop.call_later(timeout, loop.call_soon, self._expire, question)
        try:
            send(request)
            return await question.reply
        finally:
            timer.cancel()
            del self._open[request]
            del question  # its error would know itself by this frame, and all who wait for it

    def settle(self, link: Link, reply: Envelope) -> Literal["answered", "unknown", "stale"]:
        """Give a reply to its question: unknown if none waits for it on this link, stale if it
        comes from another incarnation."""
        question = self._open.get(reply.header.request) if reply.header.reply else None
        if question is None or question.link is not link or question.reply.done():
            return "unknown"
        if question.to.incarnation not in (0, reply.header.incarnation):
            return "stale"
        if isinstance(reply.body, Failed):
            fault = reply.body.fault
            question.reply.set_exception(ZrtError.of(fault.kind, fault.message, fault.where or reply.header.sender))
        else:
            question.reply.set_result(reply)
        return "answered"

    def fail(self, error: ZrtError, link: Link | None = None) -> None:
        """End all questions, or those put over one link."""
        for question in self._open.values():
            if link in (None, question.link) and not question.reply.done():
                question.reply.set_exception(error.anew())

    def _expire(self, question: _PendingRequest) -> None:
        if not question.reply.done():
            question.reply.set_exception(ZrtError("deadline", question.text))
