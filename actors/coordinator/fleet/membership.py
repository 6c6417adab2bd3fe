"""The membership of a cluster: which processes register, beat, hang and die, and what each is given
to hold.

Receives from every process: Register, Beat. From `zrt up`: ChildDied. From block servers:
StateChanged, LoadProgress, Identify. Sends to block servers: Assign, Workers. To `zrt up`: Kill.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from itertools import count
from typing import get_args

from zrt.actors.coordinator.event_log import EventLog
from zrt.actors.coordinator.fleet.process_record import ProcessRecord
from zrt.actors.coordinator.fleet.roster import Roster
from zrt.actors.coordinator.fleet.served_model import ServedModel
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
    Identified,
    Identify,
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
    """The processes of the coordinator `actor`, whose messages are handled here. `template` is what
    all assignments have in common, `model` what block servers are to hold, `cluster` the cluster's
    id; `changed` is called when there is something to tell subscribers."""

    def __init__(
        self,
        actor: Actor,
        conf: Conf,
        roster: Roster,
        generations: Generations,
        event_log: EventLog,
        *,
        template: Assignment,
        model: ServedModel,
        cluster: str,
        changed: Callable[[], None],
    ) -> None:
        self._actor = actor
        self._conf = conf
        self._roster = roster
        self._generations = generations
        self._event_log = event_log
        self._template = template
        self._model = model
        self._identifying = asyncio.Lock()
        self._unsure = ""
        self._cluster = cluster
        self._changed = changed
        self._worker_allocation = WorkerAllocation(conf)
        self._log_limiter = LogLimiter(actor.name)
        self._passed_over: set[Address] = set()
        self._down_at: float | None = None
        self._closed = False
        # Begin with none that an earlier coordinator gave: members still hold its assignments.
        self._serials = count(secrets.randbits(62))
        actor.handle(Register, self._on_register)
        actor.handle(Beat, self._on_beat)
        actor.handle(StateChanged, self._on_state)
        actor.handle(LoadProgress, self._on_load_progress)
        actor.handle(Identify, self._on_identify)
        actor.handle(ChildDied, self._on_child_died)
        actor.on_peer_death(self._on_peer_death)

    def start(self) -> None:
        """Look from now on after processes that fall silent."""
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
        record = self._roster.register(address, message, time.monotonic())
        if message.holds is not None and message.state in TAKEN_OVER:
            self._roster.take_over(record, message.holds, self._template, ready=message.state == "ready")
        if again is not None:
            # what it told us while its connection was broken is lost
            self._generations.rerouting.peer_lost(address, f"{address.name} was out of reach")
        if message.kind == "layer_worker":
            self._actor.watch(address)
            self._worker_allocation.came(address.name, message.serves)
            record.pass_over(self._worker_allocation.useless(address.name))
            if again is None and record.unused:
                log.warning("the worker %s has nothing to do here: %s", address.name, record.unused)
                self._event_log.add("state", address.name, f"has nothing to do here: {record.unused}")
        self._place()
        self._workers_changed()
        if self._down_at is not None:
            self.tell(address, self._going_down(self._down_at))
        return Registered(self._actor.incarnation, BEAT_MS, self._cluster)

    def _place(self) -> None:
        """Give blank block servers what the plan lacks, and make those blank that hold what it does
        not need."""
        for record in () if self._closed else self._roster.place():
            assignment = record.assign(self._template, next(self._serials))
            self._actor.spawn(self._assign(record.address, assignment), f"assign {record.address.name}")
        for record in self._roster.surplus():
            self._actor.spawn(self._assign(record.address, None), f"free {record.address.name}")
        self._tell_passed_over()
        self.changed()

    def _tell_passed_over(self) -> None:
        """Say of each block server once that it is too small for what is lost."""
        unused = {record.address: record.unused for record in self._roster.of_kind("block_server") if record.unused}
        for address in unused.keys() - self._passed_over:
            self._event_log.add("state", address.name, f"stays unused: {unused[address]}")
        self._passed_over = set(unused)

    def changed(self) -> None:
        """Let sessions and subscribers know that block servers came, went, or are in another
        state."""
        self._generations.rerouting.routes_changed()
        self._changed()

    def _workers_changed(self, *gone: Address) -> None:
        """Tell the block servers that lend which workers they have now; `gone` are those whose
        process is not there any more."""
        workers = {record.address.name: record.address for record in self._roster.of_kind("layer_worker")}
        servers = [
            record for record in self._roster.of_kind("block_server") if record.seat is not None and record.seat.lends
        ]
        self._worker_allocation.share_out(
            workers, {record.address.name: record.waits for record in servers if record.seat and record.seat.helped}
        )
        for record in servers:
            assert record.seat is not None
            there, awaited = self._worker_allocation.of(record.address.name, record.seat, workers)
            self.tell(record.address, Workers([workers[name] for name in there], awaited, list(gone)))

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
        record = self._roster.beat(sender, message, time.monotonic())
        group = record.load.group
        if before is not None and group is not None and group.rebuilds > before.rebuilds:
            self._event_log.add("rebuild", record.address.name, f"its group of ranks is formed anew: {group.fault}")
        if record.blank:
            self._place()  # it may have more room than it had
        return Done()

    def _on_state(self, message: StateChanged, envelope: Envelope) -> None:
        record = self._roster.state_changed(_sender(envelope), message)
        fault = message.fault
        if record.state in ("ready", "draining", "drained"):
            self._model.serves(record.address)
        elif record.state == "failed":
            self._model.forget(record.address)
        self._event_log.add(
            "state",
            record.address.name,
            f"is {message.state}" + _as_stage(record) + (f": {fault.message}" if fault else ""),
            fault.kind if fault else "",
        )
        if message.state == "loading":  # what it held of sessions is gone
            why = fault.message if fault else f"{record.address.name} loads its blocks anew"
            self._generations.rerouting.peer_lost(record.address, why)
        self._place()

    def _on_load_progress(self, message: LoadProgress, envelope: Envelope) -> None:
        self._roster.load_progress(_sender(envelope), message)
        self._changed()

    async def _on_identify(self, message: Identify, envelope: Envelope) -> Control:
        asker = self._roster.known(_sender(envelope)).address
        async with self._identifying:
            try:
                differing = await asyncio.to_thread(
                    self._model.differing, message.parts, self._actor.ended.is_set, asker
                )
            except ZrtError as error:
                if error.kind != "bad_model":
                    raise
                if self._unsure != error.message:
                    self._event_log.add(
                        "error", self._actor.name, f"cannot tell which model it serves: {error.message}"
                    )
                self._unsure = error.message
                return Identified([], error.message[:400])
        self._unsure = ""
        try:
            self._roster.known(asker)
        except ZrtError:
            self._model.forget(asker)
            raise
        return Identified(differing)

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
            self._worker_allocation.lost(message.name)
            self._workers_changed()
        if news:
            self._event_log.add("death", message.name, f"{ended}; it {again}")
        self._place()
        return Done()

    def _on_peer_death(self, address: Address) -> None:
        self._gone(address.name, address.incarnation)

    def _gone(self, name: str, incarnation: int) -> None:
        """Drop a process that ended, or whose connection did: its seat is free, its sessions take
        another route."""
        record = self._roster.died(name, incarnation)
        if record is None:
            return
        self._event_log.add("death", name, f"process {record.pid} on {record.host} is gone")
        self._actor.forget(record.address)
        self._model.forget(record.address)
        self._generations.rerouting.peer_lost(record.address, f"{name} is gone", died=True)
        self._place()
        if record.kind == "layer_worker":
            self._workers_changed(record.address)

    def _watch(self) -> None:
        """Have processes killed that stopped beating, allowing for what this loop itself was
        late."""
        now = time.monotonic()
        for record in self._roster.silent(now, SUSPICION_S + self._actor.lag_ms / 1000):
            text = f"{record.address.name} has been silent for {now - record.last_beat.at:.1f} s"
            if record.last_beat.heard:
                log.warning(text)
            else:
                self._log_limiter.add("never beat", text)
            for supervisor in self._roster.of_kind("supervisor"):
                if supervisor is not record:
                    self.tell(supervisor.address, Kill(record.address.name, record.address.incarnation))
            self._gone(record.address.name, record.address.incarnation)

    def close(self) -> None:
        """Give no process blocks any more: they end."""
        self._closed = True

    def go_down(self, seconds: float) -> None:
        """Tell all processes that are here or come that the cluster ends, in `seconds` at most."""
        self._down_at = time.monotonic() + seconds
        for kind in get_args(ActorKind):
            for record in self._roster.of_kind(kind):
                self.tell(record.address, self._going_down(self._down_at))

    @staticmethod
    def _going_down(at: float) -> GoingDown:
        return GoingDown(max(0, int(1000 * (at - time.monotonic()))))

    def tell(self, address: Address, message: Kill | GoingDown | Shutdown | Workers) -> None:
        """Tell a process if it listens: one that does not must not keep the coordinator from the
        rest of its work."""
        try:
            self._actor.tell(address, message)
        except ZrtError as error:
            log.warning("%s does not hear a %s: %s", address.name, type(message).__name__, error)


def _as_stage(record: ProcessRecord) -> str:
    """Return the stage of a process whose name does not tell it, in words that follow."""
    seat, named = record.seat, record.address.name.partition(".")[0]
    return f", as stage {seat.stage}" if seat is not None and named != f"stage{seat.stage}" else ""


def _sender(envelope: Envelope) -> Address:
    header = envelope.header
    return Address(header.sender, header.incarnation, "")
