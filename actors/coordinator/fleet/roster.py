"""Who is there, and what each holds and does, as the coordinator hears of it. Pure: no sockets, no
clock (times are passed in)."""

from collections.abc import Callable, Sequence
from typing import Final

from msgspec.structs import replace

from zrt.actors.coordinator.fleet.pipeline import Pipeline
from zrt.actors.coordinator.fleet.placement import Placement
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
"""Processes known at once; more would be strangers."""


class Roster:
    """The processes of one cluster, the seats of its plan, and the `pipeline` that they make.

    `needed(first, last)` is the bytes a block server takes in all that holds these blocks,
    `pages(seat)` the KV pages it then has. `spares` are the names of the blank block servers that
    are started along.
    """

    def __init__(
        self,
        plan: Sequence[Seat],
        *,
        needed: Callable[[int, int], int],
        pages: Callable[[Seat], int],
        spares: Sequence[str] = (),
    ) -> None:
        self._names = [seat.name for seat in plan] + list(spares)
        self._entries: dict[str, ProcessRecord] = {}
        self._lost: dict[str, str] = {}
        self._restarts = dict.fromkeys(self._names, 0)  # of those that are not here
        self._seating = Placement(plan, self._entries, needed, set(self._names))
        self.pipeline = Pipeline(self._seating, self._entries, self._names, self._lost, pages)
        self.stale = 0
        """Messages of processes that are not here (any more), and of older assignments."""

    # ---- what is heard ---------------------------------------------------------------------------

    def register(self, address: Address, message: Register, now: float) -> ProcessRecord:
        """A process is here, or here again.

        ZrtError bad_request: another process of its name is alive, or another supervisor (a cluster
        has one parent); overloaded.
        """
        old = self._entries.get(address.name)
        if old is not None and old.address.incarnation != address.incarnation:
            raise ZrtError("bad_request", f"the name {address.name} is taken by process {old.pid} on {old.host}")
        for other in self.of_kind("supervisor") if old is None and message.kind == "supervisor" else ():
            raise ZrtError(
                "bad_request", f"{other.address.name} (process {other.pid} on {other.host}) is the parent here"
            )
        if old is None and len(self._entries) >= MOST:
            raise ZrtError("overloaded", f"{MOST} processes have registered already")
        entry = ProcessRecord(address, message.kind, message.pid, message.host, message.device, message.state, now)
        entry.restarts = message.restarts
        entry.memory_bytes, entry.room_bytes = message.memory_bytes, message.room_bytes
        entry.shares_cores = message.shares_cores
        if old is not None:
            entry.seat, entry.serial, entry.given, entry.load = old.seat, old.serial, old.given, old.load
            entry.beaten = old.beaten
        elif message.kind == "block_server":
            entry.state = "blank"  # what it holds is of an assignment that nobody remembers
            entry.serial = message.holds.serial if message.holds is not None else 0
        self._entries[address.name] = entry
        self._lost.pop(address.name, None)
        self._seating.awaited.discard(address.name)
        return entry

    def take_over(self, entry: ProcessRecord, holds: Assignment, template: Assignment, *, ready: bool = False) -> bool:
        """Leave a process what an earlier coordinator gave it, if the plan has a free seat for just
        that; one of its own name, if it can be. If it is `ready`, one counts as free that this
        coordinator has given to another, who came first and still loads.

        It serves from there once it says how it is: what it still knows of the earlier
        coordinator's sessions is forgotten by then.
        """
        common = replace(holds, serial=0, first=0, last=0, tp=1, lend=[], helped=False, gpu_memory=GPU_MEMORY)
        if entry.seat is not None or common != template:
            return False
        wanted = holds.first, holds.last, holds.tp, holds.lend, holds.helped
        fresh = [other for other in self._entries.values() if ready and other.given and other.state == "loading"]
        fits = [
            seat
            for seat in [*self._seating.empty(), *(other.seat for other in fresh if other.seat is not None)]
            if (seat.first, seat.last, seat.tp, list(seat.lend), seat.helped) == wanted
        ]
        if not fits:
            return False
        seat = next((seat for seat in fits if seat.name == entry.address.name), fits[0])
        for other in fresh:
            if other.seat == seat:
                other.seat, other.state = None, "blank"
        entry.seat, entry.serial, entry.given = seat, holds.serial, False
        entry.state = "loading"
        return True

    def surplus(self) -> list[ProcessRecord]:
        """Block servers that hold or load what the plan has no seat for, each once: they are to be
        told to let go of it."""
        found = [
            entry
            for entry in self.of_kind("block_server")
            if entry.seat is None and entry.serial and entry.state != "failed"
        ]
        for entry in found:
            entry.serial, entry.given = 0, False
        return found

    def known(self, address: Address) -> ProcessRecord:
        """ZrtError unknown_session unless this incarnation has registered: it should do so
        (again)."""
        entry = self._entries.get(address.name)
        if entry is None or entry.address.incarnation != address.incarnation:
            self.stale += 1
            raise ZrtError("unknown_session", f"{address.name} is not registered here: register first")
        return entry

    def beat(self, address: Address, message: Beat, now: float) -> ProcessRecord:
        entry = self.known(address)
        if message.load is not None:
            seconds = now - entry.last_beat
            if seconds > 0 and entry.beaten:  # else it may have worked long before it was heard here
                entry.busy_share = min(1.0, (message.load.busy_us - entry.load.busy_us) / 1e6 / seconds)
                entry.tokens_s = max(0, message.load.tokens - entry.load.tokens) / seconds
            entry.load = message.load
        entry.last_beat = now
        entry.beaten = True
        entry.rss_bytes = message.rss_bytes
        entry.room_bytes = message.room_bytes
        if entry.seat is None:
            entry.state = message.state
        return entry

    def state_changed(self, address: Address, message: StateChanged) -> ProcessRecord:
        entry = self.known(address)
        if message.serial == entry.serial and entry.seat is not None:
            if message.state == "loading" and entry.state != "loading":
                entry.done_bytes = entry.graphs = 0
            entry.state = message.state
            entry.fault = message.fault if message.state == "failed" else None
        else:
            self.stale += 1
        return entry

    def load_progress(self, address: Address, message: LoadProgress) -> None:
        entry = self.known(address)
        if message.serial == entry.serial:
            entry.done_bytes, entry.total_bytes = message.done, message.total
            entry.graphs, entry.all_graphs = message.graphs, message.all_graphs
            entry.load.lend = message.lend
        else:
            self.stale += 1

    def died(self, name: str, incarnation: int) -> ProcessRecord | None:
        """A process is gone (incarnation 0: whichever has that name); its entry, if it was here."""
        entry = self._entries.get(name)
        if entry is None or incarnation not in (0, entry.address.incarnation):
            return None
        del self._entries[name]
        if name in self._restarts:
            self._restarts[name] = entry.restarts
        self._seating.room_changes(entry.host, entry.rss_bytes)
        return entry

    def restarted(self, name: str) -> None:
        """A process ended, and is started again: its seat is not kept for it."""
        self._seating.awaited.discard(name)

    def lost(self, name: str, why: str) -> bool:
        """A process that will not be started again; whether that is news. It is not where another
        has come in its name meanwhile."""
        if name in self._entries or name in self._lost:
            return False
        self._seating.awaited.discard(name)
        self._lost[name] = why
        return True

    def silent(self, now: float, limit: float) -> list[ProcessRecord]:
        """Processes without a beat for more than `limit` seconds."""
        return [entry for entry in self._entries.values() if now - entry.last_beat > limit]

    # ---- what follows ----------------------------------------------------------------------------

    def place(self) -> list[ProcessRecord]:
        """Give what the plan lacks to blank block servers; those that got a seat. See
        Seating.place."""
        return self._seating.place()

    def drain(self, name: str) -> ProcessRecord:
        """Offer this replica to no new session. ZrtError as the client message Drain."""
        entry = self.block_server(name)
        if entry.state in ("draining", "drained"):
            raise ZrtError("draining", f"{name} is {entry.state}: `zrt undrain {name}` lets it serve again")
        if entry.state in ("starting", "loading"):
            raise ZrtError("warming_up", f"{name} is {entry.state}: drain it when it is ready")
        if not entry.routable:
            raise ZrtError("model_not_loaded", f"{name} is {entry.state}: it serves nothing that could be drained")
        entry.state = "draining"
        return entry

    def undrain(self, name: str) -> ProcessRecord:
        """Offer it again; one that loads when it has loaded, if it says that it was drained.
        ZrtError as the client message Undrain."""
        entry = self.block_server(name)
        if entry.state not in ("draining", "drained", "loading"):
            raise ZrtError("bad_request", f"{name} is {entry.state}, not drained")
        if entry.state != "loading":
            entry.state = "ready"
        return entry

    def block_server(self, name: str) -> ProcessRecord:
        """ZrtError bad_request: there is none of this name; warming_up: its process is being
        started."""
        entry = self._entries.get(name)
        if entry is None or entry.kind != "block_server":
            names = ", ".join(sorted(entry.address.name for entry in self.of_kind("block_server"))) or "none"
            if name in self._lost:
                raise ZrtError("bad_request", self._lost[name])
            if entry is None and name in self._names:
                raise ZrtError("warming_up", f"{name} is being started, and serves once it has loaded")
            raise ZrtError("bad_request", f"there is no block server called {name}; there are: {names}")
        return entry

    def server_or_worker(self, name: str) -> ProcessRecord:
        """ZrtError bad_request: there is neither a block server nor a layer worker of this name."""
        entry = self._entries.get(name)
        return entry if entry is not None and entry.kind == "layer_worker" else self.block_server(name)

    def find(self, name: str) -> ProcessRecord | None:
        return self._entries.get(name)

    def of_kind(self, kind: ActorKind) -> list[ProcessRecord]:
        return [entry for entry in self._entries.values() if entry.kind == kind]

    def infos(self, now: float) -> list[ActorInfo]:
        """Every process, for people: block servers in pipeline order first, and those that are
        awaited or lost."""
        infos = [entry.info(now) for entry in self._entries.values()]
        seats = {seat.name: seat.stage for seat in reversed(self._seating.empty())}
        for name in self._names:
            if name not in self._entries:
                state: ActorState = "failed" if name in self._lost else "starting"
                fault = self._lost.get(name, "")
                restarts = self._restarts[name]
                stage = seats.get(name, -1)
                infos.append(ActorInfo(name, "block_server", state, stage=stage, restarts=restarts, fault=fault))
        return sorted(infos, key=pipeline_order)
