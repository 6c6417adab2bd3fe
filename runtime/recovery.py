"""What came back after a loss, in words, for whoever reads what `zrt up` says."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Final, NoReturn

from zrt.runtime.client import Client
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.client import Cluster

log = logging.getLogger(__name__)

EVERY_S: Final = 10.0
"""How often the coordinator tells how its cluster is where nothing changes."""
AGAIN_S: Final = 0.5
_THERE: Final = frozenset({"blank", "ready", "draining", "drained"})


class Recoveries:
    """Of one cluster. A process is back when its successor is ready, and every stage with it; where others take its place, or the one that
    was lost is nobody's child here, the cluster is."""

    def __init__(self) -> None:
        self._lost: dict[str, float] = {}
        self._unready: float | None = None

    async def follow(
        self, client: Client, pids: Callable[[], Mapping[str, int]], say: Callable[[str], None]
    ) -> NoReturn:
        """Say each recovery of the cluster, through its coordinator's own death, until cancelled."""
        while True:
            try:
                async with aclosing(client.watch(EVERY_S)) as watch:
                    async for cluster in watch:
                        for line in self.seen(cluster, pids(), time.monotonic()):
                            say(f"zrt: {line}")
            except ZrtError as error:
                log.info("the coordinator does not say how its cluster gets on: %s", error)
            await asyncio.sleep(AGAIN_S)

    def lost(self, name: str, now: float) -> None:
        """This process is gone, and is started again."""
        self._lost.setdefault(name, now)

    def given_up(self, name: str) -> None:
        """It is not started again."""
        self._lost.pop(name, None)

    def seen(self, cluster: Cluster, pids: Mapping[str, int], now: float) -> list[str]:
        """The lines to say now. `pids` are the processes that run, by name: a coordinator may yet show the one before."""
        if not cluster.ready:
            if self._unready is None and not any(actor.state in ("draining", "drained") for actor in cluster.actors):
                self._unready = now
            return []
        since, self._unready = self._unready, None
        lines = []
        for actor in cluster.actors:
            if actor.name in self._lost and actor.state in _THERE and actor.pid == pids.get(actor.name):
                spare = actor.kind == "block_server" and actor.stage < 0
                how = (
                    "is back, as a spare" if spare else "is back" if actor.kind == "layer_worker" else "is ready again"
                )
                lines.append(f"{actor.name} {how}, {now - self._lost.pop(actor.name):.1f} s after it was lost")
        if since is not None and not lines:
            lines.append(f"{cluster.name} is ready again, after {now - since:.1f} s")
        return lines
