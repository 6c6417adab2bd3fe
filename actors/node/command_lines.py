"""The command lines, and environments, by which `zrt up` starts the processes of a cluster file."""

import os
from dataclasses import dataclass
from typing import Final

from zrt.runtime.cluster.file_loader import threads
from zrt.runtime.cluster.file_schema import ClusterSettings, Conf, Spares, Stage, Worker
from zrt.runtime.compute.threads import thread_environment
from zrt.runtime.endpoints import endpoint
from zrt.runtime.process.logs import VARIABLE
from zrt.runtime.process.spawn import command

PORT_S: Final = 5.0
"""How long a coordinator waits for the port of the one whose place it takes."""


@dataclass(frozen=True, slots=True)
class Line:
    """`environment` is added to our own."""

    argv: list[str]
    environment: dict[str, str]


class CommandLines:
    """Those of the processes of `conf`, which the command line words `words` name; `cluster` is the
    id all of them know the cluster by.

    Where it is `detached`, our stderr is a log of several processes.
    """

    def __init__(self, conf: Conf, words: list[str], cluster: str, *, detached: bool) -> None:
        self._conf = conf
        self._words = words
        self._cluster = cluster
        self._detached = detached

    def coordinator(self) -> Line:
        return Line(
            [*command("actor", "coordinator"), *self._words, "--cluster-id", self._cluster], self._environment(1)
        )

    def coordinator_again(self, reached: str) -> list[str]:
        """What is added for one that takes the place of the one reached there: everybody looks for
        it there, and a passing connection may have its port.
        """
        return ["--listen", bound(self._conf.cluster, reached), "--port-wait", str(PORT_S)]

    def server(self, name: str, join: str, conf: Stage | Spares) -> Line:
        alone, shared = threads(self._conf, conf, len(os.sched_getaffinity(0)))
        words = [*self._member(name, join, conf), "--threads", str(alone), "--shared-threads", str(shared)]
        return Line([*command("actor", "block-server"), *words], self._environment(alone))

    def worker(self, join: str, conf: Worker) -> Line:
        count = conf.threads or len(os.sched_getaffinity(0))
        words = [*self._member(conf.name, join, conf), "--threads", str(count)]
        return Line([*command("worker"), *words], self._environment(count))

    def _member(self, name: str, join: str, conf: Stage | Spares | Worker) -> list[str]:
        memory = [] if conf.memory is None else ["--memory", str(conf.memory)]
        return ["--join", join, "--name", name, "--device", conf.device, "--cluster-id", self._cluster, *memory]

    def _environment(self, threads: int) -> dict[str, str]:
        log = self._conf.log
        form = "dated" if log.format == "text" and self._detached else log.format
        return thread_environment(threads) | {VARIABLE: f"{log.level}:{form}"}


def bound(cluster: ClusterSettings, reached: str) -> str:
    """Where the coordinator that is reached there listens, its port included."""
    if cluster.advertise is None:
        return reached
    if endpoint(cluster.listen)[1]:
        return cluster.listen
    return f"{cluster.listen.rpartition(':')[0]}:{endpoint(reached)[1]}"
