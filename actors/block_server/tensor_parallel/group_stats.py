"""The figures that a leader tells of its ranks: their states, their part in the last steps, what
went wrong; over all groups of one assignment."""

import time
from collections import deque
from collections.abc import Sequence
from typing import Final

from zrt.runtime.errors import ZrtError
from zrt.runtime.host_memory import resident_memory
from zrt.runtime.messages.stats import GroupLoad, GroupStep, RankLoad, RankState

KEPT: Final = 32
"""How many steps are kept."""
SHOWN: Final = 16
"""How many hex digits of a communicator's id are told."""


class GroupStats:
    """The figures of a group, kept by the block server and written by the group that it leads at
    the time. `pid` is the leader's process."""

    def __init__(self, world: int, pid: int) -> None:
        self.ranks = [RankLoad(rank) for rank in range(world)]
        self.ranks[0].pid = pid
        self.rebuilds = 0
        self._fault = ""
        self.state = "forming"
        self._comm_id = ""
        self._formed = 0.0
        self._steps = self._fan_out_us = 0
        self._serial = 0
        self._failed: set[int] = set()
        """Ranks of this group that are known to have failed."""
        self._recent: deque[tuple[float, GroupStep]] = deque(maxlen=KEPT)

    def begin(self) -> None:
        """Start over: a group is formed anew. Counts go on; what is known of a process that has
        gone is not told of the one in its place."""
        self.state, self._comm_id, self._formed = "forming", "", 0.0
        self._failed.clear()
        for load in self.ranks:
            load.state, load.error = "starting", ""
            if load.rank:
                load.pid = load.rss_bytes = load.free_mb = load.total_mb = 0

    def formed(self, comm_id: str) -> None:
        self._comm_id, self._formed = comm_id[:SHOWN], time.monotonic()

    def all_are(self, state: RankState) -> None:
        """Set what all ranks do from now on, and so the group."""
        if state in ("loading", "ready"):
            self.state = state
        for load in self.ranks:
            load.state = state

    def ended(self, fault: ZrtError | None) -> None:
        """Record that the group broke for this reason, or was ended (None). Its ranks are gone; the
        leader is not."""
        self.state = "ended" if fault is None else "broken"
        if fault is not None:
            self._fault = str(fault)
        for load in self.ranks[1:]:
            load.state, load.pid = "lost", 0
        self.ranks[0].state = "starting"

    def blame(self, rank: int, error: ZrtError) -> None:
        """Count a rank's failure: once a group, in however many ways it shows."""
        load = self.ranks[rank]
        load.errors += rank not in self._failed
        load.error = str(error)
        if error.kind == "rank_failed":
            self._failed.add(rank)

    def ran(
        self,
        op: str,
        *,
        sessions: int,
        rows: int,
        fan_out_us: int,
        forward_us: Sequence[int],
        drain_us: Sequence[int],
        errors: Sequence[ZrtError | None],
    ) -> None:
        """Record an operation that is over. Of those that went well only steps, which have
        sessions, are kept."""
        for rank, error in enumerate(errors):
            if error is not None and rank not in self._failed:  # else better is known: how its process ended
                self.blame(rank, error)
        failed = any(errors)
        if not sessions and not failed:
            return
        if sessions and not failed:
            self._steps += 1
            self._fan_out_us += fan_out_us
            for load, forward, drain in zip(self.ranks, forward_us, drain_us, strict=True):
                load.steps += 1
                load.forward_us += forward
                load.drain_us += drain
        self._serial += 1
        kinds = [error.kind if error is not None else "" for error in errors]
        step = GroupStep(self._serial, op, 0, sessions, rows, fan_out_us, list(forward_us), list(drain_us), kinds)
        self._recent.append((time.monotonic(), step))

    def load(self) -> GroupLoad:
        """Return the figures as they are now."""
        now = time.monotonic()
        for load in self.ranks:
            load.rss_bytes = resident_memory(load.pid) if load.pid else 0
        for at, step in self._recent:
            step.age_ms = int((now - at) * 1000)
        return GroupLoad(
            state=self.state,
            world=len(self.ranks),
            rebuilds=self.rebuilds,
            comm_age_s=round(now - self._formed, 1) if self._formed else 0.0,
            steps=self._steps,
            fan_out_us=self._fan_out_us,
            ranks=self.ranks,
            comm_id=self._comm_id,
            fault=self._fault,
            recent=[step for _, step in self._recent],
        )
