"""The coordinator's processes: who registers, beats, hangs and dies, and what each is given to
hold.

Receives from every process: Register, Beat. From `zrt up`: ChildDied. From block servers:
StateChanged, LoadProgress. Sends to block servers: Assign, Workers. To `zrt up`: Kill.
"""

import logging
import secrets
import time
from collections.abc import Callable
from itertools import count
from typing import get_args

from zrt.actors.coordinator.event_log import EventLog
from zrt.actors.coordinator.fleet.roster import Roster
from zrt.actors.coordinator.fleet.worker_allocation import WorkerAllocation
from zrt.actors.coordinator.sessions.generations import Generations
from zrt.runtime.actor.actor import Actor
from zrt.runtime.actor.envelope import Envelope
from zrt.runtime.actor.log_limiter import LogLimiter
from zrt.runtime.cluster.file_schema import Conf
from zrt.runtime.endpoints import split_endpoint
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.control import Address, Control, Done
from zrt.runtime.messages.members import (
    ActorKind,
    Assign,
    Assignment,
    Beat,
    ChildDied,
    GoingDown,
    Kill,
    LoadProgress,
    Register,
    Registered,
    Shutdown,
    StateChanged,
    Workers,
)
from zrt.runtime.process.spawn import ended_by

log = logging.getLogger(__name__)

BEAT_MS = 1000
SUSPICION_S = 3.0  # silence after which a process is taken for hung
ASSIGN_DEADLINE_S = 10.0
TAKEN_OVER = ("loading", "ready", "draining", "drained")  # states of a process whose blocks are of use
WATCH_S = 1.0


class Membership:
    """`template` is what all assignments have in common, `cluster` the cluster's id; `changed` is
    called when there is something to tell subscribers."""

    def __init__(
        self,
        actor: Actor,
        conf: Conf,
        roster: Roster,
        generations: Generations,
        happened: EventLog,
        *,
        template: Assignment,
        cluster: str,
        changed: Callable[[], None],
    ) -> None:
        self._actor = actor
        self._conf = conf
        self._roster = roster
        self._generations = generations
        self._happened = happened
        self._template = template
        self._cluster = cluster
        self._changed = changed
        self._helping = WorkerAllocation(conf)
        self._complaints = LogLimiter(actor.name)
        self._down_at: float | None = None
        self.closed = False
        """Processes end: nobody is given blocks any more."""
        self._serials = count(
            secrets.randbits(62)
        )  # none that an earlier coordinator gave: members still hold its assignments
        actor.handle(Register, self._on_register)
        actor.handle(Beat, self._on_beat)
        actor.handle(StateChanged, self._on_state)
        actor.handle(LoadProgress, self._on_load_progress)
        actor.handle(ChildDied, self._on_child_died)
        actor.on_peer_death(self._on_peer_death)

    def start(self) -> None:
        """Look from now on after those that fall silent."""
        self._actor.every(WATCH_S, self._watch)

    def _on_register(self, message: Register, envelope: Envelope) -> Control:
        header = envelope.header
        address = Address(header.sender, header.incarnation, message.endpoint)
        split_endpoint(message.endpoint)
        if message.cluster not in ("", self._cluster):
            name = self._conf.cluster.name
            text = f"{header.sender} belongs to another cluster than {name!r}, which has this port now: start it anew to join"
            raise ZrtError("unauthorized", text, self._actor.name)
        if header.sender == self._actor.name or not header.sender.isprintable():
            raise ZrtError("bad_request", f"no process here may be called {header.sender!r}", self._actor.name)
        again = self._roster.find(header.sender)
        entry = self._roster.register(address, message, time.monotonic())
        if message.holds is not None and message.state in TAKEN_OVER:
            self._roster.take_over(entry, message.holds, self._template, ready=message.state == "ready")
        if again is not None:
            # what it told us while its connection was broken is lost
            self._generations.moves.peer_lost(address, f"{address.name} was out of reach")
        if message.kind == "layer_worker":
            self._actor.watch(address)
            self._helping.came(address.name, message.serves)
            if again is None and (why := self._helping.useless(address.name)):
                log.warning("the worker %s has nothing to do here: %s", address.name, why)
        self._place()
        self._workers_changed()
        if self._down_at is not None:
            self.tell(address, self._going_down(self._down_at))
        return Registered(self._actor.incarnation, BEAT_MS, self._cluster)

    def _place(self) -> None:
        """Give blank block servers what the plan lacks, and make those blank that hold what it does
        not need."""
        for entry in () if self.closed else self._roster.place():
            assignment = entry.assign(self._template, next(self._serials))
            self._actor.spawn(self._assign(entry.address, assignment), f"assign {entry.address.name}")
        for entry in self._roster.surplus():
            self._actor.spawn(self._assign(entry.address, None), f"free {entry.address.name}")
        self.changed()

    def changed(self) -> None:
        """Block servers come, go, or are in another state: sessions and subscribers are to know."""
        self._generations.moves.routes_changed()
        self._changed()

    def _workers_changed(self, *gone: Address) -> None:
        """Tell the block servers that lend which workers they have now; `gone` are those whose
        process is not there any more."""
        workers = {entry.address.name: entry.address for entry in self._roster.of_kind("layer_worker")}
        servers = [
            entry for entry in self._roster.of_kind("block_server") if entry.seat is not None and entry.seat.lends
        ]
        self._helping.share_out(
            workers, {entry.address.name: entry.waits for entry in servers if entry.seat and entry.seat.helped}
        )
        for entry in servers:
            assert entry.seat is not None
            there, awaited = self._helping.of(entry.address.name, entry.seat, workers)
            self.tell(entry.address, Workers([workers[name] for name in there], awaited, list(gone)))

    async def _assign(self, address: Address, assignment: Assignment | None) -> None:
        try:
            self._workers_changed()  # before: a block server that lends looks for its workers at once
            await self._actor.ask(address, Assign(assignment), timeout=ASSIGN_DEADLINE_S)
        except ZrtError as error:
            level = logging.INFO if error.kind == "stage_lost" else logging.WARNING  # that it died is told elsewhere
            log.log(level, "%s took no assignment: %s", address.name, error)
            self._gone(address.name, address.incarnation)

    def _on_beat(self, message: Beat, envelope: Envelope) -> Control:
        sender = _sender(envelope)
        before = self._roster.known(sender).load.group
        entry = self._roster.beat(sender, message, time.monotonic())
        group = entry.load.group
        if before is not None and group is not None and group.rebuilds > before.rebuilds:
            self._happened.add("rebuild", entry.address.name, f"its group of ranks is formed anew: {group.fault}")
        if entry.blank:
            self._place()  # it may have more room than it had
        return Done()

    def _on_state(self, message: StateChanged, envelope: Envelope) -> None:
        entry = self._roster.state_changed(_sender(envelope), message)
        fault = message.fault
        self._happened.add(
            "state",
            entry.address.name,
            f"is {message.state}" + (f": {fault.message}" if fault else ""),
            fault.kind if fault else "",
        )
        if message.state == "loading":  # what it held of sessions is gone
            why = fault.message if fault else f"{entry.address.name} loads its blocks anew"
            self._generations.moves.peer_lost(entry.address, why)
        self._place()

    def _on_load_progress(self, message: LoadProgress, envelope: Envelope) -> None:
        self._roster.load_progress(_sender(envelope), message)
        self._changed()

    def _on_child_died(self, message: ChildDied, envelope: Envelope) -> Control:
        if self._roster.known(_sender(envelope)).kind != "supervisor":
            raise ZrtError("unauthorized", f"{envelope.header.sender} is nobody's parent", self._actor.name)
        if message.incarnation:  # else it was never ready, so whoever has its name is another
            self._gone(message.name, message.incarnation)
        ended = ended_by(message.exit)
        again = "is started again" if message.restarting else "is not started again"
        news = True
        if message.restarting:
            self._roster.restarted(message.name)
        else:
            why = f"{message.name} {ended} and is not started again: another may join in its place, or `zrt down` and `zrt up`"
            news = self._roster.lost(message.name, why)
            self._helping.lost(message.name)
            self._workers_changed()
        if news:
            self._happened.add("death", message.name, f"{ended}; it {again}")
        self._place()
        return Done()

    def _on_peer_death(self, address: Address) -> None:
        self._gone(address.name, address.incarnation)

    def _gone(self, name: str, incarnation: int) -> None:
        """A process ended, or its connection did: its seat is free, its sessions take another
        route."""
        entry = self._roster.died(name, incarnation)
        if entry is None:
            return
        self._happened.add("death", name, f"process {entry.pid} on {entry.host} is gone")
        self._actor.forget(entry.address)
        self._generations.moves.peer_lost(entry.address, f"{name} is gone", died=True)
        self._place()
        if entry.kind == "layer_worker":
            self._workers_changed(entry.address)

    def _watch(self) -> None:
        """Processes that stopped beating, less what this loop itself was late."""
        now = time.monotonic()
        for entry in self._roster.silent(now, SUSPICION_S + self._actor.lag_ms / 1000):
            text = f"{entry.address.name} has been silent for {now - entry.last_beat:.1f} s"
            if entry.beaten:
                log.warning(text)
            else:
                self._complaints.add("never beat", text)
            for supervisor in self._roster.of_kind("supervisor"):
                if supervisor is not entry:
                    self.tell(supervisor.address, Kill(entry.address.name, entry.address.incarnation))
            self._gone(entry.address.name, entry.address.incarnation)

    def go_down(self, seconds: float) -> None:
        """Tell all who are here, and all who come, that the cluster ends, in so long at most."""
        self._down_at = time.monotonic() + seconds
        for kind in get_args(ActorKind):
            for entry in self._roster.of_kind(kind):
                self.tell(entry.address, self._going_down(self._down_at))

    @staticmethod
    def _going_down(at: float) -> GoingDown:
        return GoingDown(max(0, int(1000 * (at - time.monotonic()))))

    def tell(self, address: Address, message: Kill | GoingDown | Shutdown | Workers) -> None:
        """Tell it if it listens: one that does not must not keep us from the rest of our work."""
        try:
            self._actor.tell(address, message)
        except ZrtError as error:
            log.warning("%s does not hear a %s: %s", address.name, type(message).__name__, error)


def _sender(envelope: Envelope) -> Address:
    header = envelope.header
    return Address(header.sender, header.incarnation, "")
