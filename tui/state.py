"""What the monitor knows: the last snapshot, and what it kept of those before. Pure; times are passed in."""

from collections import deque
from typing import Final

from zrt.runtime.messages.client import Cluster
from zrt.runtime.messages.cluster import Happened
from zrt.runtime.messages.control import GroupLoad
from zrt.tui.rows import ReplyDrain

EVENTS: Final = 2000
REPLIES: Final = 500
POINTS: Final = 300
POINT_MS: Final = 1000


class State:
    """`cluster` is None until the first snapshot. `pace` holds a point a second: tokens a second, and live sessions."""

    def __init__(self) -> None:
        self.cluster: Cluster | None = None
        self.happened: deque[Happened] = deque(maxlen=EVENTS)
        self.replies: deque[ReplyDrain] = deque(maxlen=REPLIES)
        self.pace: deque[tuple[float, int]] = deque(maxlen=POINTS)
        self._mark: tuple[int, int] | None = None  # up_ms and tokens of the last point
        self._groups: dict[str, GroupLoad] = {}

    def take(self, cluster: Cluster, now: float) -> None:
        """The next snapshot, at `now` (Unix time). One of another coordinator, or after a gap, begins its counts anew."""
        before = self.cluster
        if before is not None and cluster.up_ms < before.up_ms:
            self._mark = None
            self._groups.clear()
            self.happened.clear()
        last = self.happened[-1].serial if self.happened else 0
        self.happened.extend(one for one in cluster.happened if one.serial > last)
        self.cluster = cluster
        self._take_pace(cluster)
        for actor in cluster.actors:
            if actor.group is not None:
                self._take_group(actor.name, actor.group, now)

    def _take_pace(self, cluster: Cluster) -> None:
        if self._mark is None:
            self._mark = (cluster.up_ms, cluster.tokens)
            return
        since, tokens = self._mark
        passed = cluster.up_ms - since
        if passed >= POINT_MS:
            self.pace.append(((cluster.tokens - tokens) * 1000 / passed, len(cluster.sessions)))
            self._mark = (cluster.up_ms, cluster.tokens)

    def _take_group(self, leader: str, group: GroupLoad, now: float) -> None:
        before = self._groups.get(leader)
        self._groups[leader] = group
        if before is None or group.steps <= before.steps or len(before.ranks) != len(group.ranks):
            return
        steps = group.steps - before.steps
        fan_out = (group.fan_out_us - before.fan_out_us) / steps
        for old, new in zip(before.ranks, group.ranks, strict=True):
            forward, drain = (new.forward_us - old.forward_us) / steps, (new.drain_us - old.drain_us) / steps
            errors = new.errors - old.errors
            self.replies.append(ReplyDrain(now, leader, new.rank, steps, fan_out, forward, drain, errors))
