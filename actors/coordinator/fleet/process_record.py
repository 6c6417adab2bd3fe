"""One registered process, as the coordinator keeps it: who it is, what it holds, how it is. Pure.

Only the methods here write a record; whoever has news of a process calls them.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Final

from zrt.runtime.cluster.seats import Seat
from zrt.runtime.errors import ZrtError
from zrt.runtime.formatting import block_range
from zrt.runtime.messages.cluster import ActorInfo
from zrt.runtime.messages.control import Address, Fault
from zrt.runtime.messages.members import (
    ActorKind,
    ActorState,
    Assignment,
    Beat,
    LoadProgress,
    Register,
    Serving,
    StateChanged,
)
from zrt.runtime.messages.stats import Load

RATE_S: Final = 0.5
"""The shortest time over which rates are counted: beats that are asked for may come close
together."""


@dataclass(slots=True)
class LoadingProgress:
    """How far a block server is with loading: bytes of weights being hashed, bytes read, then CUDA
    graphs captured."""

    done_bytes: int = 0
    total_bytes: int = 0
    graphs: int = 0
    all_graphs: int = 0
    hashes: int = 0


@dataclass(slots=True)
class LastBeat:
    """What a process last said of its work, `at` monotonic seconds of the coordinator's clock.

    `heard` is False until the first beat; until then `at` is when the process registered.
    `busy_share` and `tokens_s` are rates over RATE_S or somewhat more; since `counted_at` they are
    counted anew, from what `counted` had.
    """

    at: float
    heard: bool = False
    load: Load = field(default_factory=Load)
    rss_bytes: int = 0
    busy_share: float = 0.0
    tokens_s: float = 0.0
    counted: Load = field(default_factory=Load)
    counted_at: float = 0.0

    def take(self, message: Beat, now: float) -> None:
        """Note the beat of time `now`."""
        if message.load is not None:
            seconds = now - self.counted_at
            if self.heard and seconds >= RATE_S:
                self.busy_share = min(1.0, max(0, message.load.busy_us - self.counted.busy_us) / 1e6 / seconds)
                self.tokens_s = max(0, message.load.tokens - self.counted.tokens) / seconds
            if not self.heard or seconds >= RATE_S:  # it may have worked long before it was heard here
                self.counted, self.counted_at = message.load, now
            self.load = message.load
        self.at = now
        self.heard = True
        self.rss_bytes = message.rss_bytes


@dataclass(slots=True)
class ProcessRecord:
    """One registered process: its identity (`address`, `registration`), its place in the plan
    (`seat`, `serial`, `given`), and how it is (the rest).

    `serial` is that of the assignment a block server holds or loads, 0 without one; `given` says
    that this coordinator gave it, and no earlier one. `room_bytes` is what the process could grow
    to on its machine now, 0 where it did not say. `unused` says why it is given nothing where it
    might be needed, empty if there is no such reason.
    """

    address: Address
    registration: Register
    state: ActorState
    last_beat: LastBeat
    room_bytes: int
    seat: Seat | None = None
    serial: int = 0
    given: bool = False
    loading: LoadingProgress = field(default_factory=LoadingProgress)
    fault: Fault | None = None
    unused: str = ""

    @classmethod
    def registered(
        cls, address: Address, message: Register, now: float, before: "ProcessRecord | None" = None
    ) -> "ProcessRecord":
        """Return the record of a process that registers; `before` is the record it already has
        here, if this is not its first registration."""
        record = cls(address, message, message.state, LastBeat(now), message.room_bytes)
        if before is not None:
            record.seat, record.serial, record.given = before.seat, before.serial, before.given
            record.last_beat = replace(before.last_beat, at=now)
            record.loading = before.loading
            record.fault = before.fault if message.state == "failed" else None
        elif message.kind == "block_server":
            record.state = "blank"  # what it holds is of an assignment that nobody remembers
            record.serial = message.holds.serial if message.holds is not None else 0
        return record

    # ---- what it is ------------------------------------------------------------------------------

    @property
    def kind(self) -> ActorKind:
        return self.registration.kind

    @property
    def pid(self) -> int:
        return self.registration.pid

    @property
    def host(self) -> str:
        return self.registration.host

    @property
    def load(self) -> Load:
        return self.last_beat.load

    @property
    def place(self) -> tuple[str, str] | None:
        """The cores or the GPUs of a machine that this process shares with all others of the same
        place; None if it shares none.

        GPUs of one machine hand rows over and run ahead of their hosts
        (compute/shared_rows/channel.py): there two slots would only halve the batches. Ranks do
        not, and so have a place for themselves, unless they share a GPU.
        """
        device = self.registration.device
        if device.startswith("cuda"):
            return self.host, "cuda" if self.seat is None or self.seat.tp == 1 else device
        return (self.host, "cores") if self.registration.shares_cores else None

    @property
    def routable(self) -> bool:
        """Whether new sessions may run there."""
        return self.kind == "block_server" and self.state == "ready" and self.seat is not None

    @property
    def serving(self) -> bool:
        """Whether sessions that run there may stay."""
        return self.routable or (self.state == "draining" and self.seat is not None)

    @property
    def blank(self) -> bool:
        """Whether this is a block server that may be given a seat."""
        return self.kind == "block_server" and self.state == "blank" and self.seat is None

    @property
    def waits(self) -> bool:
        """Whether the process waits for layer workers, or has failed for want of them."""
        failed = self.fault is not None and self.fault.kind == "worker_failed"
        return failed or (self.load.lend is not None and bool(self.load.lend.waits_for))

    @property
    def room(self) -> float:
        """Bytes the process may take in all."""
        return min(self.registration.memory_bytes or math.inf, self.room_bytes or math.inf)

    # ---- what it says ----------------------------------------------------------------------------

    def take_beat(self, message: Beat, now: float) -> None:
        """Note a beat that came at `now` (monotonic seconds)."""
        self.last_beat.take(message, now)
        self.room_bytes = message.room_bytes
        if self.seat is None:
            self.state = message.state
            self.fault = self.fault if message.state == "failed" else None

    def change_state(self, message: StateChanged) -> bool:
        """Note the state a block server says it is in; return False if that is of an older
        assignment."""
        if message.serial != self.serial or self.seat is None:
            return False
        if message.state == "loading" and self.state != "loading":
            self.loading.done_bytes = self.loading.graphs = self.loading.hashes = 0
        self.state = message.state
        self.fault = message.fault if message.state == "failed" else None
        return True

    def take_progress(self, message: LoadProgress) -> bool:
        """Note how far loading is; return False if that is of an older assignment."""
        if message.serial != self.serial:
            return False
        self.loading = LoadingProgress(message.done, message.total, message.graphs, message.all_graphs, message.hashes)
        self.last_beat.load.lend = message.lend
        return True

    def shift_room(self, by: int) -> None:
        """Count `by` bytes more as free on the process's machine (below 0: fewer), until the next
        beat says how it came out; nothing where the process did not say."""
        if self.room_bytes:
            self.room_bytes = max(1, self.room_bytes + by)

    # ---- what it is given ------------------------------------------------------------------------

    def take_seat(self, seat: Seat) -> None:
        """Give the process a seat; `assign` says what it is to load there."""
        self.seat, self.unused = seat, ""

    def pass_over(self, why: str) -> None:
        """Note why the process is given nothing; empty: nothing is to be given."""
        self.unused = why

    def leave_seat(self) -> None:
        """Take the seat from the process, whatever its state."""
        self.seat = None

    def keep(self, seat: Seat, serial: int) -> None:
        """Leave the process what an earlier coordinator gave it, which is what `seat` needs."""
        self.seat, self.serial, self.given = seat, serial, False
        self.state, self.unused = "loading", ""

    def yield_seat(self) -> None:
        """Give the seat up to a process that has its blocks already; this one is blank again."""
        self.seat, self.state, self.loading = None, "blank", LoadingProgress()

    def let_go(self) -> None:
        """Forget what the process holds: it is told to free it."""
        self.serial, self.given = 0, False
        self.loading = LoadingProgress()

    def serve(self, state: Serving) -> None:
        """Offer the process to sessions, or no longer: ready, draining or drained."""
        self.state = state

    def assign(self, template: Assignment, serial: int) -> Assignment:
        """Return what the process is to load for its seat, and count it as loading; `template`
        carries what all stages have in common."""
        seat = self.seat
        if seat is None:
            raise ZrtError("internal", f"{self.address.name} has no seat")
        self.serial, self.given = serial, True
        self.state, self.fault = "loading", None
        self.loading = LoadingProgress()
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

    def info(self, now: float) -> ActorInfo:
        """Return what people are shown of the process; `now` is monotonic seconds."""
        seat, fault, load, loading, beat = self.seat, self.fault, self.load, self.loading, self.last_beat
        return ActorInfo(
            name=self.address.name,
            kind=self.kind,
            state=self.state,
            endpoint=self.address.endpoint,
            pid=self.pid,
            host=self.host,
            device=self.registration.device,
            stage=seat.stage if seat else -1,
            blocks=block_range(seat.first, seat.last) if seat else "",
            done_bytes=loading.done_bytes,
            total_bytes=loading.total_bytes,
            graphs=loading.graphs,
            all_graphs=loading.all_graphs,
            hashes=loading.hashes,
            sessions=load.sessions,
            waiting=load.waiting,
            turns=load.turns,
            steps=load.steps,
            busy_share=round(beat.busy_share, 3),
            rss_bytes=beat.rss_bytes,
            restarts=self.registration.restarts,
            stale=load.dropped_stale + load.stale,
            handed=load.handed,
            silent_ms=int((now - beat.at) * 1000),
            kv=load.kv if seat else None,
            group=load.group if seat else None,
            tokens_s=round(beat.tokens_s, 1),
            turn_p50_ms=load.turn_p50_us / 1e3,
            turn_p95_ms=load.turn_p95_us / 1e3,
            fault=f"{fault.kind}: {fault.message}" if fault else "",
            lend=load.lend if seat else None,
            unused=self.unused,
        )
