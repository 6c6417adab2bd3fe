"""An actor: a mailbox others send to, links to others, handlers by message type, questions with deadlines, and tasks it owns."""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final, TypeAlias, TypeVar, cast

from msgspec import Struct

from zrt.runtime.complaints import Complaints
from zrt.runtime.envelope import Bare, Envelope, Reply
from zrt.runtime.errors import ZrtError
from zrt.runtime.link import Link
from zrt.runtime.links import Links
from zrt.runtime.mailbox import Mailbox
from zrt.runtime.messages.control import Address, Control, Done, Failed, Fault
from zrt.runtime.messages.header import PROTOCOL, HandedOver, Header, Step
from zrt.runtime.messages.inference import InferenceRequest
from zrt.runtime.messages.layers import LayerMessage
from zrt.runtime.messages.ranks import RankMessage
from zrt.runtime.outbox import Frames
from zrt.runtime.periodic import Lateness, Periodic
from zrt.runtime.questions import Questions
from zrt.runtime.refusal import WireError
from zrt.runtime.sockets import Sockets
from zrt.runtime.tasks import Tasks
from zrt.runtime.wire import MAX_FRAME, Body, decode, encode

__all__ = ["Actor", "Answer", "Bare", "Counters", "Envelope", "Handler", "Reply"]

log = logging.getLogger(__name__)

STOP_S: Final = 5.0
"""How long the tasks an actor owns may take to end."""

_T = TypeVar("_T")


class Counters(Struct):
    """Messages that came to nothing, since the start."""

    undecodable: int = 0
    refused: int = 0  # of a type nobody handles
    stale: int = 0  # meant for, or from, another incarnation
    dropped: int = 0  # replies nobody waits for, and replies to peers that are gone or do not read
    failed: int = 0  # tells and bare messages whose handler raised


Answer: TypeAlias = Control | InferenceRequest | RankMessage | LayerMessage | Reply | None
Handler: TypeAlias = Callable[[Envelope], Answer | Awaitable[Answer]]


class Actor:
    """A process's place in the cluster. `name` is 1 to 64 characters; frames over `limit` bytes are refused either way.

    `listen` is where the mailbox binds (port 0: a free one), `advertise` what others connect to where that differs.
    Everything runs on one loop and one thread. An actor may be started again after it was stopped, as a new incarnation.
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
        self.counters = Counters()
        self.ended = asyncio.Event()
        self.failed = False
        self._listen = listen
        self._advertise = advertise
        self._limit = limit
        self._handlers: dict[type, Handler] = {}
        self._bare: Callable[[Bare], None] | None = None
        self._mourners: list[Callable[[Address], None]] = []
        self._sockets: Sockets | None = None
        self._questions = Questions()
        self._serial = 0
        self._tasks = Tasks(name)
        self._periodics: list[Periodic] = []
        self._lateness = Lateness()
        self._complaints = Complaints(name)

    @property
    def address(self) -> Address:
        """How others reach this incarnation; after `start`."""
        return Address(self.name, self.incarnation, self.endpoint)

    @property
    def lag_ms(self) -> int:
        """How late this loop was at worst with what it does periodically, over the last one to two seconds."""
        return int(self._lateness.seconds * 1000)

    # ---- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Bind the mailbox. ZrtError bad_config: the endpoint is taken or is none."""
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
        self._links = Links(sockets, self._routing_id, self._on_reply, self._on_lost)
        self._mailbox = Mailbox(router, self._on_frames, routed=True, limit=self._limit)

    async def there(self) -> None:
        """Wait until others can find this actor: once it has started, unless a subclass knows better."""

    async def stop(self) -> None:
        """End what the actor owns: timers, tasks (cancelled and awaited), open questions (`cancelled`), sockets."""
        sockets, self._sockets = self._sockets, None
        if sockets is None:
            return
        for periodic in self._periodics:
            periodic.cancel()
        self._periodics.clear()
        await self._tasks.close(STOP_S)
        stopping = ZrtError("cancelled", "the actor is stopping", self.name)
        self._questions.fail(stopping)
        self._links.close()
        self._mailbox.close(stopping)
        await sockets.close()

    def spawn(self, coro: Coroutine[Any, Any, _T], name: str) -> "asyncio.Task[_T]":
        """A task the actor owns: an exception is logged, `stop` cancels and awaits it.

        ZrtError cancelled: the actor is stopping; overloaded: too many are running.
        """
        return self._tasks.spawn(coro, name)

    def depend(self, coro: Coroutine[Any, Any, None], name: str) -> None:
        """As `spawn`, for a task the actor is of no use without: if it fails, the actor ends (`ended`, `failed`), rather than live on idle."""

        def over(task: "asyncio.Task[None]") -> None:
            if not task.cancelled() and task.exception() is not None:
                self.failed = True
                self.ended.set()

        self.spawn(coro, name).add_done_callback(over)

    def every(self, seconds: float, fn: Callable[[], None]) -> Periodic:
        """Call `fn` every `seconds` on the loop until `stop` or its `cancel()`; how late it was goes into `lag_ms`."""
        periodic = Periodic(seconds, fn, self._lateness)
        self._periodics = [*(known for known in self._periodics if not known.cancelled), periodic]
        return periodic

    # ---- what others send -------------------------------------------------------------------------------------------

    def handle(self, body_type: type[Struct], fn: Handler) -> None:
        """`fn` gets every message with such a body, in order of arrival. If it is a coroutine function, each call runs as a task of its own.

        A question gets what `fn` returns as its reply (`Done` for None), or `Failed` when it raises: ZrtError as it is, anything else as
        `internal`, with the traceback logged. A tell whose handler raises is counted and logged.
        """
        self._handlers[body_type] = fn

    def handle_bare(self, fn: Callable[[Bare], None]) -> None:
        """`fn` gets every single-frame message."""
        self._bare = fn

    def on_peer_death(self, fn: Callable[[Address], None]) -> None:
        """`fn` is told of each incarnation we had a link to whose connection broke or could not be made, once."""
        self._mourners.append(fn)

    # ---- what we send -----------------------------------------------------------------------------------------------

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
        """Send and expect nothing; the words are the header's. Order is kept per peer; nothing is lost while the connection lives.

        ZrtError overloaded: the peer's outbox is full (see `room`); stage_lost: its connection broke; too_large.
        """
        self._tell(self._link(to), to, body, model=model, dtype=dtype, steps=list(steps), near=near, handed=handed)

    async def ask(
        self, to: Address, body: Body, *, timeout: float, model: str = "", steps: Sequence[Step] = ()
    ) -> Envelope:
        """Send a question and wait for its reply.

        ZrtError: what the peer answered with `Failed`; deadline after `timeout` seconds; stage_lost when the peer's connection breaks
        meanwhile; overloaded when its outbox is full or 4,096 questions are open; too_large.
        """
        return await self._ask(self._link(to), to, body, timeout, model, steps)

    def reply_bare(self, bare: Bare, frame: bytes) -> bool:
        """Answer a bare message; any number of times. False if the peer is gone. ZrtError overloaded, too_large."""
        return self._mailbox.send([b"", frame] if bare.echo else [frame], bare.peer)

    def behind(self, bare: Bare) -> bool:
        """Whether the peer has yet to take earlier answers."""
        return self._mailbox.behind(bare.peer)

    async def room(self, to: Address | bytes, *, timeout: float) -> None:
        """Wait until the outbox of a peer (its address, or its routing id at our mailbox) is at most half full.

        All who wait go on at once, so the next send can still be refused. ZrtError deadline, stage_lost.
        """
        if isinstance(to, bytes):
            await self._mailbox.room(timeout, to)
        else:
            await self._link(to).room(timeout)

    def watch(self, to: Address) -> None:
        """Have a link to it, although nothing is said over it: its death is told."""
        self._link(to)

    def forget(self, to: Address) -> None:
        """Close the link, if there is one: what waits for the peer is dropped, open questions fail, no death is told."""
        if self._sockets is not None and (link := self._links.forget(to)) is not None:
            self._questions.fail(link.lost(), link)

    def _tell(self, link: Link, to: Address, body: Body, **fields: Any) -> None:
        link.send(encode(self._header(to.incarnation, **fields), body))

    def _header(self, to: int, **fields: Any) -> Header:
        return Header(PROTOCOL, self.name, self.incarnation, to, **fields)

    async def _ask(
        self, link: Link, to: Address, body: Body, timeout: float, model: str = "", steps: Sequence[Step] = ()
    ) -> Envelope:
        def send(request: int) -> None:
            silence_ms = int(timeout * 1000)
            self._tell(link, to, body, request=request, model=model, silence_ms=silence_ms, steps=list(steps))

        return await self._questions.ask(link, to, type(body).__name__, timeout, send)

    def _link(self, to: Address) -> Link:
        if self._sockets is None:
            raise ZrtError("cancelled", "the actor is not running", self.name)
        return self._links.get(to)

    def _routing_id(self) -> bytes:
        self._serial += 1
        return f"{self.name}.{self.incarnation:x}.{self._serial:x}".encode()

    def _on_lost(self, address: Address, link: Link, news: bool) -> None:
        self._questions.fail(link.lost(), link)
        for mourner in self._mourners if news else ():
            try:
                mourner(address)
            except Exception:
                log.exception("%s: the death of %s could not be handled", self.name, address.name)

    # ---- reading ----------------------------------------------------------------------------------------------------

    def _on_frames(self, frames: Frames) -> None:
        """A multipart at our mailbox: the peer's routing id, then a bare message or a header and what follows it."""
        if self._sockets is None:
            return
        peer = bytes(frames[0])
        if len(frames) == 2 or (len(frames) == 3 and not len(frames[1])):
            if self._bare is None:
                self.counters.refused += 1
                self._complaints.add("bare", "a bare message arrived, and this actor takes none")
            else:
                self._call_bare(self._bare, Bare(peer, frames[-1], len(frames) == 3))
            return
        try:
            header, body = decode(frames[1:])
        except WireError as error:
            self._undecodable(error, peer)
            return
        if header.to not in (0, self.incarnation):
            self.counters.stale += 1
        elif header.reply:
            self.counters.dropped += 1
        else:
            self._dispatch(Envelope(header, body, peer))

    def _call_bare(self, fn: Callable[[Bare], None], bare: Bare) -> None:
        try:
            fn(bare)
        except Exception as error:
            self.counters.failed += 1
            self._complaints.add(f"bare {type(error).__name__}", "handling a bare message failed", error)

    def _on_reply(self, link: Link, frames: Frames) -> None:
        """A multipart that came back over one of our links."""
        if self._sockets is None:
            return
        try:
            header, body = decode(frames)
        except WireError as error:
            self._undecodable(error, b"")
            if error.header is not None:  # whoever waits for it need not wait until the deadline
                fault = Fault(error.kind, f"the reply does not decode: {error.message}", self.name)
                self._questions.settle(link, Envelope(error.header, Failed(fault), b""))
            return
        if header.to not in (0, self.incarnation):
            self.counters.stale += 1
            return
        outcome = self._questions.settle(link, Envelope(header, body, b""))
        if outcome == "stale":
            self.counters.stale += 1
        elif outcome == "unknown":
            self.counters.dropped += 1
            if isinstance(body, Failed):
                self._complaints.add("fault", f"{header.sender} says {body.fault}")

    def _undecodable(self, error: WireError, peer: bytes) -> None:
        """Counted, and told to the sender where there is one; but an error is never answered with an error."""
        header = error.header
        if header is not None and header.to not in (0, self.incarnation):
            self.counters.stale += 1
            return
        self.counters.undecodable += 1
        self._complaints.add("undecodable", f"a message from {peer!r} does not decode: {error}")
        if peer and not (header is not None and header.reply):
            self._reply(peer, header, Failed(Fault(error.kind, error.message, self.name)))

    def _dispatch(self, envelope: Envelope) -> None:
        handler = self._handlers.get(type(envelope.body))
        if handler is None:
            self.counters.refused += 1
            what = type(envelope.body).__name__
            self._complaints.add(what, f"nobody handles {what} here")
            self._answer(envelope, Failed(Fault("unknown_op", f"{what} is not for this actor", self.name)))
            return
        try:
            answer = handler(envelope)
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
            self._complaints.add(f"{what} {type(error).__name__}", f"handling {what} failed", error)
            error = ZrtError("internal", f"handling {what} failed: {type(error).__name__}: {error}", self.name)
        elif not envelope.header.request:
            self._complaints.add(
                f"{what} {error.kind}", f"{what} from {envelope.header.sender} came to nothing: {error}"
            )
        if not envelope.header.request:
            self.counters.failed += 1
        self._answer(envelope, Failed(Fault(error.kind, error.message, error.where or self.name)))

    def _answer(
        self, envelope: Envelope, answer: Control | InferenceRequest | RankMessage | LayerMessage | Reply
    ) -> None:
        body, steps = answer if isinstance(answer, Reply) else (cast(Body, answer), [])
        if envelope.header.request and not self._reply(envelope.peer, envelope.header, body, steps):
            self.counters.dropped += 1

    def _reply(self, peer: bytes, header: Header | None, body: Body, steps: Sequence[Step] = ()) -> bool:
        to, request = (header.incarnation, header.request) if header else (0, 0)
        head = self._header(to, request=request, reply=True, steps=list(steps))
        try:
            return self._mailbox.send(encode(head, body), peer)
        except ZrtError as error:
            self._complaints.add("reply", f"a reply to {peer!r} was not sent: {error}")
            if error.kind != "too_large" or (isinstance(body, Failed) and body.fault.kind == "too_large"):
                return False
            return self._reply(peer, header, Failed(Fault(error.kind, error.message, self.name)))
