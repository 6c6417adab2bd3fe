"""The command lines, and environments, by which `zrt up` starts the processes of a cluster file."""

import os
from dataclasses import dataclass
from typing import Final

from msgspec.structs import asdict

from zrt.actors.options import (
    ActorOptions,
    BlockServerOptions,
    ClusterOptions,
    CoordinatorOptions,
    LayerWorkerOptions,
    command_line,
)
from zrt.runtime.cluster.file_loader import hand_over, threads
from zrt.runtime.cluster.file_schema import ClusterSettings, Conf, Spares, Stage, Worker
from zrt.runtime.compute.threads import thread_environment
from zrt.runtime.endpoints import endpoint
from zrt.runtime.process.logs import VARIABLE

PORT_S: Final = 5.0
"""How long a restarted coordinator waits for the port of its predecessor."""


@dataclass(frozen=True, slots=True)
class Line:
    """A command line, and the environment variables that its process gets besides our own."""

    argv: list[str]
    environment: dict[str, str]


class CommandLines:
    """The command lines of one cluster's processes. `conf` is what `options` read, and all
    coordinators, one after another, go by; `cluster` is the id by which all processes know the
    cluster; `detached` says that our stderr is a log of several processes."""

    def __init__(self, conf: Conf, options: ClusterOptions, cluster: str, *, detached: bool) -> None:
        self._conf = conf
        self._options = options
        self._cluster = cluster
        self._detached = detached

    def coordinator(self) -> Line:
        return self._coordinator(CoordinatorOptions(**asdict(self._options), cluster_id=self._cluster))

    def coordinator_again(self, reached: str) -> Line:
        """Return the command line of a coordinator that takes the place of the one at `reached`,
        where all other processes look for it; a passing connection may hold its port for a
        while."""
        words = asdict(self._options) | {"listen": bound(self._conf.cluster, reached)}
        return self._coordinator(CoordinatorOptions(**words, cluster_id=self._cluster, port_wait=PORT_S))

    def _coordinator(self, options: CoordinatorOptions) -> Line:
        line = self._line(options, 1)
        return Line(line.argv, line.environment | hand_over(self._conf))

    def server(self, name: str, join: str, conf: Stage | Spares) -> Line:
        alone, shared = threads(self._conf, conf, len(os.sched_getaffinity(0)))
        options = BlockServerOptions(
            name=name,
            join=join,
            device=conf.device,
            threads=alone,
            shared_threads=shared,
            memory=conf.memory or 0,
            cluster_id=self._cluster,
        )
        return self._line(options, alone)

    def worker(self, join: str, conf: Worker) -> Line:
        count = conf.threads or len(os.sched_getaffinity(0))
        options = LayerWorkerOptions(
            name=conf.name,
            join=join,
            device=conf.device,
            threads=count,
            memory=conf.memory or 0,
            cluster_id=self._cluster,
        )
        return self._line(options, count)

    def _line(self, options: ActorOptions, threads: int) -> Line:
        log = self._conf.log
        form = "dated" if log.format == "text" and self._detached else log.format
        environment = thread_environment(threads) | {VARIABLE: f"{log.level}:{form}"}
        return Line(command_line(options), environment)


def bound(cluster: ClusterSettings, reached: str) -> str:
    """Return where the coordinator that is reached at `reached` listens, its port included."""
    if cluster.advertise is None:
        return reached
    if endpoint(cluster.listen)[1]:
        return cluster.listen
    return f"{cluster.listen.rpartition(':')[0]}:{endpoint(reached)[1]}"
