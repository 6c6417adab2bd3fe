"""Who is there, what each holds, and which way a session goes. Pure: no sockets, no clock (times are passed in)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from msgspec.structs import replace

from zrt.runtime.capacity import wishes
from zrt.runtime.compute.layout import block_bytes, embedding_bytes, head_bytes
from zrt.runtime.compute.spec import ModelSpec
from zrt.runtime.compute.split import check_split
from zrt.runtime.config import Conf
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.client import ActorInfo
from zrt.runtime.messages.control import (
    ActorKind,
    ActorState,
    Address,
    Assignment,
    Beat,
    Fault,
    Load,
    LoadProgress,
    Register,
    StateChanged,
)
from zrt.runtime.plan import Blocks, plan

MOST: Final = 1024
"""Processes known at once; more would be strangers."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A place in the plan: replica `replica` of stage `stage`, for blocks first..last, usually taken by the actor called `name`."""

    name: str
    stage: int
    replica: int
    first: int
    last: int
    tp: int = 1


def seat_name(stage: int, replica: int, replicas: int) -> str:
    """A stage's only replica is called `stage0`, several are `stage0.0`, `stage0.1`."""
    return f"stage{stage}" if replicas == 1 else f"stage{stage}.{replica}"


def stage_ranges(conf: Conf, spec: ModelSpec) -> list[Blocks]:
    """Which blocks of the model each stage of the cluster file gets. ZrtError bad_config."""
    dtype = conf.model.dtype
    for stage in conf.stages:
        check_split(spec, stage.tp)
    return plan(
        [block_bytes(spec, dtype)] * spec.num_blocks,
        embedding_bytes(spec, dtype),
        head_bytes(spec, dtype),
        wishes(conf, spec),
    )


def seats(ranges: Sequence[tuple[int, int]], replicas: Sequence[int]) -> list[Seat]:
    """One seat a replica, in pipeline order."""
    return [
        Seat(seat_name(stage, replica, count), stage, replica, first, last)
        for stage, ((first, last), count) in enumerate(zip(ranges, replicas, strict=True))
        for replica in range(count)
    ]


@dataclass(slots=True)
class Entry:
    """One registered process. Times are monotonic seconds, of the coordinator's clock."""

    address: Address
    kind: ActorKind
    pid: int
    host: str
    device: str
    state: ActorState
    last_beat: float
    seat: Seat | None = None
    serial: int = 0
    done_bytes: int = 0
    total_bytes: int = 0
    fault: Fault | None = None
    load: Load = field(default_factory=Load)
    rss_bytes: int = 0
    busy_share: float = 0.0
    beaten: bool = False

    @property
    def routable(self) -> bool:
        return self.kind == "block_server" and self.state == "ready" and self.seat is not None


class Roster:
    """The processes of one cluster, and the seats of its plan."""

    def __init__(self, plan: Sequence[Seat]) -> None:
        self.plan = list(plan)
        self.num_stages = 1 + max((seat.stage for seat in plan), default=-1)
        self._entries: dict[str, Entry] = {}
        self._restarts: dict[str, int] = {}
        self._lost: dict[str, str] = {}
        self.stale = 0
        """Messages of processes that are not here (any more), and of older assignments."""

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
        if old is not None:
            entry.seat, entry.serial, entry.load = old.seat, old.serial, old.load
            entry.beaten = old.beaten
        elif message.kind == "block_server":
            entry.state = "blank"  # what it holds is of an assignment that nobody remembers
        self._entries[address.name] = entry
        self._lost.pop(address.name, None)
        return entry

    def take_over(self, entry: Entry, holds: Assignment, template: Assignment) -> bool:
        """Leave a process what an earlier coordinator gave it, if the plan has a free seat for just that; one of its own name, if it can be.

        It serves from there once it says how it is: what it still knows of the earlier coordinator's sessions is forgotten by then.
        """
        if entry.seat is not None or replace(holds, serial=0, first=0, last=0) != template:
            return False
        free = [seat for seat in self._empty() if (seat.first, seat.last) == (holds.first, holds.last)]
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

    def beat(self, address: Address, message: Beat, now: float) -> None:
        entry = self.known(address)
        if message.load is not None:
            seconds = now - entry.last_beat
            if seconds > 0:
                entry.busy_share = min(1.0, (message.load.busy_us - entry.load.busy_us) / 1e6 / seconds)
            entry.load = message.load
        entry.last_beat = now
        entry.beaten = True
        entry.rss_bytes = message.rss_bytes
        if entry.kind != "block_server":
            entry.state = message.state

    def state_changed(self, address: Address, message: StateChanged) -> Entry:
        entry = self.known(address)
        if message.serial == entry.serial and entry.seat is not None:
            entry.state = message.state
            entry.fault = message.fault
        else:
            self.stale += 1
        return entry

    def load_progress(self, address: Address, message: LoadProgress) -> None:
        entry = self.known(address)
        if message.serial == entry.serial:
            entry.done_bytes, entry.total_bytes = message.done, message.total
        else:
            self.stale += 1

    def died(self, name: str, incarnation: int) -> Entry | None:
        """A process is gone (incarnation 0: whichever has that name); its entry, if it was here."""
        entry = self._entries.get(name)
        if entry is None or incarnation not in (0, entry.address.incarnation):
            return None
        return self._entries.pop(name)

    def restarted(self, name: str) -> None:
        self._restarts[name] = self._restarts.get(name, 0) + 1

    def lost(self, name: str, why: str) -> None:
        """A process that will not be started again."""
        self._lost[name] = why

    def silent(self, now: float, limit: float) -> list[Entry]:
        """Processes without a beat for more than `limit` seconds."""
        return [entry for entry in self._entries.values() if now - entry.last_beat > limit]

    # ---- what follows -------------------------------------------------------------------------------------------

    def place(self) -> list[Entry]:
        """Give empty seats to blank block servers: a seat to the actor of its name, what is left to actors of no seat's name."""
        empty = self._empty()
        names = {seat.name for seat in self.plan}
        blank = [
            entry
            for entry in self._entries.values()
            if entry.kind == "block_server" and entry.seat is None and entry.state == "blank"
        ]
        placed = []
        for seat in empty:
            entry = next((e for e in blank if e.address.name == seat.name), None)
            if entry is None and seat.name in self._lost:
                entry = next((e for e in blank if e.address.name not in names), None)
            if entry is not None:
                blank.remove(entry)
                entry.seat = seat
                placed.append(entry)
        return placed

    def _empty(self) -> list[Seat]:
        taken = {(entry.seat.stage, entry.seat.replica) for entry in self._entries.values() if entry.seat}
        return [seat for seat in self.plan if (seat.stage, seat.replica) not in taken]

    def route(self) -> list[Address] | None:
        """One ready replica a stage, the least loaded; None while a stage has none."""
        chosen = []
        for stage in range(self.num_stages):
            ready = [e for e in self._entries.values() if e.routable and e.seat and e.seat.stage == stage]
            if not ready:
                return None
            chosen.append(min(ready, key=lambda entry: (entry.load.sessions, entry.address.name)).address)
        return chosen

    @property
    def ready(self) -> bool:
        return self.route() is not None

    def fault(self) -> str:
        """Why the cluster cannot become ready by itself; empty when it can or is."""
        for entry in self._entries.values():
            if entry.state == "failed" and entry.fault is not None:
                return f"{entry.fault.kind}: {entry.fault.message} ({entry.fault.where or entry.address.name})"
        return self.stage_lost() or ""

    def stage_lost(self) -> str | None:
        """The first stage that has no replica and will get none, in words: its processes are not started again, or cannot load it."""
        for stage in range(self.num_stages):
            plan = [seat for seat in self.plan if seat.stage == stage]
            holders = [entry for entry in self._entries.values() if entry.seat and entry.seat.stage == stage]
            if any(entry.state != "failed" for entry in holders):
                continue
            reasons = [f"{entry.fault.kind}: {entry.fault.message}" for entry in holders if entry.fault]
            reasons += [self._lost[seat.name] for seat in plan if seat.name in self._lost]
            if len(reasons) >= len(plan):
                return f"stage {stage} (blocks {plan[0].first}-{plan[0].last}) is lost: {reasons[-1]}"
        return None

    def find(self, name: str) -> Entry | None:
        return self._entries.get(name)

    def of_kind(self, kind: ActorKind) -> list[Entry]:
        return [entry for entry in self._entries.values() if entry.kind == kind]

    def infos(self, now: float) -> list[ActorInfo]:
        """Every process, for people: block servers in pipeline order first, and those that are awaited or lost."""
        infos = [self._info(entry, now) for entry in self._entries.values()]
        here = set(self._entries)
        for seat in self.plan:
            if seat.name not in here:
                state: ActorState = "failed" if seat.name in self._lost else "starting"
                fault = self._lost.get(seat.name, "")
                restarts = self._restarts.get(seat.name, 0)
                infos.append(
                    ActorInfo(seat.name, "block_server", state, stage=seat.stage, restarts=restarts, fault=fault)
                )
        return sorted(infos, key=lambda info: (info.stage if info.stage >= 0 else 1 << 30, info.name))

    def _info(self, entry: Entry, now: float) -> ActorInfo:
        seat = entry.seat
        fault = entry.fault
        load = entry.load
        return ActorInfo(
            name=entry.address.name,
            kind=entry.kind,
            state=entry.state,
            endpoint=entry.address.endpoint,
            pid=entry.pid,
            host=entry.host,
            device=entry.device,
            stage=seat.stage if seat else -1,
            blocks=f"{seat.first}-{seat.last}" if seat else "",
            done_bytes=entry.done_bytes,
            total_bytes=entry.total_bytes,
            sessions=load.sessions,
            waiting=load.waiting,
            turns=load.turns,
            steps=load.steps,
            busy_share=round(entry.busy_share, 3),
            rss_bytes=entry.rss_bytes,
            restarts=self._restarts.get(entry.address.name, 0),
            silent_ms=int((now - entry.last_beat) * 1000),
            kv=load.kv if seat else None,
            group=load.group if seat else None,
            fault=f"{fault.kind}: {fault.message}" if fault else "",
            stale=load.dropped_stale + load.stale,
        )


def assignment_for(entry: Entry, template: Assignment, serial: int) -> Assignment:
    """What the actor in this seat holds; `template` carries what all stages have in common."""
    seat = entry.seat
    if seat is None:
        raise ZrtError("internal", f"{entry.address.name} has no seat")
    entry.serial = serial
    entry.state = "loading"
    entry.done_bytes = entry.total_bytes = 0
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
    )
