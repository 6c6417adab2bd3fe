"""An actor's dispatcher, which gives each message that arrives to its handler, or to the pending
request it answers, and sends the handlers' answers.

A message that comes to nothing is counted and logged, and its sender is told if a reply is
expected.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

from msgspec import Struct

from zrt.runtime.actor.envelope import Answer, Bare, Envelope, Handler, Reply
from zrt.runtime.actor.log_limiter import LogLimiter
from zrt.runtime.actor.pending import PendingRequests
from zrt.runtime.actor.tasks import Tasks
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.control import Control, Done, Failed, Fault
from zrt.runtime.messages.header import PROTOCOL, Header, Step
from zrt.runtime.messages.inference import InferenceRequest
from zrt.runtime.messages.layers import LayerMessage
from zrt.runtime.messages.ranks import RankMessage
from zrt.runtime.transport.link import Link
from zrt.runtime.transport.mailbox import Mailbox
from zrt.runtime.transport.outbox import Frames
from zrt.runtime.wire.decode_errors import WireError
from zrt.runtime.wire.envelopes import Body, decode, encode


class Counters(Struct):
    """Counts of the messages that came to nothing since the start."""

    undecodable: int = 0
    refused: int = 0  # of a type nobody handles
    stale: int = 0  # meant for, or from, another incarnation
    dropped: int = 0  # replies nobody waits for, and replies to peers that are gone or do not read
    failed: int = 0  # tells and bare messages whose handler raised


class Dispatcher:
    """The dispatcher of the actor called `name`. It works from `open` to `close`, once for each
    incarnation; messages that arrive outside of that are dropped.

    `handlers` maps types of bodies to their handlers, `bare` gets the single-frame messages,
    `pending` holds the actor's requests.
    """

    def __init__(self, name: str, pending: PendingRequests, log_limiter: LogLimiter) -> None:
        self.counters = Counters()
        self.handlers: dict[type, Handler[Any]] = {}
        self.bare: Callable[[Bare], None] | None = None
        self._name = name
        self._pending = pending
        self._log_limiter = log_limiter
        self._open = False

    def open(self, incarnation: int, mailbox: Mailbox, tasks: Tasks) -> None:
        """Begin an incarnation: answers are sent through `mailbox`, and handlers that wait run in
        `tasks`."""
        self._incarnation = incarnation
        self._mailbox = mailbox
        self._tasks = tasks
        self._open = True

    def close(self) -> None:
        self._open = False

    # ---- what arrives ----------------------------------------------------------------------------

    def on_frames(self, frames: Frames) -> None:
        """Dispatch a multipart message from the mailbox: the peer's routing id, then a bare
        message, or a header and what follows it."""
        if not self._open:
            return
        peer = bytes(frames[0])
        if len(frames) == 2 or (len(frames) == 3 and not len(frames[1])):
            if self.bare is None:
                self.counters.refused += 1
                self._log_limiter.add("bare", "a bare message arrived, and this actor takes none")
            else:
                self._call_bare(self.bare, Bare(peer, frames[-1], len(frames) == 3))
            return
        try:
            header, body = decode(frames[1:])
        except WireError as error:
            self._undecodable(error, peer)
            return
        if header.to not in (0, self._incarnation):
            self.counters.stale += 1
        elif header.reply:
            self.counters.dropped += 1
        else:
            self.dispatch(Envelope(header, body, peer))

    def _call_bare(self, fn: Callable[[Bare], None], bare: Bare) -> None:
        try:
            fn(bare)
        except Exception as error:
            self.counters.failed += 1
            self._log_limiter.add(f"bare {type(error).__name__}", "handling a bare message failed", error)

    def on_reply(self, link: Link, frames: Frames) -> None:
        """Give a multipart message that came back over one of the actor's links to the request it
        answers."""
        if not self._open:
            return
        try:
            header, body = decode(frames)
        except WireError as error:
            self._undecodable(error, b"")
            if error.header is not None:  # whoever waits for it need not wait until the deadline
                fault = Fault(error.kind, f"the reply does not decode: {error.message}", self._name)
                self._pending.settle(link, Envelope(error.header, Failed(fault), b""))
            return
        if header.to not in (0, self._incarnation):
            self.counters.stale += 1
            return
        outcome = self._pending.settle(link, Envelope(header, body, b""))
        if outcome == "stale":
            self.counters.stale += 1
        elif outcome == "unknown":
            self.counters.dropped += 1
            if isinstance(body, Failed):
                self._log_limiter.add("fault", f"{header.sender} says {body.fault}")

    def _undecodable(self, error: WireError, peer: bytes) -> None:
        """Count a message that does not decode, and tell its sender where there is one; an error is
        never answered with an error."""
        header = error.header
        if header is not None and header.to not in (0, self._incarnation):
            self.counters.stale += 1
            return
        self.counters.undecodable += 1
        self._log_limiter.add("undecodable", f"a message from {peer!r} does not decode: {error}")
        if peer and not (header is not None and header.reply):
            self._reply(peer, header, Failed(Fault(error.kind, error.message, self._name)))

    def dispatch(self, envelope: Envelope) -> None:
        """Call the handler for the type of the envelope's body, and answer with its result, now or
        once it ends."""
        handler = self.handlers.get(type(envelope.body))
        if handler is None:
            self.counters.refused += 1
            what = type(envelope.body).__name__
            self._log_limiter.add(what, f"nobody handles {what} here")
            self._answer(envelope, Failed(Fault("unknown_op", f"{what} is not for this actor", self._name)))
            return
        try:
            answer = handler(envelope.body, envelope)
            if answer is None or isinstance(answer, Struct | Reply):
                self._answer(envelope, answer or Done())
            else:
                self._tasks.spawn(
                    self._handle_later(envelope, answer), f"handle {type(envelope.body).__name__}", awaits=answer
                )
        except Exception as error:
            self._raised(envelope, error)

    async def _handle_later(self, envelope: Envelope, answer: Awaitable[Answer]) -> None:
        try:
            body = await answer
        except Exception as error:
            self._raised(envelope, error)
        else:
            self._answer(envelope, body or Done())

    def _raised(self, envelope: Envelope, error: Exception) -> None:
        what = type(envelope.body).__name__
        if not isinstance(error, ZrtError):
            self._log_limiter.add(f"{what} {type(error).__name__}", f"handling {what} failed", error)
            error = ZrtError("internal", f"handling {what} failed: {type(error).__name__}: {error}", self._name)
        elif not envelope.header.request:
            self._log_limiter.add(
                f"{what} {error.kind}", f"{what} from {envelope.header.sender} came to nothing: {error}"
            )
        if not envelope.header.request:
            self.counters.failed += 1
        self._answer(envelope, Failed(Fault(error.kind, error.message, error.where or self._name)))

    # ---- what is answered ------------------------------------------------------------------------

    def _answer(
        self, envelope: Envelope, answer: Control | InferenceRequest | RankMessage | LayerMessage | Reply
    ) -> None:
        body, steps = answer if isinstance(answer, Reply) else (cast(Body, answer), [])
        if envelope.header.request and not self._reply(envelope.peer, envelope.header, body, steps):
            self.counters.dropped += 1

    def _reply(self, peer: bytes, header: Header | None, body: Body, steps: Sequence[Step] = ()) -> bool:
        to, request = (header.incarnation, header.request) if header else (0, 0)
        head = Header(PROTOCOL, self._name, self._incarnation, to, request=request, reply=True, steps=list(steps))
        try:
            return self._mailbox.send(encode(head, body), peer)
        except ZrtError as error:
            self._log_limiter.add("reply", f"a reply to {peer!r} was not sent: {error}")
            if error.kind != "too_large" or (isinstance(body, Failed) and body.fault.kind == "too_large"):
                return False
            return self._reply(peer, header, Failed(Fault(error.kind, error.message, self._name)))
