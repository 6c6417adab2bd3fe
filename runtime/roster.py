"""Who is there, what each holds, and which way a session goes. Pure: no sockets, no clock (times are passed in)."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from zrt.runtime.entries import Entry
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.cluster import ActorInfo, pipeline_order
from zrt.runtime.messages.control import (
    GPU_MEMORY,
    ActorKind,
    ActorState,
    Address,
    Assignment,
    Beat,
    LoadProgress,
    Register,
    StateChanged,
)
from zrt.runtime.seating import Seating
from zrt.runtime.seats import Seat

MOST: Final = 1024
"""Processes known at once; more would be strangers."""

Crowd = Mapping[str, tuple[int, int]]
"""By actor: how many sessions run there, and how many of them in the slot that is asked for."""


class Roster:
    """The processes of one cluster, and the seats of its plan.

    `needed(first, last)` is the bytes a block server takes in all that holds these blocks, `pages(seat)` the KV pages it then has.
    `spares` are the names of the blank block servers that are started along.
    """

    def __init__(
        self,
        plan: Sequence[Seat],
        *,
        needed: Callable[[int, int], int],
        pages: Callable[[Seat], int],
        spares: Sequence[str] = (),
    ) -> None:
        self._pages = pages
        self._names = [seat.name for seat in plan] + list(spares)
        self._entries: dict[str, Entry] = {}
        self._seating = Seating(plan, self._entries, needed, set(self._names))
        self._restarts: dict[str, int] = {}
        self._lost: dict[str, str] = {}
        self.stale = 0
        """Messages of processes that are not here (any more), and of older assignments."""

    @property
    def num_stages(self) -> int:
        return self._seating.num_stages

    @property
    def num_slots(self) -> int:
        """Micro-batches that keep everything busy: one for each stage that computes on a device or cores of its own, and one for all stages
        on the GPUs of a machine, or that share its cores. There two would run at the same time, half as fast, and each would read all weights.
        """
        places = set()
        for stage in range(self.num_stages):
            holders = self._seating.holders(stage)
            shared = holders and all(entry.place for entry in holders)
            places.add(holders[0].place if shared else stage)
        return max(1, len(places))

    # ---- what is heard ------------------------------------------------------------------------------------------

    def register(self, address: Address, message: Register, now: float) -> Entry:
        """A process is here, or here again.

        ZrtError bad_request: another process of its name is alive, or another supervisor (a cluster has one parent); overloaded.
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
        entry = Entry(address, message.kind, message.pid, message.host, message.device, message.state, now)
        entry.memory_bytes, entry.room_bytes = message.memory_bytes, message.room_bytes
        entry.shares_cores = message.shares_cores
        if old is not None:
            entry.seat, entry.serial, entry.load = old.seat, old.serial, old.load
            entry.beaten = old.beaten
        elif message.kind == "block_server":
            entry.state = "blank"  # what it holds is of an assignment that nobody remembers
        self._entries[address.name] = entry
        self._lost.pop(address.name, None)
        self._seating.awaited.discard(address.name)
        return entry

    def take_over(self, entry: Entry, holds: Assignment, template: Assignment) -> bool:
        """Leave a process what an earlier coordinator gave it, if the plan has a free seat for just that; one of its own name, if it can be.

        It serves from there once it says how it is: what it still knows of the earlier coordinator's sessions is forgotten by then.
        """
        common = replace(holds, serial=0, first=0, last=0, tp=1, lend=[], helped=False, gpu_memory=GPU_MEMORY)
        if entry.seat is not None or common != template:
            return False
        wanted = holds.first, holds.last, holds.tp, holds.lend, holds.helped
        free = [
            seat
            for seat in self._seating.empty()
            if (seat.first, seat.last, seat.tp, list(seat.lend), seat.helped) == wanted
        ]
        if not free:
            return False
        entry.seat = next((seat for seat in free if seat.name == entry.address.name), free[0])
        entry.serial = holds.serial
        entry.state = "loading"
        return True

    def known(self, address: Address) -> Entry:
        """ZrtError unknown_session unless this incarnation has registered: it should do so (again)."""
        entry = self._entries.get(address.name)
        if entry is None or entry.address.incarnation != address.incarnation:
            self.stale += 1
            raise ZrtError("unknown_session", f"{address.name} is not registered here: register first")
        return entry

    def beat(self, address: Address, message: Beat, now: float) -> Entry:
        entry = self.known(address)
        if message.load is not None:
            seconds = now - entry.last_beat
            if seconds > 0:
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

    def state_changed(self, address: Address, message: StateChanged) -> Entry:
        entry = self.known(address)
        if message.serial == entry.serial and entry.seat is not None:
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

    def died(self, name: str, incarnation: int) -> Entry | None:
        """A process is gone (incarnation 0: whichever has that name); its entry, if it was here."""
        entry = self._entries.get(name)
        if entry is None or incarnation not in (0, entry.address.incarnation):
            return None
        del self._entries[name]
        self._seating.room_changes(entry.host, entry.rss_bytes)
        return entry

    def restarted(self, name: str) -> None:
        """A process ended, and is started again."""
        self._seating.awaited.discard(name)
        self._restarts[name] = self._restarts.get(name, 0) + 1

    def lost(self, name: str, why: str) -> bool:
        """A process that will not be started again; whether that is news. It is not where another has come in its name meanwhile."""
        if name in self._entries or name in self._lost:
            return False
        self._seating.awaited.discard(name)
        self._lost[name] = why
        return True

    def silent(self, now: float, limit: float) -> list[Entry]:
        """Processes without a beat for more than `limit` seconds."""
        return [entry for entry in self._entries.values() if now - entry.last_beat > limit]

    # ---- what follows -------------------------------------------------------------------------------------------

    def place(self) -> list[Entry]:
        """Give what the plan lacks to blank block servers; those that got a seat. See Seating.place."""
        return self._seating.place()

    def drain(self, name: str) -> Entry:
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

    def undrain(self, name: str) -> Entry:
        """Offer it again; one that loads when it has loaded, if it says that it was drained. ZrtError as the client message Undrain."""
        entry = self.block_server(name)
        if entry.state not in ("draining", "drained", "loading"):
            raise ZrtError("bad_request", f"{name} is {entry.state}, not drained")
        if entry.state != "loading":
            entry.state = "ready"
        return entry

    def block_server(self, name: str) -> Entry:
        """ZrtError bad_request: there is none of this name."""
        entry = self._entries.get(name)
        if entry is None or entry.kind != "block_server":
            names = ", ".join(sorted(entry.address.name for entry in self.of_kind("block_server"))) or "none"
            raise ZrtError("bad_request", f"there is no block server called {name}; there are: {names}")
        return entry

    def server_or_worker(self, name: str) -> Entry:
        """ZrtError bad_request: there is neither a block server nor a layer worker of this name."""
        entry = self._entries.get(name)
        return entry if entry is not None and entry.kind == "layer_worker" else self.block_server(name)

    def route(self, current: Collection[Address] = (), crowd: Crowd | None = None) -> list[Address] | None:
        """One replica a stage; None while a stage has none.

        A session stays where it is (`current`) as long as that replica is ready, or drains and is the only one. Else it goes where the fewest
        sessions are, of equals where the fewest share its slot: so all slots spread over all replicas, and no stage waits for another.
        """
        chosen = []
        for stage in range(self.num_stages):
            holders = self._seating.holders(stage)
            ready = [entry for entry in holders if entry.routable]
            stays = [entry for entry in ready or holders if entry.serving and entry.address in current]
            offered = stays or ready
            if not offered:
                return None
            chosen.append(min(offered, key=lambda entry: _preference(entry, crowd or {})).address)
        return chosen

    def holding(self, addresses: Sequence[Address]) -> list[Address]:
        """Those of a session's replicas that are still there, and so still hold what they had of it."""
        serving = {entry.address for entry in self._entries.values() if entry.serving}
        return [address for address in addresses if address in serving]

    def capacity(self) -> tuple[int, int]:
        """KV pages that one session may have, and all together: of the stage that has the fewest."""
        of_one, of_all = [], []
        for stage in range(self.num_stages):
            seat = self._seating.of_stage(stage)[0]
            pages = self._pages(seat)
            of_one.append(pages)
            of_all.append(pages * max(1, sum(entry.routable for entry in self._seating.holders(stage))))
        return min(of_one), min(of_all)

    @property
    def ready(self) -> bool:
        return self.route() is not None

    def unready(self) -> str:
        """Why it is not ready, in words: the stages that have no ready replica. Empty when it is."""
        lacking = [
            str(stage)
            for stage in range(self.num_stages)
            if not any(entry.routable for entry in self._seating.holders(stage))
        ]
        return f"no replica is ready of stage {', '.join(lacking)}" if lacking else ""

    def fault(self) -> str:
        """Why the cluster cannot become ready by itself; empty when it can or is."""
        for stage in range(self.num_stages):
            lost = self._why_lost(stage)
            if lost is not None:
                for entry in self._seating.seated(stage):
                    if entry.fault:
                        return f"{entry.fault.kind}: {entry.fault.message} ({entry.fault.where or entry.address.name})"
                return lost
        return ""

    def stage_lost(self) -> ZrtError | None:
        """What ends the sessions: the first stage that has no replica and will get none, since its processes are not started again, or cannot
        load it. `worker_failed` where it is its layer workers that it lacks, else `stage_lost`."""
        for stage in range(self.num_stages):
            why = self._why_lost(stage)
            if why is not None:
                faults = [entry.fault.kind for entry in self._seating.seated(stage) if entry.fault]
                return ZrtError("worker_failed" if faults[-1:] == ["worker_failed"] else "stage_lost", why)
        return None

    def _why_lost(self, stage: int) -> str | None:
        if self._seating.holders(stage) or any(self._may_take(name, stage) for name in self._names):
            return None
        seats = self._seating.of_stage(stage)
        reasons = ["no process that is left has the memory for it"]
        reasons += [
            f"{entry.fault.kind}: {entry.fault.message}" for entry in self._seating.seated(stage) if entry.fault
        ]
        reasons += [self._lost[seat.name] for seat in seats if seat.name in self._lost]
        return f"stage {stage} (blocks {seats[0].first}-{seats[0].last}) is lost: {reasons[-1]}"

    def _may_take(self, name: str, stage: int) -> bool:
        """Whether a process that is awaited (again) may take a seat of this stage: it does, unless a seat of its own name is empty elsewhere."""
        if name in self._entries or name in self._lost:
            return False
        own = [seat.stage for seat in self._seating.empty() if seat.name == name]
        return not own or stage in own

    def find(self, name: str) -> Entry | None:
        return self._entries.get(name)

    def of_kind(self, kind: ActorKind) -> list[Entry]:
        return [entry for entry in self._entries.values() if entry.kind == kind]

    def infos(self, now: float) -> list[ActorInfo]:
        """Every process, for people: block servers in pipeline order first, and those that are awaited or lost."""
        infos = [entry.info(now, self._restarts.get(name, 0)) for name, entry in self._entries.items()]
        seats = {seat.name: seat.stage for seat in reversed(self._seating.empty())}
        for name in self._names:
            if name not in self._entries:
                state: ActorState = "failed" if name in self._lost else "starting"
                fault = self._lost.get(name, "")
                restarts = self._restarts.get(name, 0)
                stage = seats.get(name, -1)
                infos.append(ActorInfo(name, "block_server", state, stage=stage, restarts=restarts, fault=fault))
        return sorted(infos, key=pipeline_order)


def _preference(entry: Entry, crowd: Crowd) -> tuple[int, int, int, str]:
    return (*crowd.get(entry.address.name, (0, 0)), entry.load.sessions, entry.address.name)


def assignment_for(entry: Entry, template: Assignment, serial: int) -> Assignment:
    """What the actor in this seat holds; `template` carries what all stages have in common."""
    seat = entry.seat
    if seat is None:
        raise ZrtError("internal", f"{entry.address.name} has no seat")
    entry.serial = serial
    entry.state = "loading"
    entry.done_bytes = entry.total_bytes = entry.graphs = entry.all_graphs = 0
    return Assignment(
        serial,
        template.model,
        template.weights,
        seat.first,
        seat.last,
        template.num_blocks,
        template.dtype,
        template.kv_bytes,
        template.context,
        template.sessions,
        template.chunk,
        template.idle_s,
        seat.tp,
        list(seat.lend),
        seat.helped,
        seat.gpu_memory,
    )
