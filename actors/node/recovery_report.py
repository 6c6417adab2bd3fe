"""The recoveries of a cluster: what came back after a loss, and what did not since it cannot load,
in words for the reader of `zrt up`'s stderr."""

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import aclosing
from typing import Final, NoReturn

from zrt.actors.node.console import Console
from zrt.runtime.client.client import Client
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.client import Cluster
from zrt.runtime.messages.cluster import ActorInfo
from zrt.runtime.process.supervisor import Supervisor

log = logging.getLogger(__name__)

EVERY_S: Final = 10.0
"""How often the coordinator sends a snapshot where nothing changes."""
AGAIN_S: Final = 0.5
READY: Final = "is ready again"


class Recoveries:
    """The recoveries of one cluster. A process is back when its successor is ready, whatever
    becomes of others. The cluster is back when every stage is. That is said where no process was
    reported back, or where a process loads that was not lost itself: one whose ranks or workers
    were lost, or one that takes another's place. Why a process cannot load is said once."""

    def __init__(self) -> None:
        self._lost: dict[str, float] = {}
        self._faults: dict[str, str] = {}
        self._unready: float | None = None
        self._told = self._others = False

    async def follow(self, client: Client, supervisor: Supervisor, console: Console) -> NoReturn:
        """Say each recovery of the cluster on `console`, through the coordinator's own death, until
        cancelled."""
        away = ""
        while True:
            try:
                async with aclosing(client.watch(EVERY_S)) as watch:
                    async for cluster in watch:
                        away = ""
                        for line in self.seen(cluster, supervisor.pids(), time.monotonic()):
                            console.say(f"zrt: {line}")
            except ZrtError as error:
                if str(error) != away:
                    away = str(error)
                    log.info("the coordinator does not say how its cluster gets on: %s", away)
            await asyncio.sleep(AGAIN_S)

    def lost(self, name: str, now: float) -> None:
        """Note that a process is gone, and is started again."""
        self._lost.setdefault(name, now)

    def given_up(self, name: str) -> None:
        """Note that a process is not started again."""
        self._lost.pop(name, None)

    def seen(self, cluster: Cluster, pids: Mapping[str, int], now: float) -> list[str]:
        """Return the lines to say now. `pids` are the processes that run, by name: the coordinator
        may still show a predecessor."""
        if not cluster.ready:
            drained = any(actor.state in ("draining", "drained") for actor in cluster.actors)
            if self._unready is None and not drained:
                self._unready = now
            self._others |= any(
                actor.stage >= 0 and actor.state == "loading" and actor.name not in self._lost
                for actor in cluster.actors
            )
        # those that are not started again have no process here, and were spoken of when they ended
        faults = {actor.name: actor.fault for actor in cluster.actors if actor.pid and actor.state == "failed"}
        news = faults.items() - self._faults.items()
        lines = [f"{name} is not ready: {fault}" for name, fault in sorted(news)]
        self._faults = faults
        for actor in cluster.actors:
            if actor.name not in self._lost or actor.pid != pids.get(actor.name):
                continue
            how = _back(actor, cluster.ready)
            if how:
                self._told |= how == READY
                lines.append(f"{actor.name} {how}, {now - self._lost.pop(actor.name):.1f} s after it was lost")
        if cluster.ready:
            if self._unready is not None and (self._others or not self._told):
                lines.append(f"{cluster.name} {READY}, after {now - self._unready:.1f} s")
            self._unready, self._told, self._others = None, False, False
        return lines


def _back(actor: ActorInfo, settled: bool) -> str:
    """Return how the successor of a lost process is back, in words; empty while it is not. A
    process without blocks may still be given some, until the cluster is `settled`."""
    if actor.kind == "layer_worker":
        return "" if actor.state == "starting" else "is back"
    if actor.state == "blank":
        return "is back, as a spare" if settled and actor.stage < 0 else ""
    return READY if actor.state in ("ready", "draining", "drained") else ""
