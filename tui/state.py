"""State of the monitor: the last snapshot, and what it kept of earlier ones. Pure; times are passed
in."""

from collections import deque
from typing import Final

from zrt.runtime.messages.client import Cluster
from zrt.runtime.messages.cluster import Happened
from zrt.tui.tables import Replies, new_replies

EVENTS: Final = 2000
REPLIES: Final = 1000
POINTS: Final = 300
POINT_MS: Final = 1000


class MonitorState:
    """What the monitor knows. `cluster` is None until the first snapshot. `pace` holds a point a
    second: tokens a second, and live sessions."""

    def __init__(self) -> None:
        self.cluster: Cluster | None = None
        self.at = 0.0
        """Arrival of `cluster`, in Unix time."""
        self.happened: deque[Happened] = deque(maxlen=EVENTS)
        self.replies: deque[Replies] = deque(maxlen=REPLIES)
        self.pace: deque[tuple[float, int]] = deque(maxlen=POINTS)
        self._mark: tuple[int, int] | None = None  # up_ms and tokens of the last point
        self._steps: dict[str, int] = {}  # the last known step of each leader

    def take(self, cluster: Cluster, now: float) -> None:
        """Take the next snapshot, at `now` (Unix time). Another coordinator counts anew; earlier
        events are kept."""
        before = self.cluster
        same = before is None or before.incarnation == cluster.incarnation
        if not same:
            self._mark = None
        last = self.happened[-1].serial if self.happened and same else 0
        self.happened.extend(one for one in cluster.happened if one.serial > last)
        self.cluster, self.at = cluster, now
        self._take_pace(cluster)
        self.replies.extend(new_replies(cluster, self._steps, now))

    def _take_pace(self, cluster: Cluster) -> None:
        if self._mark is None:
            self._mark = (cluster.up_ms, cluster.tokens)
            return
        since, tokens = self._mark
        passed = cluster.up_ms - since
        if passed >= POINT_MS:
            self.pace.append(((cluster.tokens - tokens) * 1000 / passed, len(cluster.sessions)))
            self._mark = (cluster.up_ms, cluster.tokens)
