"""The pipeline: the stages in order, which way a session goes through their replicas, and what
keeps one from it. Pure."""

from collections.abc import Collection, Mapping, Sequence

from zrt.actors.coordinator.fleet.placement import Placement, StageMemory
from zrt.actors.coordinator.fleet.process_record import ProcessRecord
from zrt.actors.coordinator.fleet.replica_choice import ReplicaUse, choose_replica
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.control import Address


class Pipeline:
    """The stages of a plan with the roster's `records`, by name, in their seats. `names` are those
    of the processes that the cluster starts; `lost` says of those that will not be started again
    why. `memory` knows a seat's KV pages."""

    def __init__(
        self,
        placement: Placement,
        records: Mapping[str, ProcessRecord],
        names: Sequence[str],
        lost: Mapping[str, str],
        memory: StageMemory,
    ) -> None:
        self._placement = placement
        self._records = records
        self._names = names
        self._lost = lost
        self._memory = memory

    @property
    def num_stages(self) -> int:
        return self._placement.num_stages

    @property
    def num_slots(self) -> int:
        """How many micro-batches keep everything busy: one for each stage that computes on a device
        or cores of its own, and one for all stages on the GPUs of a machine, or that share its
        cores. There two would run at the same time, half as fast, and each would read all weights.
        """
        places = set()
        for stage in range(self.num_stages):
            holders = self._placement.holders(stage)
            shared = holders and all(record.place for record in holders)
            places.add(holders[0].place if shared else stage)
        return max(1, len(places))

    # ---- routes ----------------------------------------------------------------------------------

    def route(self, current: Collection[Address] = (), use: ReplicaUse | None = None) -> list[Address] | None:
        """Return one replica a stage, as `choose_replica` has it; None while a stage has none."""
        chosen = []
        for stage in range(self.num_stages):
            record = choose_replica(self._placement.holders(stage), current, use or {})
            if record is None:
                return None
            chosen.append(record.address)
        return chosen

    def holding(self, addresses: Sequence[Address]) -> list[Address]:
        """Return those of a session's replicas that are still there, and so still hold what they
        had of the session."""
        serving = {record.address for record in self._records.values() if record.serving}
        return [address for address in addresses if address in serving]

    def capacity(self) -> tuple[int, int]:
        """Return the KV pages that one session may have, and all together: those of the stage that
        has the fewest."""
        of_one, of_all = [], []
        for stage in range(self.num_stages):
            seat = self._placement.of_stage(stage)[0]
            pages = self._memory.kv_pages(seat)
            of_one.append(pages)
            of_all.append(pages * max(1, sum(record.routable for record in self._placement.holders(stage))))
        return min(of_one), min(of_all)

    # ---- what is lacking -------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return self.route() is not None

    def unready(self) -> str:
        """Return in words which stages have no ready replica; empty when the pipeline is ready."""
        lacking = []
        for stage in range(self.num_stages):
            holders = self._placement.holders(stage)
            if not any(record.routable for record in holders):
                out = [
                    f"{record.address.name} is {record.state}"
                    for record in holders
                    if record.state in ("draining", "drained")
                ]
                lacking.append(f"{stage} ({', '.join(out)})" if out else str(stage))
        return f"no replica is ready of stage {', '.join(lacking)}" if lacking else ""

    def fault(self) -> str:
        """Return why the cluster cannot become ready by itself; empty when it can or is."""
        for stage in range(self.num_stages):
            lost = self._why_lost(stage)
            if lost is not None:
                for record in self._placement.seated(stage):
                    if record.fault:
                        return (
                            f"{record.fault.kind}: {record.fault.message} ({record.fault.where or record.address.name})"
                        )
                return lost
        return ""

    def stage_lost(self) -> ZrtError | None:
        """Return the error that ends the sessions, if there is one: a stage has no replica and will
        get none, since its processes are not started again, or cannot load it. Its kind is
        `worker_failed` where the stage lacks layer workers, `bad_model` where the files that are
        there are not those of the model, else `stage_lost`."""
        for stage in range(self.num_stages):
            why = self._why_lost(stage)
            if why is not None:
                faults = [record.fault.kind for record in self._placement.seated(stage) if record.fault]
                kind = faults[-1] if faults and faults[-1] in ("worker_failed", "bad_model") else "stage_lost"
                return ZrtError.of(kind, why)
        return None

    def _why_lost(self, stage: int) -> str | None:
        if self._placement.holders(stage) or any(self._may_take(name, stage) for name in self._names):
            return None
        seats = self._placement.of_stage(stage)
        reasons = ["no process is left that could hold it"]
        reasons += [
            f"{record.fault.kind}: {record.fault.message}" for record in self._placement.seated(stage) if record.fault
        ]
        small = [
            f"{record.address.name} has {record.unused}"
            for record in self._records.values()
            if record.blank and record.unused
        ]
        reasons += [self._lost[seat.name] for seat in seats if seat.name in self._lost]
        return f"stage {stage} (blocks {seats[0].first}-{seats[0].last}) is lost: {'; '.join([reasons[-1], *small])}"

    def _may_take(self, name: str, stage: int) -> bool:
        """Return whether a process that is awaited (again) may take a seat of this stage: it does,
        unless a seat of its own name is empty elsewhere."""
        if name in self._records or name in self._lost:
            return False
        own = [seat.stage for seat in self._placement.empty() if seat.name == name]
        return not own or stage in own
