"""The delivery of one session's events to its client: in order, nothing lost, nothing twice, over
whichever connection the client has.

All that was said of the answer is kept until its end and a while after it, so that a client that
takes nothing (its outbox is full), or comes back over another connection, is told the rest in one
piece. While the client takes nothing, progress is dropped, and whoever owns the session withholds
its credit: what is kept grows no faster than the session may run unheard.
"""

import secrets
from array import array
from collections.abc import Iterator, MutableSequence
from typing import Final

from zrt.runtime.actor.actor import Actor
from zrt.runtime.actor.envelope import Bare
from zrt.runtime.errors import ZrtError
from zrt.runtime.formatting import counted
from zrt.runtime.messages.client import Accepted, ClientEvent, Error, Finished, Piece, Progress, Resume
from zrt.runtime.messages.sampling import TokenLogprobs
from zrt.runtime.wire.clients import encode_event

FOLLOWERS = 16


class Delivery:
    """The delivery of the `choice`-th answer to `request`. `told` is when the client was last sent
    something, `stalled_since` since when it takes nothing (None: it does); monotonic seconds.
    `resume` is the secret with which a client may come back: `origin` and a random number.
    """

    def __init__(self, actor: Actor, client: Bare, request: str, now: float, *, choice: int = 0) -> None:
        self.client = _caller(client)
        self.request = request
        self.choice = choice
        self.told = now
        self.stalled_since: float | None = None
        self.gone = False
        self.resume = f"{origin(actor)}{secrets.token_hex(16)}"
        self._actor = actor
        self._accepted: Accepted | None = None
        self._ids: MutableSequence[int] = []
        self._texts: list[str] = []
        self._chars = 0
        self._logprobs: list[TokenLogprobs] | None = None
        self._end: Finished | Error | None = None
        self._told_accepted = False
        self._told_ids = 0
        self._told_chars = 0
        self._told_end = False
        self._followers: dict[tuple[bytes, str], Bare] = {}

    @property
    def stalled(self) -> bool:
        return self.stalled_since is not None

    @property
    def over(self) -> bool:
        """Whether the answer has had its end."""
        return self._end is not None

    @property
    def resumable(self) -> bool:
        """Whether its client may come back for it: it was accepted."""
        return self._accepted is not None

    @property
    def size(self) -> int:
        """How many tokens and log-probabilities are kept."""
        return len(self._ids) + sum(1 + len(said.top) for said in self._logprobs or ())

    def send(self, event: Accepted | Progress | Piece | Finished | Error, now: float) -> None:
        """Keep an event, and send it unless the client takes nothing."""
        self.told = now
        if isinstance(event, Piece):
            self._ids.extend(event.token_ids)
            self._texts.append(event.text)
            self._chars += len(event.text)
            if event.logprobs is not None:
                self._logprobs = self._logprobs or []
                self._logprobs += event.logprobs
        elif isinstance(event, Accepted):
            self._accepted = event
        elif not isinstance(event, Progress):
            self._end = event
            self._ids, self._texts = (
                array("I", self._ids),
                ["".join(self._texts)],
            )  # it is kept for a while, in less memory
        if not self.stalled and not self._give(event):
            self.stalled_since = now
        if self._followers and not isinstance(event, Accepted):
            self._tell_followers(event)

    def follow(self, client: Bare, request: str) -> None:
        """Let another client hear the session, from what there is so far. ZrtError overloaded."""
        if len(self._followers) >= FOLLOWERS:
            raise ZrtError("overloaded", f"{FOLLOWERS} clients follow this session already")
        self._texts = ["".join(self._texts)]
        piece = Piece(id=request, choice=self.choice, index=0, text=self._texts[0], token_ids=list(self._ids))
        if self._reply(client, piece):
            self._followers[client.peer, request] = _caller(client)

    def unfollow(self, peer: bytes, request: str) -> None:
        """Tell a client that follows the session nothing more for this request."""
        self._followers.pop((peer, request), None)

    def _tell_followers(self, event: Progress | Piece | Finished | Error) -> None:
        """Tell the followers; one that does not take an event misses that, and all that comes
        after."""
        said = event.id
        for key, client in list(self._followers.items()):
            event.id = key[1]
            if not self._reply(client, event):
                del self._followers[key]
        event.id = said

    def end(self, error: Error) -> None:
        """End the answer with an error that its client is told of otherwise."""
        self._end, self._told_end = error, True
        self._tell_followers(error)

    def retry(self) -> bool:
        """Send what the client lacks; return whether it has taken all of that."""
        for event in self._lacking():
            if not self._give(event):
                return False
        self.stalled_since = None
        return True

    def move(self, client: Bare, request: Resume, now: float) -> None:
        """Go on over another connection, or under another request id, from what the client says it
        has heard. ZrtError bad_request: that is more than there is."""
        if request.index > len(self._ids) or request.chars > self._chars:
            text = f"resume: {counted(request.index, 'token')} and {counted(request.chars, 'character')} of {len(self._ids)} and {self._chars}"
            raise ZrtError("bad_request", text)
        if (self.client.peer, self.request) != (client.peer, request.id):
            self._give(Error(id=self.request, kind="cancelled", message="the session goes on over another connection"))
        self.client, self.request = _caller(client), request.id
        self._told_accepted = self._told_end = False
        self._told_ids, self._told_chars = request.index, request.chars
        self.told = now
        self.stalled_since = None if self.retry() else now

    def _lacking(self) -> Iterator[Accepted | Piece | Finished | Error]:
        if self._accepted is not None and not self._told_accepted:
            yield self._accepted
        if self._told_ids < len(self._ids) or self._told_chars < self._chars:
            text = "".join(self._texts)
            self._texts = [text]
            since = self._told_ids
            yield Piece(
                id=self.request,
                choice=self.choice,
                index=since,
                text=text[self._told_chars :],
                token_ids=list(self._ids[since:]),
                logprobs=None if self._logprobs is None else self._logprobs[since:],
            )
        if self._end is not None and not self._told_end:
            yield self._end

    def _give(self, event: ClientEvent) -> bool:
        event.id = self.request
        try:
            self.gone = not self._actor.reply_bare(self.client, encode_event(event))
        except ZrtError:
            return False
        if self.gone:
            return False
        if isinstance(event, Piece):
            self._told_ids, self._told_chars = len(self._ids), self._chars
        elif isinstance(event, Accepted):
            self._told_accepted = True
        elif event is self._end:
            self._told_end = True
        return True

    def _reply(self, client: Bare, event: ClientEvent) -> bool:
        """Send an event; return whether the client took it."""
        try:
            return self._actor.reply_bare(client, encode_event(event))
        except ZrtError:
            return False


def caller_name(client: Bare) -> str:
    """Return how people tell one client's connection from another's."""
    return client.peer.decode(errors="backslashreplace")[:64]


def origin(actor: Actor) -> str:
    """Return what the secrets begin with that this incarnation gives out."""
    return f"{actor.incarnation:016x}."


def _caller(client: Bare) -> Bare:
    """Return whom to reply to, without the request itself."""
    return client._replace(frame=b"")


SESSIONS: Final = 1024
SIZE: Final = 1 << 18
"""What is kept at most, in sessions, and in tokens and log-probabilities of theirs; the oldest go
first."""


class Leases:
    """Ended deliveries by session, each kept for `seconds` from its end, or from when its client
    last came back. Times are monotonic seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._kept: dict[int, tuple[Delivery, int, float]] = {}  # the one that ends first comes first
        self._size = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, session: int, delivery: Delivery, now: float) -> None:
        """Keep a delivery for its time from `now` on."""
        self._drop(session)
        size = delivery.size
        self._kept[session] = (delivery, size, now + self._seconds)
        self._size += size
        while len(self._kept) > 1 and (len(self._kept) > SESSIONS or self._size > SIZE):
            self._drop(next(iter(self._kept)))

    def find(self, session: int) -> Delivery | None:
        """Return the delivery of a session, while it is kept."""
        kept = self._kept.get(session)
        return kept[0] if kept is not None else None

    def tend(self, now: float) -> None:
        """Drop what is kept no longer, and send stalled clients what they lack."""
        for session, (delivery, _, until) in list(self._kept.items()):
            if now >= until:
                self._drop(session)
            elif delivery.stalled:
                delivery.retry()

    def _drop(self, session: int) -> None:
        kept = self._kept.pop(session, None)
        if kept is not None:
            self._size -= kept[1]
