"""The allocation of layer workers to the block servers that may use them. Pure.

A worker that the cluster file pins blocks to serves the block server that has them. Any other is
given to a block server that takes help, and stays with it: first to those that wait for room, then
to those that have the fewest workers.
"""

from collections import Counter
from collections.abc import Collection, Mapping

from zrt.runtime.cluster.file_schema import Conf
from zrt.runtime.cluster.seats import Seat


class WorkerAllocation:
    """The workers of one cluster, by name. Block servers are named, too, since one may take
    another's seat."""

    def __init__(self, conf: Conf) -> None:
        self._pinned = {lend.worker for stage in conf.stages for lend in stage.lend}
        self._named = {worker.name for worker in conf.workers}
        self._helped = any(stage.backend == "layers" for stage in conf.stages)
        self._lost: set[str] = set()
        self._given: dict[str, str] = {}

    def came(self, name: str, serves: str) -> None:
        """Note that a worker is there; it may hold layers of block server `serves`, of the time of
        an earlier coordinator."""
        self._lost.discard(name)
        if serves and name not in self._pinned:
            self._given.setdefault(name, serves)

    def useless(self, name: str) -> str:
        """Return why no block server is ever given a worker of this name; empty if one may be."""
        if self._helped or name in self._pinned:
            return ""
        if not self._pinned:
            return 'no [[stage]] takes the help of workers: give one backend = "layers", or [[stage.lend]]'
        return f"no [[stage.lend]] names it: they name {', '.join(sorted(self._pinned))}"

    def lost(self, name: str) -> None:
        """Note that a worker of the cluster file is not started again."""
        self._lost.add(name)

    def share_out(self, workers: Collection[str], waits: Mapping[str, bool]) -> None:
        """Give the workers that are there to the block servers that take help; `waits` says of each
        whether it lacks room."""
        self._given = {worker: server for worker, server in self._given.items() if server in waits}
        counts = Counter(self._given.values())
        for worker in sorted(set(workers) - self._pinned - self._given.keys()):
            if waits:
                server = min(waits, key=lambda name: (not waits[name], counts[name], name))
                self._given[worker] = server
                counts[server] += 1

    def of(self, server: str, seat: Seat, there: Collection[str]) -> tuple[list[str], list[str]]:
        """Return the workers of this block server that are there, and those of the cluster file
        that may yet come."""
        own = {lend.worker for lend in seat.lend}
        given = {worker for worker, whose in self._given.items() if whose == server}
        free = self._named - self._pinned - self._given.keys() if seat.helped else set()
        come = sorted((own | given) & set(there))
        return come, sorted((own | (given & self._named) | free) - set(there) - self._lost)
