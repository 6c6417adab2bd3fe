"""The pipeline: the stages in order, which way a session goes through their replicas, and what
keeps one from it. Pure."""

from collections.abc import Callable, Collection, Mapping, Sequence

from zrt.actors.coordinator.fleet.placement import Placement
from zrt.actors.coordinator.fleet.process_record import ProcessRecord
from zrt.runtime.cluster.seats import Seat
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.control import Address

Crowd = Mapping[str, tuple[int, int]]
"""By actor: how many sessions run there, and how many of them in the slot that is asked for."""


class Pipeline:
    """What the roster's `entries`, by name, make of the plan as they sit in it. `names` are those
    of the processes that the cluster starts, `lost` says why which of them will not be started
    again; `pages(seat)` is the KV pages of a block server in that seat."""

    def __init__(
        self,
        seating: Placement,
        entries: Mapping[str, ProcessRecord],
        names: Sequence[str],
        lost: Mapping[str, str],
        pages: Callable[[Seat], int],
    ) -> None:
        self._seating = seating
        self._entries = entries
        self._names = names
        self._lost = lost
        self._pages = pages

    @property
    def num_stages(self) -> int:
        return self._seating.num_stages

    @property
    def num_slots(self) -> int:
        """Micro-batches that keep everything busy: one for each stage that computes on a device or
        cores of its own, and one for all stages on the GPUs of a machine, or that share its cores.
        There two would run at the same time, half as fast, and each would read all weights.
        """
        places = set()
        for stage in range(self.num_stages):
            holders = self._seating.holders(stage)
            shared = holders and all(entry.place for entry in holders)
            places.add(holders[0].place if shared else stage)
        return max(1, len(places))

    # ---- routes ----------------------------------------------------------------------------------

    def route(self, current: Collection[Address] = (), crowd: Crowd | None = None) -> list[Address] | None:
        """One replica a stage; None while a stage has none.

        A session stays where it is (`current`) as long as that replica is ready, or drains and is
        the only one. Else it goes where the fewest sessions are, of equals where the fewest share
        its slot: so all slots spread over all replicas, and no stage waits for another.
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
        """Those of a session's replicas that are still there, and so still hold what they had of
        it."""
        serving = {entry.address for entry in self._entries.values() if entry.serving}
        return [address for address in addresses if address in serving]

    def capacity(self) -> tuple[int, int]:
        """KV pages that one session may have, and all together: of the stage that has the
        fewest."""
        of_one, of_all = [], []
        for stage in range(self.num_stages):
            seat = self._seating.of_stage(stage)[0]
            pages = self._pages(seat)
            of_one.append(pages)
            of_all.append(pages * max(1, sum(entry.routable for entry in self._seating.holders(stage))))
        return min(of_one), min(of_all)

    # ---- what is lacking -------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return self.route() is not None

    def unready(self) -> str:
        """Why it is not ready, in words: the stages that have no ready replica. Empty when it
        is."""
        lacking = []
        for stage in range(self.num_stages):
            holders = self._seating.holders(stage)
            if not any(entry.routable for entry in holders):
                out = [
                    f"{entry.address.name} is {entry.state}"
                    for entry in holders
                    if entry.state in ("draining", "drained")
                ]
                lacking.append(f"{stage} ({', '.join(out)})" if out else str(stage))
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
        """What ends the sessions: the first stage that has no replica and will get none, since its
        processes are not started again, or cannot load it. `worker_failed` where it is its layer
        workers that it lacks, else `stage_lost`."""
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
        """Whether a process that is awaited (again) may take a seat of this stage: it does, unless
        a seat of its own name is empty elsewhere."""
        if name in self._entries or name in self._lost:
            return False
        own = [seat.stage for seat in self._seating.empty() if seat.name == name]
        return not own or stage in own


def _preference(entry: ProcessRecord, crowd: Crowd) -> tuple[int, int, int, str]:
    return (*crowd.get(entry.address.name, (0, 0)), entry.load.sessions, entry.address.name)
