"""What `zrt up` does when one of its processes is ready, hangs, dies, or is not started again.

Sends to the coordinator: ChildDied.
"""

import logging
import time
from typing import Final, Protocol

import msgspec

from zrt.actors.node.console import Console
from zrt.actors.node.departure import Departure
from zrt.actors.node.recovery_report import Recoveries
from zrt.runtime.actor.actor_process import DOWN_STATUS
from zrt.runtime.actor.member import Member
from zrt.runtime.cluster.file_schema import Conf
from zrt.runtime.cluster.seats import spare_names
from zrt.runtime.errors import KINDS, Kind, ZrtError
from zrt.runtime.formatting import counted
from zrt.runtime.messages.members import ChildDied
from zrt.runtime.process.spawn import Ready
from zrt.runtime.process.supervisor import Child, ChildObserver, Death

log = logging.getLogger(__name__)

COORDINATOR: Final = "coordinator"
TELL_S: Final = 3.0
"""How long the coordinator may take to answer that it has heard of a death."""
HUNG_S: Final = 4.0
"""How long the coordinator, which is asked once a second, may answer nothing before it is taken for
hung; what our own loop was late is not counted."""


class ClusterState(Protocol):
    """The state of the node that the events of processes depend on. `member` is None until the
    coordinator is ready; `was_ready`: the cluster has been ready."""

    @property
    def member(self) -> Member | None: ...

    @property
    def was_ready(self) -> bool: ...


class ProcessLosses(ChildObserver):
    """The events of one cluster's processes. A death is told to the coordinator and on stderr. A
    final death ends the cluster (see Departure) if it is the coordinator's, or while the cluster
    comes up that of any process but a spare. Later a final death ends only the sessions of a stage
    that is lost, and the cluster stays."""

    def __init__(self, conf: Conf, cluster: ClusterState, departure: Departure, console: Console) -> None:
        self.recoveries = Recoveries()
        self._conf = conf
        self._cluster = cluster
        self._departure = departure
        self._console = console
        self._spares = spare_names(conf)
        self._coordinator: Child | None = None
        self._coordinator_ready = 0.0
        self._away: dict[str, ChildDied] = {}
        """The last death of each child that is not back, or will not come back."""

    def on_ready(self, child: Child, ready: Ready) -> None:
        self._away.pop(child.name, None)
        if child.name == COORDINATOR:
            self._coordinator, self._coordinator_ready = child, time.monotonic()

    def on_death(self, child: Child, death: Death) -> None:
        if self._departure.ended.is_set():
            return
        if child.name == COORDINATOR and (self._departure.announced or death.exit == DOWN_STATUS):
            self._departure.ended.set()
            return
        brief = msgspec.structs.replace(death, words="") if death.pid else death  # its words were shown as they came
        if death.restarting:
            self.recoveries.lost(child.name, time.monotonic())
            self._console.say(f"zrt: {brief}; it is started again")
        else:
            self.recoveries.given_up(child.name)
        report = ChildDied(death.name, death.incarnation, death.exit, death.restarting)
        self._away[child.name] = report
        if self._cluster.member is not None:
            self._report(self._cluster.member, report)
        if not death.restarting:
            self._on_loss(child, final_loss(child, self._conf, str(death), str(brief)))

    def on_registered(self, again: bool) -> None:
        """Tell the present coordinator of the processes that are not there: it would wait for them,
        and give no other their blocks. A coordinator that has not changed (`again`) knows of those
        that are started again."""
        member = self._cluster.member
        for report in self._away.values():
            if member is not None and report.name != COORDINATOR and not (again and report.restarting):
                self._report(member, report)

    def watch(self) -> None:
        """Kill a hung coordinator, so that it starts again. The coordinator itself tells when other
        processes hang, if it ever knew them (see Absentees)."""
        member, child = self._cluster.member, self._coordinator
        if member is None or child is None or child.incarnation == 0:
            return
        silent = time.monotonic() - max(member.heard, self._coordinator_ready)
        if silent > HUNG_S + member.lag_ms / 1000:
            self._console.say(
                f"zrt: {child.name} (process {child.pid}) has been silent for {silent:.1f} s and is killed"
            )
            child.kill()

    def _on_loss(self, child: Child, loss: ZrtError) -> None:
        """Act on a process that is not started again."""
        if child.name == COORDINATOR or not (self._cluster.was_ready or child.name in self._spares):
            self._departure.fail(loss)
        else:
            self._console.say(f"zrt: {loss}; the cluster stays")

    def _report(self, member: Member, report: ChildDied) -> None:
        member.spawn(self._tell_death(member, report), f"death of {report.name}")

    async def _tell_death(self, member: Member, report: ChildDied) -> None:
        try:
            await member.ask_coordinator(report, timeout=TELL_S)
        except ZrtError as error:
            log.info("the coordinator did not hear that %s died: %s", report.name, error)


def final_loss(child: Child, conf: Conf, told: str, brief: str) -> ZrtError:
    """Return the error that stands for the loss of a child, whose death is described in full by
    `told`, and by `brief` where the child's last words have been shown.

    Its kind is the one that clients get, where the process did not say itself what is wrong.
    """
    error = child.fault or ZrtError("internal", told)
    kind: Kind = error.kind
    if kind == "internal":
        kind = _kind(child.name, conf)
    again = f", after {counted(child.restarts, 'restart')}" if child.restarts else ""
    where = "" if child.name == COORDINATOR else error.where  # what it refuses was said to `zrt up`
    return ZrtError(kind, error.message.replace(told, brief) + again, where)


def final_fault(text: str) -> ZrtError:
    """Return the error that a cluster's fault, "KIND: MESSAGE", describes."""
    kind, _, message = text.partition(": ")
    return ZrtError.of(kind, message) if kind in KINDS else ZrtError("stage_lost", text)


def _kind(name: str, conf: Conf) -> Kind:
    if name == COORDINATOR:
        return "coordinator_lost"
    return "worker_failed" if any(worker.name == name for worker in conf.workers) else "stage_lost"
