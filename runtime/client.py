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
from types import TracebackType
from typing import Final, Literal, Self

from zrt.runtime import running
from zrt.runtime.errors import ZrtError
from zrt.runtime.link import Link
from zrt.runtime.messages.client import (
    Accepted,
    Cancel,
    ChatMessage,
    ClientEvent,
    ClientRequest,
    Cluster,
    Down,
    Drain,
    Drained,
    Error,
    Finished,
    Generate,
    Ok,
    Piece,
    Progress,
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
DRAIN_S: Final = 30.0
"""How long sessions may go on at a block server that is being drained."""
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
    """One connection to a cluster's coordinator; use it as an async context manager. ZrtError coordinator_lost when it is not there.

    Many requests may be open at once. Everything runs on the loop that entered the context.
    """

    def __init__(self, endpoint: str | None = None) -> None:
        self.endpoint = find_endpoint(endpoint)
        self._streams: dict[str, _Events] = {}
        self._serial = 0

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._up: asyncio.Future[None] = loop.create_future()
        self._lost = asyncio.Event()
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
                lost_kind="coordinator_lost",
            )
        except ZrtError:
            await self._sockets.close()
            raise
        try:
            async with asyncio.timeout(CONNECT_S):
                await self._up
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
            if events.abandon and not self._link.closed:
                with suppress(ZrtError):  # it hears nothing any more, so it will miss us
                    self._link.send([encode_client(Cancel(id=f"cancel-{id_}"[:64], request=id_))])
            events.fail(ZrtError("cancelled", "the client was closed"))
        self._link.close()
        await self._sockets.close()

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
        event = await self._ask(Status(id=self._next_id()))
        if not isinstance(event, Cluster):
            raise ZrtError("internal", f"status was answered by {type(event).__name__}")
        return event

    async def watch(self) -> AsyncGenerator[Cluster]:
        """The cluster now and after every change, until the iteration is left."""
        request = Subscribe(id=self._next_id())
        with _Events(self, request.id) as events:
            self._send(request)
            try:
                while True:
                    event = await events.next()
                    if isinstance(event, Cluster):
                        yield event
            finally:
                if not self._link.closed:
                    self._send(Unsubscribe(id=request.id))

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
                await self._lost.wait()
        except TimeoutError:
            text = f"the cluster at {self.endpoint} was told to end {timeout + DOWN_S:g} s ago and is still there"
            raise ZrtError("deadline", text) from None

    async def _ask(self, request: ClientRequest) -> ClientEvent:
        with _Events(self, request.id) as events:
            self._send(request)
            event = await events.next()
            if isinstance(event, Ok | Cluster):
                return event
            raise ZrtError("internal", f"{type(request).__name__} was answered by {type(event).__name__}")

    # ---- the connection -----------------------------------------------------------------------------------------

    def _next_id(self) -> str:
        self._serial += 1
        return str(self._serial)

    def _send(self, request: ClientRequest) -> None:
        self._link.send([encode_client(request)])

    def _on_up(self, link: Link) -> None:
        if not self._up.done():
            self._up.set_result(None)

    def _on_down(self, link: Link) -> None:
        lost = self._broken()
        self._lost.set()
        if not self._up.done():
            self._up.set_exception(lost)
        for events in self._streams.values():
            events.fail(lost)

    def _broken(self) -> ZrtError:
        return ZrtError("coordinator_lost", f"the connection to {self.endpoint} broke")

    def _on_message(self, link: Link, frames: Frames) -> None:
        event = decode_event(frames[-1])
        events = self._streams.get(event.id)
        if events is not None:
            events.put(event)


class _Events:
    """The events of one open request, in order. `abandon`: the request goes on at the cluster until it is cancelled."""

    def __init__(self, client: Client, id_: str, *, abandon: bool = False) -> None:
        self.abandon = abandon
        self._client = client
        self._id = id_
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
        self._waiting.append(event)
        self._some.set()

    def fail(self, error: ZrtError) -> None:
        self._failed = error
        self._some.set()

    async def next(self) -> ClientEvent:
        """The next event; an `error` event is raised. ZrtError coordinator_lost: broken, or silent for SILENCE_S."""
        while not self._waiting:
            if self._failed is not None:
                raise self._failed
            self._some.clear()
            try:
                async with asyncio.timeout(SILENCE_S):
                    await self._some.wait()
            except TimeoutError:
                text = f"{self._client.endpoint} has been silent for {SILENCE_S:g} s"
                raise ZrtError("coordinator_lost", text) from None
        event = self._waiting.popleft()
        if isinstance(event, Error):
            raise ZrtError.of(event.kind, event.message, event.where)
        return event


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
        self._events = _Events(client, request.id, abandon=True)
        self._state: Literal["new", "open", "over"] = "new"
        self._finished: dict[int, Finished] = {}

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
            self._client._send(Cancel(id=self._client._next_id(), request=self._request.id))

    async def aclose(self) -> None:
        """Cancel what still runs, and hear no more of it."""
        try:
            if not self._client._link.closed:
                self.cancel()
        finally:
            self._end()

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
