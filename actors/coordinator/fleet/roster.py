"""The processes that are there, and what each holds and does, as the coordinator hears of it. Pure:
no sockets, no clock (times are passed in)."""

from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from zrt.actors.coordinator.fleet.pipeline import Pipeline
from zrt.actors.coordinator.fleet.placement import Placement, StageMemory
from zrt.actors.coordinator.fleet.process_record import ProcessRecord
from zrt.runtime.cluster.seats import Seat
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.cluster import ActorInfo, pipeline_order
from zrt.runtime.messages.control import Address
from zrt.runtime.messages.members import (
    GPU_MEMORY,
    ActorKind,
    ActorState,
    Assignment,
    Beat,
    LoadProgress,
    Register,
    StateChanged,
)

MOST: Final = 1024
"""How many processes are known at once; more would be strangers."""


class Roster:
    """The processes of one cluster, the seats of its plan, and the `pipeline` that they make.

    `memory` says what a seat takes and offers. `spares` are the names of the blank block servers
    that are started along.
    """

    def __init__(
        self,
        plan: Sequence[Seat],
        memory: StageMemory,
        *,
        spares: Sequence[str] = (),
    ) -> None:
        self._names = [seat.name for seat in plan] + list(spares)
        self._records: dict[str, ProcessRecord] = {}
        self._lost: dict[str, str] = {}
        self._restarts = dict.fromkeys(self._names, 0)  # of those that are not here
        self._placement = Placement(plan, self._records, memory, set(self._names))
        self.pipeline = Pipeline(self._placement, self._records, self._names, self._lost, memory)
        self.stale = 0
        """Messages of processes that are not here (any more), and of older assignments."""

    # ---- what is heard ---------------------------------------------------------------------------

    def register(self, address: Address, message: Register, now: float) -> ProcessRecord:
        """Take in a process that is here, or here again, and return its record.

        ZrtError bad_request: another process of its name is alive, or another supervisor (a cluster
        has one parent); overloaded.
        """
        old = self._records.get(address.name)
        if old is not None and old.address.incarnation != address.incarnation:
            raise ZrtError("bad_request", f"the name {address.name} is taken by process {old.pid} on {old.host}")
        for other in self.of_kind("supervisor") if old is None and message.kind == "supervisor" else ():
            raise ZrtError(
                "bad_request", f"{other.address.name} (process {other.pid} on {other.host}) is the parent here"
            )
        if old is None and len(self._records) >= MOST:
            raise ZrtError("overloaded", f"{MOST} processes have registered already")
        record = ProcessRecord.registered(address, message, now, old)
        self._records[address.name] = record
        self._lost.pop(address.name, None)
        self._placement.free_seat_of(address.name)
        return record

    def take_over(self, record: ProcessRecord, holds: Assignment, template: Assignment, *, ready: bool = False) -> bool:
        """Leave a process what an earlier coordinator gave it, if the plan has a free seat for just
        that (the seat of its own name, if that is one); return whether it had. For a process that
        is `ready` a seat counts as free, too, that this coordinator gave to another that still
        loads.

        The process serves from there once it says how it is: what it still knows of the earlier
        coordinator's sessions is forgotten by then.
        """
        common = replace(holds, serial=0, first=0, last=0, tp=1, lend=[], helped=False, gpu_memory=GPU_MEMORY)
        if record.seat is not None or common != template:
            return False
        wanted = holds.first, holds.last, holds.tp, holds.lend, holds.helped
        fresh = [other for other in self._records.values() if ready and other.given and other.state == "loading"]
        fits = [
            seat
            for seat in [*self._placement.empty(), *(other.seat for other in fresh if other.seat is not None)]
            if (seat.first, seat.last, seat.tp, list(seat.lend), seat.helped) == wanted
        ]
        if not fits:
            return False
        seat = next((seat for seat in fits if seat.name == record.address.name), fits[0])
        for other in fresh:
            if other.seat == seat:
                other.yield_seat()
        record.keep(seat, holds.serial)
        return True

    def surplus(self) -> list[ProcessRecord]:
        """Return the block servers that hold or load what the plan has no seat for, each once: they
        are to be told to let go of it."""
        found = [
            record
            for record in self.of_kind("block_server")
            if record.seat is None and record.serial and record.state != "failed"
        ]
        for record in found:
            record.let_go()
        return found

    def known(self, address: Address) -> ProcessRecord:
        """Return the record of this incarnation. ZrtError unknown_session: it has not registered,
        and should do so (again)."""
        record = self._records.get(address.name)
        if record is None or record.address.incarnation != address.incarnation:
            self.stale += 1
            raise ZrtError("unknown_session", f"{address.name} is not registered here: register first")
        return record

    def beat(self, address: Address, message: Beat, now: float) -> ProcessRecord:
        """Note a beat of `address`, and return its record. ZrtError as `known`."""
        record = self.known(address)
        record.take_beat(message, now)
        return record

    def state_changed(self, address: Address, message: StateChanged) -> ProcessRecord:
        """Note a block server's state, unless it is of an older assignment, and return its record.
        ZrtError as `known`."""
        record = self.known(address)
        self.stale += not record.change_state(message)
        return record

    def load_progress(self, address: Address, message: LoadProgress) -> None:
        """Note how far a block server has loaded, unless that is of an older assignment. ZrtError
        as `known`."""
        self.stale += not self.known(address).take_progress(message)

    def died(self, name: str, incarnation: int) -> ProcessRecord | None:
        """Drop a process that is gone (incarnation 0: whichever has that name); return its record,
        if it was here."""
        record = self._records.get(name)
        if record is None or incarnation not in (0, record.address.incarnation):
            return None
        del self._records[name]
        if name in self._restarts:
            self._restarts[name] = record.registration.restarts
        self._placement.room_changes(record.host, record.last_beat.rss_bytes)
        return record

    def restarted(self, name: str) -> None:
        """Note that a process ended and is started again: its seat is not kept for it."""
        self._placement.free_seat_of(name)

    def lost(self, name: str, why: str) -> bool:
        """Note that a process will not be started again; return whether that is news, which it is
        not where another has come in its name meanwhile."""
        if name in self._records or name in self._lost:
            return False
        self._placement.free_seat_of(name)
        self._lost[name] = why
        return True

    def silent(self, now: float, limit: float) -> list[ProcessRecord]:
        """Return the processes without a beat for more than `limit` seconds."""
        return [record for record in self._records.values() if now - record.last_beat.at > limit]

    # ---- what follows ----------------------------------------------------------------------------

    def place(self) -> list[ProcessRecord]:
        """Give empty seats to blank block servers, as Placement.place says; return those that got
        one."""
        return self._placement.place()

    def drain(self, name: str) -> ProcessRecord:
        """Offer a replica to no new session, and return its record. ZrtError as the client message
        Drain."""
        record = self.block_server(name)
        if record.state in ("draining", "drained"):
            raise ZrtError("draining", f"{name} is {record.state}: `zrt undrain {name}` lets it serve again")
        if record.state in ("starting", "loading"):
            raise ZrtError("warming_up", f"{name} is {record.state}: drain it when it is ready")
        if not record.routable:
            raise ZrtError(
                "model_not_loaded",
                f"{name} is {record.state}: it serves nothing that could be drained{self._served_by(name)}",
            )
        record.serve("draining")
        return record

    def undrain(self, name: str) -> ProcessRecord:
        """Offer a drained replica again, and return its record; one that loads is offered when it
        has loaded. ZrtError as the client message Undrain."""
        record = self.block_server(name)
        if record.state not in ("draining", "drained", "loading"):
            raise ZrtError("bad_request", f"{name} is {record.state}, not drained{self._served_by(name)}")
        if record.state != "loading":
            record.serve("ready")
        return record

    def block_server(self, name: str) -> ProcessRecord:
        """Return the block server of this name. ZrtError bad_request: there is none; warming_up:
        its process is being started."""
        record = self._records.get(name)
        if record is None or record.kind != "block_server":
            names = ", ".join(sorted(record.address.name for record in self.of_kind("block_server"))) or "none"
            if name in self._lost:
                raise ZrtError("bad_request", f"{self._lost[name]}{self._served_by(name)}")
            if record is None and name in self._names:
                later = self._served_by(name) or ", and serves once it has loaded"
                raise ZrtError("warming_up", f"{name} is being started{later}")
            raise ZrtError("bad_request", f"there is no block server called {name}; there are: {names}")
        return record

    def _served_by(self, name: str) -> str:
        """Return which other processes serve the stage that a process is named after, in words that
        follow; empty where it has the seat, or none is named so."""
        return "".join(
            f"; stage {seat.stage} is served by {', '.join(others)}"
            for seat in self._placement.plan
            if seat.name == name
            for others in [[record.address.name for record in self._placement.holders(seat.stage)]]
            if others and name not in others
        )

    def server_or_worker(self, name: str) -> ProcessRecord:
        """Return the block server or layer worker of this name. ZrtError bad_request: there is
        neither."""
        record = self._records.get(name)
        return record if record is not None and record.kind == "layer_worker" else self.block_server(name)

    def find(self, name: str) -> ProcessRecord | None:
        """Return the process of this name, of whatever kind; None if it is not here."""
        return self._records.get(name)

    def of_kind(self, kind: ActorKind) -> list[ProcessRecord]:
        return [record for record in self._records.values() if record.kind == kind]

    def all(self) -> list[ProcessRecord]:
        """Return every process that is here."""
        return list(self._records.values())

    def infos(self, now: float) -> list[ActorInfo]:
        """Return every process, for people: block servers in pipeline order first, with those that
        are awaited or lost."""
        infos = [record.info(now) for record in self._records.values()]
        used = {worker.name for info in infos if info.lend for worker in info.lend.workers if worker.layers}
        for info in infos:
            if info.kind == "layer_worker" and info.name not in used and info.state in ("blank", "loading", "ready"):
                info.state = "reserve"
        seats = {seat.name: seat.stage for seat in reversed(self._placement.empty())}
        for name in self._names:
            if name not in self._records:
                state: ActorState = "failed" if name in self._lost else "starting"
                fault = self._lost.get(name, "")
                restarts = self._restarts[name]
                stage = seats.get(name, -1)
                infos.append(ActorInfo(name, "block_server", state, stage=stage, restarts=restarts, fault=fault))
        return sorted(infos, key=pipeline_order)
