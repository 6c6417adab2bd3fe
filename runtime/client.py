"""The scripted client: generations, status and control of a running cluster, from any asyncio program.

async with Client() as zrt:
    async for piece in zrt.generate("Why is the sky blue?", max_tokens=64, temperature=0.0):
        print(piece.text, end="")
"""

import asyncio
import os
import secrets
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Literal, Self

from zrt.runtime import running
from zrt.runtime.changes import Snapshots
from zrt.runtime.errors import ZrtError
from zrt.runtime.link import Link
from zrt.runtime.messages.client import (
    Accepted,
    Cancel,
    Changes,
    ChatMessage,
    ClientEvent,
    ClientRequest,
    Cluster,
    Down,
    Drain,
    Drained,
    Error,
    Finished,
    Follow,
    Generate,
    Ok,
    Piece,
    Progress,
    Restart,
    Resume,
    Status,
    Subscribe,
    Undrain,
    Unsubscribe,
)
from zrt.runtime.outbox import Frames
from zrt.runtime.sockets import Sockets
from zrt.runtime.wire import MAX_CLIENT_FRAME, decode_event, encode_client

CONNECT_S: Final = 5.0
SILENCE_S: Final = 10.0
"""A cluster says something about every live request once a second; after this long without a word it counts as lost."""
STALL_S: Final = 5.0
"""After this long without a word another connection is tried: this one may be dead without our having been told."""
LATE_S: Final = 5.0
"""How much longer than its lease a session is worth a connection: whoever comes too late should hear just that."""
DRAIN_S: Final = 30.0
"""How long sessions may go on at a block server that is being drained."""
FOLLOW_S: Final = 60.0
"""How long a session that is followed may say nothing."""
LEAVE_S: Final = 5.0
"""How long sessions may go on in a cluster that goes down."""
DOWN_S: Final = 20.0
"""How long a cluster may take to go: its processes get some seconds to end in good order, and are killed then."""


def find_endpoint(endpoint: str | None) -> str:
    """The given endpoint, $ZRT_ENDPOINT, or that of the last cluster started here. ZrtError coordinator_lost: none of them."""
    found = endpoint or os.environ.get("ZRT_ENDPOINT") or running.last_endpoint()
    if found is None:
        raise ZrtError(
            "coordinator_lost", "no cluster was started here: `zrt up` starts one, --connect ENDPOINT names another"
        )
    return found


class Client:
    """A connection to a cluster's coordinator; use it as an async context manager. ZrtError coordinator_lost when it is not there.

    Many requests may be open at once. Everything runs on the loop that entered the context. When the connection breaks it is made again, and
    generations go on where they were, no token missing and none twice. They end with resume_expired if that took longer than the cluster
    keeps them, with coordinator_lost if their coordinator died, or cannot be reached for a while after that.
    """

    def __init__(self, endpoint: str | None = None) -> None:
        self.endpoint = find_endpoint(endpoint)
        self._streams: dict[str, _Events] = {}
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
        self._sockets = Sockets()
        try:
            self._link = Link(
                self._sockets,
                self.endpoint,
                lambda: b"client." + secrets.token_hex(8).encode(),
                limit=MAX_CLIENT_FRAME,
                on_message=self._on_message,
                on_up=self._on_up,
                on_down=self._on_down,
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
        """Whatever is still open is cancelled: a generation nobody reads has no use."""
        for id_, events in self._streams.items():
            if events.abandon:
                with suppress(ZrtError):  # it hears nothing any more, so it will miss us
                    self._send(Cancel(id=f"cancel-{id_}"[:64], request=id_))
        self._end(ZrtError("cancelled", "the client was closed"))
        await self._sockets.close()

    def _end(self, error: ZrtError) -> None:
        """No connection any more; what is open fails."""
        self._link.close()
        for events in self._streams.values():
            events.fail(error)

    # ---- requests -----------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, str]] | None = None,
        token_ids: Sequence[int] | None = None,
        raw: bool = False,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
        min_tokens: int | None = None,
        ignore_eos: bool = False,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        logprobs: int | None = None,
        seed: int | None = None,
        n: int = 1,
    ) -> "Stream":
        """Start a generation; iterate over the result for its pieces. See messages/client.py (Generate) for the options.

        With `n` > 1 the pieces of n answers come mixed, told apart by `choice`.
        """
        chat = None
        if messages is not None:
            chat = [ChatMessage(role=message["role"], content=message["content"]) for message in messages]
        request = Generate(
            id=self._next_id(),
            prompt=prompt,
            messages=chat,
            token_ids=None if token_ids is None else list(token_ids),
            raw=raw,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=dict(logit_bias or {}),
            min_tokens=min_tokens,
            ignore_eos=ignore_eos,
            stop=list(stop),
            stop_token_ids=list(stop_token_ids),
            logprobs=logprobs,
            seed=seed,
            n=n,
        )
        return Stream(self, request)

    async def status(self) -> Cluster:
        """The cluster as it is now."""
        request = Status(id=self._next_id())
        event = await self._ask(request, again=lambda: [request])
        if not isinstance(event, Cluster):
            raise ZrtError("internal", f"status was answered by {type(event).__name__}")
        return event

    async def watch(self, every: float = 1.0) -> AsyncGenerator[Cluster]:
        """The cluster now, after every change and every so many seconds, until the iteration is left; also through a connection that breaks.

        What comes is changes, from which whole snapshots are made: processes and sessions that did not change are the same objects as before.
        `happened` holds what is new. ZrtError bad_request: what came cannot be such changes.
        """
        request = Subscribe(id=self._next_id(), every_ms=round(every * 1000))
        await self._there()
        snapshots, asked = Snapshots(), False
        with _Events(self, request.id, again=lambda: [request]) as events:
            self._send(request)
            try:
                while True:
                    event = await events.next()
                    if isinstance(event, Cluster | Changes):
                        cluster = snapshots.take(event)
                        if cluster is not None:
                            asked = False
                            yield cluster
                        elif not asked:
                            asked = True
                            self._send(request)  # something is missing: it is told anew, from a whole one on
            finally:
                with suppress(ZrtError):  # without a connection there is no subscription either
                    self._send(Unsubscribe(id=request.id))

    async def follow(self, session: int) -> AsyncGenerator[Piece | Progress | Finished]:
        """What a session says, whoever started it: a piece with all it has so far, then all that comes. ZrtError unknown_session; its own error."""
        request = Follow(id=self._next_id(), session=session)
        await self._there()
        with _Events(self, request.id) as events:
            events.patience = FOLLOW_S
            self._send(request)
            try:
                while True:
                    event = await events.next()
                    if isinstance(event, Piece | Progress | Finished):
                        yield event
                    if isinstance(event, Finished):
                        return
            finally:
                with suppress(ZrtError):
                    self._send(Unsubscribe(id=request.id))

    async def restart(self, name: str) -> None:
        """Have `zrt up` kill a block server and start it again. ZrtError as Restart in messages/client.py says."""
        await self._ask(Restart(id=self._next_id(), name=name))

    async def cancel(self, session: int) -> None:
        """End a session, whoever started it. ZrtError unknown_session."""
        await self._ask(Cancel(id=self._next_id(), session=session))

    async def drain(
        self, name: str, timeout: float = DRAIN_S, *, progress: Callable[[Drained], None] | None = None
    ) -> Drained:
        """Take a block server out of service: its sessions move to another replica, or may finish for `timeout` seconds and are parked then.

        Returns what became of them once none runs there; `progress` hears how it gets on. It keeps its weights until `undrain`. ZrtError as
        Drain in messages/client.py says.
        """
        request = Drain(id=self._next_id(), name=name, timeout_ms=round(timeout * 1000))
        with _Events(self, request.id) as events:
            self._send(request)
            while True:
                event = await events.next()
                if not isinstance(event, Drained):
                    raise ZrtError("internal", f"a drain was answered by {type(event).__name__}")
                if event.state == "drained":
                    return event
                if progress is not None:
                    progress(event)

    async def undrain(self, name: str) -> None:
        """Let a draining or drained block server serve again. ZrtError bad_request: there is none of this name, or it is neither."""
        await self._ask(Undrain(id=self._next_id(), name=name))

    async def down(self, timeout: float = LEAVE_S) -> None:
        """Bring the cluster down, `timeout` seconds from now if sessions run for so long. Returns when its coordinator, the last to go, is gone.

        A second call, by whomever, does not wait for sessions. ZrtError deadline: DOWN_S later it is still there.
        """
        await self._ask(Down(id=self._next_id(), timeout_ms=round(timeout * 1000)))
        try:
            async with asyncio.timeout(timeout + DOWN_S):
                await self._down.wait()
        except TimeoutError:
            text = f"the cluster at {self.endpoint} was told to end {timeout + DOWN_S:g} s ago and is still there"
            raise ZrtError("deadline", text) from None
        self._end(self._broken())

    async def _ask(
        self, request: ClientRequest, *, again: Callable[[], Sequence[ClientRequest]] | None = None
    ) -> ClientEvent:
        await self._there()
        with _Events(self, request.id, again=again) as events:
            self._send(request)
            event = await events.next()
            if isinstance(event, Ok | Cluster):
                return event
            raise ZrtError("internal", f"{type(request).__name__} was answered by {type(event).__name__}")

    # ---- the connection -----------------------------------------------------------------------------------------

    def _next_id(self) -> str:
        self._serial += 1
        return str(self._serial)

    async def _there(self) -> None:
        """Wait for the connection, should it be broken just now. ZrtError coordinator_lost: it cannot be made again."""
        if self._link.closed:
            raise self._broken()
        try:
            async with asyncio.timeout(CONNECT_S):
                await self._up.wait()
        except TimeoutError:
            raise self._broken() from None

    def _send(self, request: ClientRequest) -> None:
        self._link.send([encode_client(request)])

    def _on_up(self, link: Link) -> None:
        self._down.clear()
        self._up.set()
        self._up_since = asyncio.get_running_loop().time()
        if not self._first.done():
            self._first.set_result(None)
        for events in list(self._streams.values()):
            events.go_on()

    def _on_down(self, link: Link) -> None:
        self._up.clear()
        self._down.set()
        if not self._first.done():
            self._first.set_exception(self._broken())
        for events in self._streams.values():
            events.broke(self._broken())

    def _renew_if_stalled(self) -> None:
        """Nothing came for STALL_S: if that is how long this connection has been there, try another."""
        if self._link.up and asyncio.get_running_loop().time() - self._up_since >= STALL_S:
            self._link.renew()

    def _broken(self) -> ZrtError:
        return ZrtError("coordinator_lost", f"the connection to {self.endpoint} broke")

    def _silent(self, seconds: float) -> ZrtError:
        if self._link.up:
            return ZrtError("coordinator_lost", f"{self.endpoint} has been silent for {seconds:g} s")
        text = f"the connection to {self.endpoint} broke, and could not be made again for {seconds:g} s"
        return ZrtError("coordinator_lost", text)

    def _on_message(self, link: Link, frames: Frames) -> None:
        event = decode_event(frames[-1])
        events = self._streams.get(event.id)
        if events is not None:
            events.put(event)


class _Events:
    """The events of one open request, in order. `abandon`: the request goes on at the cluster until it is cancelled. `again()` is what to say
    over a new connection; without it the request ends with its connection. `note(event)` hears of each at once, and is false for one
    that nobody need hear of. `patience`: seconds without a word after which the cluster counts as lost, SILENCE_S at least.
    """

    def __init__(
        self,
        client: Client,
        id_: str,
        *,
        abandon: bool = False,
        again: Callable[[], Sequence[ClientRequest]] | None = None,
        note: Callable[[ClientEvent], bool] | None = None,
    ) -> None:
        self.abandon = abandon
        self.patience = 0.0
        self._client = client
        self._id = id_
        self._again = again
        self._note = note
        self._waiting: deque[ClientEvent] = deque()
        self._failed: ZrtError | None = None
        self._some = asyncio.Event()

    def __enter__(self) -> Self:
        if self._client._link.closed:
            raise self._client._broken()
        self._client._streams[self._id] = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client._streams.pop(self._id, None)

    def put(self, event: ClientEvent) -> None:
        if self._note is None or self._note(event):
            self._waiting.append(event)
            self._some.set()

    def fail(self, error: ZrtError) -> None:
        self._failed = error
        self._some.set()

    def broke(self, error: ZrtError) -> None:
        """The connection is gone."""
        if self._again is None:
            self.fail(error)

    def go_on(self) -> None:
        """There is a new connection."""
        try:
            for request in self._again() if self._again is not None else ():
                self._client._send(request)
        except ZrtError as error:
            if error.kind != "coordinator_lost":  # else it is gone again, and the next one is there for this
                self.fail(error)

    async def next(self) -> ClientEvent:
        """The next event; an `error` event is raised. ZrtError coordinator_lost: the connection broke for good, or nothing comes over it."""
        loop = asyncio.get_running_loop()
        since = loop.time()
        while not self._waiting:
            if self._failed is not None:
                raise self._failed
            patience = max(SILENCE_S, self.patience)
            left = since + patience - loop.time()
            if left <= 0:
                raise self._client._silent(patience)
            self._some.clear()
            try:
                async with asyncio.timeout(min(left, STALL_S)):
                    await self._some.wait()
            except TimeoutError:
                self._client._renew_if_stalled()
        event = self._waiting.popleft()
        if isinstance(event, Error):
            raise ZrtError.of(event.kind, event.message, event.where)
        return event


@dataclass(slots=True)
class _Heard:
    """What has arrived of one answer: its session, and how far its tokens and its text go."""

    session: int
    resume: str
    tokens: int = 0
    chars: int = 0
    over: bool = False


class Stream:
    """One generation. Iterate over it for pieces, or call `next_event` for everything that is said; then read `finished`.

    The request is sent by the first of these. Leaving it early (`aclose`, or the end of the client) cancels the session. `accepted` and
    `progress` are the last ones heard, of whatever answer.
    """

    def __init__(self, client: Client, request: Generate) -> None:
        self.accepted: Accepted | None = None
        self.progress: Progress | None = None
        self._client = client
        self._request = request
        self._events = _Events(client, request.id, abandon=True, again=self._again, note=self._note)
        self._state: Literal["new", "open", "over"] = "new"
        self._finished: dict[int, Finished] = {}
        self._heard: dict[int, _Heard] = {}
        self._cancelling = False

    @property
    def finished(self) -> Finished:
        """How the (first) answer ended. ZrtError internal before all have."""
        return self.all_finished[0]

    @property
    def over(self) -> bool:
        """Whether all answers have ended."""
        return len(self._finished) == self._request.n

    @property
    def all_finished(self) -> list[Finished]:
        """How each of `n` answers ended, by choice. ZrtError internal before all have."""
        if not self.over:
            raise ZrtError("internal", "the generation has not finished")
        return [self._finished[choice] for choice in range(self._request.n)]

    async def next_event(self) -> Accepted | Progress | Piece | Finished:
        """What the cluster says next. ZrtError: the kind of the error that ended the generation; internal after its end."""
        if self._state == "over":
            raise ZrtError("internal", "the generation is over")
        try:
            if self._state == "new":
                self._state = "open"
                await self._client._there()
                self._events.__enter__()
                self._client._send(self._request)
            event = await self._events.next()
        except ZrtError:
            self._end()
            raise
        if isinstance(event, Accepted):
            self.accepted = event
        elif isinstance(event, Progress):
            self.progress = event
        elif isinstance(event, Finished):
            self._finished[event.choice] = event
            if self.over:
                self._end()
        elif not isinstance(event, Piece):
            raise ZrtError("internal", f"a generation was answered by {type(event).__name__}")
        return event

    def cancel(self) -> None:
        """Ask the cluster to end it; iterating goes on until `finished`, reason `cancelled`."""
        if self._state == "open":
            self._cancelling = True
            with suppress(ZrtError):  # without a connection: it is said over the next one
                self._client._send(self._cancel())

    async def aclose(self) -> None:
        """Cancel what still runs, and hear no more of it."""
        self.cancel()
        self._end()

    def _cancel(self) -> Cancel:
        return Cancel(id=self._client._next_id(), request=self._request.id)

    def _note(self, event: ClientEvent) -> bool:
        """Keep the account of what has arrived. That a session was resumed is no news."""
        if isinstance(event, Accepted):
            if event.choice in self._heard:
                return False
            self._heard[event.choice] = _Heard(event.session, event.resume)
            self._events.patience = event.lease_s + LATE_S
        elif isinstance(event, Piece | Finished) and (heard := self._heard.get(event.choice)):
            if isinstance(event, Piece):
                heard.tokens = event.index + len(event.token_ids)
                heard.chars += len(event.text)
            else:
                heard.over = True
        return True

    def _again(self) -> list[ClientRequest]:
        """Over a new connection: go on with each answer. Before all were accepted nothing has been heard of any: ask anew."""
        id_ = self._request.id
        if len(self._heard) == self._request.n:
            left = [heard for heard in self._heard.values() if not heard.over]
            requests: list[ClientRequest] = [
                Resume(id=id_, session=heard.session, resume=heard.resume, index=heard.tokens, chars=heard.chars)
                for heard in left
            ]
            return [*requests, self._cancel()] if self._cancelling else requests
        requests = [Cancel(id=self._client._next_id(), session=heard.session) for heard in self._heard.values()]
        self._heard.clear()
        if self._cancelling:
            self._events.fail(ZrtError("cancelled", "it was cancelled before it was known to have begun"))
            return requests
        return [*requests, self._request]

    def _end(self) -> None:
        self._state = "over"
        self._events.__exit__(None, None, None)

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self

    async def __anext__(self) -> Piece:
        while self._state != "over":
            event = await self.next_event()
            if isinstance(event, Piece):
                return event
        raise StopAsyncIteration
