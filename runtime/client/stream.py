"""A generation as its client hears it: in order, nothing lost or repeated, even when connections
break."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal

from zrt.runtime.client.connection import SILENCE_S, Connection, Events
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.client import (
    Accepted,
    Cancel,
    ClientEvent,
    ClientRequest,
    Finished,
    Generate,
    Piece,
    Progress,
    Resume,
    Timings,
)

LATE_S: Final = 5.0
"""Seconds beyond a session's lease for which a connection is still tried: a client that comes too
late should be told just that."""


@dataclass(slots=True)
class _Heard:
    """The part of one answer that has arrived: its session, and how many tokens and characters."""

    session: int
    resume: str
    tokens: int = 0
    chars: int = 0
    over: bool = False


class Stream:
    """One generation. Iterate over it for pieces, or call `next_event` for every event; then read
    `finished`.

    The first iteration or call sends the request. Leaving the stream early (`aclose`, or the end of
    the client) cancels the session. `accepted` and `progress` are the last such events, of any
    answer.
    """

    def __init__(self, connection: Connection, request: Generate) -> None:
        self.accepted: Accepted | None = None
        self.progress: Progress | None = None
        self._connection = connection
        self._request = request
        self._events = Events(connection, request.id, abandon=True, again=self._again, note=self._note)
        self._state: Literal["new", "opening", "open", "over"] = "new"
        self._unsent: list[Finished] = []
        self._finished: dict[int, Finished] = {}
        self._heard: dict[int, _Heard] = {}
        self._cancelling = False

    @property
    def finished(self) -> Finished:
        """The end of the (first) answer. ZrtError internal until all answers have ended."""
        return self.all_finished[0]

    @property
    def over(self) -> bool:
        """Whether all answers have ended."""
        return len(self._finished) == self._request.n

    @property
    def all_finished(self) -> list[Finished]:
        """The end of each of the `n` answers, in order of `choice`. ZrtError internal until all
        have ended."""
        if not self.over:
            raise ZrtError("internal", "the generation has not finished")
        return [self._finished[choice] for choice in range(self._request.n)]

    @property
    def patience(self) -> float:
        """The seconds for which a connection that broke is tried again."""
        return max(SILENCE_S, self._events.patience)

    async def next_event(self) -> Accepted | Progress | Piece | Finished:
        """Return the cluster's next event. ZrtError: the error that ended the generation; internal
        after its end."""
        if self._state == "over":
            raise ZrtError("internal", "the generation is over")
        try:
            if self._state == "new":
                await self._open()
            event = self._unsent.pop(0) if self._unsent else await self._events.next()
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

    async def _open(self) -> None:
        """Send the request, unless the generation was cancelled while there was no connection: then
        each answer ends without the cluster having heard of it. ZrtError coordinator_lost;
        cancelled: it was closed meanwhile."""
        self._state = "opening"
        if not self._cancelling:
            try:
                await self._connection.there()
            except asyncio.CancelledError:
                if self._state == "opening":
                    self._state = "new"  # nothing was sent: the next call begins anew
                raise
        if self._state != "opening":
            raise ZrtError("cancelled", "the generation was closed before it was sent")
        self._state = "open"
        if self._cancelling:
            self._unsent = [_unaccepted(self._request, choice) for choice in range(self._request.n)]
            return
        self._events.__enter__()
        self._connection.send(self._request)

    def cancel(self) -> None:
        """Ask the cluster to end the generation; iterating goes on until `finished`, with reason
        `cancelled`. At any time: before the first event, too."""
        self._cancelling = self._state != "over"
        if self._state == "open":
            with suppress(ZrtError):  # without a connection: it is said over the next one
                self._connection.send(self._cancel())

    async def aclose(self) -> None:
        """Cancel the generation if it still runs, and hear no more of it."""
        self.cancel()
        self._end()

    def _cancel(self) -> Cancel:
        return Cancel(id=self._connection.next_id(), request=self._request.id)

    def _note(self, event: ClientEvent) -> bool:
        """Record what has arrived; return False if the event only says that a session was resumed,
        which is no news."""
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
        """Return the requests to send over a new connection: go on with each answer, or, before all
        were accepted (nothing has been heard of any), ask anew."""
        id_ = self._request.id
        if len(self._heard) == self._request.n:
            left = [heard for heard in self._heard.values() if not heard.over]
            requests: list[ClientRequest] = [
                Resume(id=id_, session=heard.session, resume=heard.resume, index=heard.tokens, chars=heard.chars)
                for heard in left
            ]
            return [*requests, self._cancel()] if self._cancelling else requests
        requests = [Cancel(id=self._connection.next_id(), session=heard.session) for heard in self._heard.values()]
        self._heard.clear()
        if self._cancelling:
            for choice in range(self._request.n):
                self._events.put(_unaccepted(self._request, choice))
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


def _unaccepted(request: Generate, choice: int) -> Finished:
    """Return the end of an answer that was cancelled before the cluster accepted it."""
    return Finished(
        id=request.id,
        choice=choice,
        reason="cancelled",
        prompt_tokens=0,
        completion_tokens=0,
        seed=(request.seed or 0) + choice,
        timings=Timings(queue_ms=0.0, ttft_ms=0.0, decode_tok_s=0.0),
    )
