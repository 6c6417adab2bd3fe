"""Those who asked to hear of the cluster: when each is told, and up to where it knows what happened."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from zrt.runtime.envelope import Bare
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.client import Subscribe

MOST = 64


@dataclass(slots=True)
class Subscriber:
    """`due` is when it is told next, whatever changes (monotonic seconds); `heard` the serial of the last thing it knows of."""

    bare: Bare
    every_s: float
    due: float = 0.0
    heard: int = 0


class Subscribers:
    """`tell(bare, id, heard)` sends one the cluster, with what happened since; the serial it then knows, None when it takes nothing."""

    def __init__(self, tell: Callable[[Bare, str, int], int | None]) -> None:
        self._tell = tell
        self._all: dict[tuple[bytes, str], Subscriber] = {}

    def __len__(self) -> int:
        return len(self._all)

    def add(self, bare: Bare, request: Subscribe) -> None:
        """Tell it at once, and from now on. ZrtError overloaded."""
        if len(self._all) >= MOST:
            raise ZrtError("overloaded", f"{MOST} subscribers already")
        self._all[bare.peer, request.id] = Subscriber(bare._replace(frame=b""), request.every_ms / 1000)
        self._publish_to((bare.peer, request.id))

    def remove(self, peer: bytes, request: str) -> None:
        self._all.pop((peer, request), None)

    def pause(self) -> float | None:
        """Seconds until the next is due; None without any."""
        if not self._all:
            return None
        return max(0.0, min(one.due for one in self._all.values()) - time.monotonic())

    def publish(self, changed: bool) -> None:
        """Tell all if something changed, else those that are due."""
        now = time.monotonic()
        for key, one in list(self._all.items()):
            if changed or one.due <= now:
                self._publish_to(key)

    def _publish_to(self, key: tuple[bytes, str]) -> None:
        one = self._all[key]
        heard = self._tell(one.bare, key[1], one.heard)
        if heard is None:
            del self._all[key]
        else:
            one.heard, one.due = heard, time.monotonic() + one.every_s
