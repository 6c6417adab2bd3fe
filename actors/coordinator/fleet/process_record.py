"""One registered process, as the coordinator keeps it. Pure."""

import math
from dataclasses import dataclass, field

from zrt.runtime.cluster.seats import Seat
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.cluster import ActorInfo
from zrt.runtime.messages.control import Address, Fault
from zrt.runtime.messages.members import ActorKind, ActorState, Assignment
from zrt.runtime.messages.stats import Load


@dataclass(slots=True)
class ProcessRecord:
    """One registered process. Times are monotonic seconds, of the coordinator's clock.

    `serial` is that of what a block server holds, or loads, 0: nothing; `given`: this coordinator
    gave it that, none before. `memory_bytes` is the most it may take, `room_bytes` what it could
    grow to as things are on its machine; 0: it did not say.
    """

    address: Address
    kind: ActorKind
    pid: int
    host: str
    device: str
    state: ActorState
    last_beat: float
    memory_bytes: int = 0
    room_bytes: int = 0
    shares_cores: bool = False
    seat: Seat | None = None
    serial: int = 0
    given: bool = False
    done_bytes: int = 0
    total_bytes: int = 0
    graphs: int = 0
    all_graphs: int = 0
    fault: Fault | None = None
    load: Load = field(default_factory=Load)
    rss_bytes: int = 0
    busy_share: float = 0.0
    tokens_s: float = 0.0
    beaten: bool = False
    restarts: int = 0

    @property
    def place(self) -> tuple[str, str] | None:
        """Where it computes beside others of the same place: the cores or the GPUs of a machine;
        None: nowhere that others do.

        GPUs of one machine hand rows over and run ahead of their hosts
        (compute/shared_rows/channel.py): there two slots would only halve the batches. Ranks do
        not, and so have a place for themselves, unless they share a GPU.
        """
        if self.device.startswith("cuda"):
            return self.host, "cuda" if self.seat is None or self.seat.tp == 1 else self.device
        return (self.host, "cores") if self.shares_cores else None

    @property
    def routable(self) -> bool:
        return self.kind == "block_server" and self.state == "ready" and self.seat is not None

    @property
    def serving(self) -> bool:
        """Whether sessions that run there may stay."""
        return self.routable or (self.state == "draining" and self.seat is not None)

    @property
    def blank(self) -> bool:
        return self.kind == "block_server" and self.state == "blank" and self.seat is None

    @property
    def waits(self) -> bool:
        """Whether it waits for layer workers, or has failed for want of them."""
        failed = self.fault is not None and self.fault.kind == "worker_failed"
        return failed or (self.load.lend is not None and bool(self.load.lend.waits_for))

    @property
    def room(self) -> float:
        """Bytes it may take in all."""
        return min(self.memory_bytes or math.inf, self.room_bytes or math.inf)

    def assign(self, template: Assignment, serial: int) -> Assignment:
        """What it holds in its seat, and is to load now; `template` carries what all stages have in
        common."""
        seat = self.seat
        if seat is None:
            raise ZrtError("internal", f"{self.address.name} has no seat")
        self.serial, self.given = serial, True
        self.state = "loading"
        self.done_bytes = self.total_bytes = self.graphs = self.all_graphs = 0
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
        """The process, for people."""
        seat, fault, load = self.seat, self.fault, self.load
        return ActorInfo(
            name=self.address.name,
            kind=self.kind,
            state=self.state,
            endpoint=self.address.endpoint,
            pid=self.pid,
            host=self.host,
            device=self.device,
            stage=seat.stage if seat else -1,
            blocks=f"{seat.first}-{seat.last}" if seat else "",
            done_bytes=self.done_bytes,
            total_bytes=self.total_bytes,
            graphs=self.graphs,
            all_graphs=self.all_graphs,
            sessions=load.sessions,
            waiting=load.waiting,
            turns=load.turns,
            steps=load.steps,
            busy_share=round(self.busy_share, 3),
            rss_bytes=self.rss_bytes,
            restarts=self.restarts,
            stale=load.dropped_stale + load.stale,
            handed=load.handed,
            silent_ms=int((now - self.last_beat) * 1000),
            kv=load.kv if seat else None,
            group=load.group if seat else None,
            tokens_s=round(self.tokens_s, 1),
            turn_p50_ms=load.turn_p50_us / 1e3,
            turn_p95_ms=load.turn_p95_us / 1e3,
            fault=f"{fault.kind}: {fault.message}" if fault else "",
            lend=load.lend if seat else None,
        )
