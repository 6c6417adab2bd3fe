"""One client's hearing of one generation: events in order, nothing lost, and bounded while the client does not take them.

A client that takes nothing (its outbox is full) or is gone stalls the delivery: pieces then melt into one, progress is dropped, and whoever
owns the generation withholds its credit, so that what waits here stays small.
"""

from zrt.runtime.actor import Actor
from zrt.runtime.envelope import Bare
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.client import ClientEvent, Piece, Progress
from zrt.runtime.wire import encode_event


class Delivery:
    """`told` is when the client was last sent something, `stalled_since` since when it takes nothing (None: it does). Monotonic seconds."""

    def __init__(self, actor: Actor, client: Bare, request: str, now: float) -> None:
        self.client = client
        self.request = request
        self.told = now
        self.stalled_since: float | None = None
        self._actor = actor
        self._waiting: list[ClientEvent] = []

    @property
    def stalled(self) -> bool:
        return self.stalled_since is not None

    def send(self, event: ClientEvent, now: float) -> None:
        """Send it, or keep it until the client takes events again."""
        self.told = now
        if not self.stalled and self._give(event):
            return
        if self.stalled_since is None:
            self.stalled_since = now
        last = self._waiting[-1] if self._waiting else None
        if isinstance(event, Piece) and isinstance(last, Piece):
            last.text += event.text
            last.token_ids += event.token_ids
            if last.logprobs is not None:
                last.logprobs += event.logprobs or []
        elif not isinstance(event, Progress):
            self._waiting.append(event)

    def retry(self) -> bool:
        """Send what waits; whether the client has taken all of it."""
        while self._waiting:
            if not self._give(self._waiting[0]):
                return False
            self._waiting.pop(0)
        self.stalled_since = None
        return True

    def _give(self, event: ClientEvent) -> bool:
        try:
            return self._actor.reply_bare(self.client, encode_event(event))
        except ZrtError:
            return False
