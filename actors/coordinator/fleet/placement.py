"""Which process has which seat of the plan, and which gets an empty one. Pure."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from zrt.actors.coordinator.fleet.process_record import ProcessRecord
from zrt.runtime.cluster.seats import Seat, cut_stage
from zrt.runtime.formatting import block_range, byte_size


class StageMemory(Protocol):
    """What a block server takes of memory, and what it offers to sessions."""

    def needed_bytes(self, first: int, last: int) -> int:
        """Return the bytes a block server takes in all that holds blocks `first` to `last`."""
        ...

    def kv_pages(self, seat: Seat) -> int:
        """Return the KV pages that a block server has in this seat."""
        ...


class Placement:
    """The seats of a plan, which may grow, and the roster's `records` by name, whose seats are
    given here. The seats of `awaited` names are kept for them."""

    def __init__(
        self,
        plan: Sequence[Seat],
        records: Mapping[str, ProcessRecord],
        memory: StageMemory,
        awaited: set[str],
    ) -> None:
        self.plan = list(plan)
        self._awaited = awaited
        self._records = records
        self._memory = memory

    @property
    def num_stages(self) -> int:
        return 1 + max((seat.stage for seat in self.plan), default=-1)

    def free_seat_of(self, name: str) -> None:
        """Keep the seat of this name no longer for the process that is named so."""
        self._awaited.discard(name)

    def of_stage(self, stage: int) -> list[Seat]:
        """Return the seats of a stage: one a replica, at least one."""
        return [seat for seat in self.plan if seat.stage == stage]

    def seated(self, stage: int) -> list[ProcessRecord]:
        """Return the block servers that have a seat of the stage, those that failed too."""
        return [record for record in self._records.values() if record.seat and record.seat.stage == stage]

    def place(self) -> list[ProcessRecord]:
        """Give empty seats to blank block servers; return those that got one.

        A seat goes to the actor it is named after. One whose actor was lost goes to any that has
        the memory, first where no other replica is left; the actor that comes back finds it taken
        and is a spare from then on. Where none has the memory for a stage that nobody holds, but
        two have it together, the stage is cut in two.
        """
        placed = self._place()
        self._tell_passed_over()
        return placed

    def _place(self) -> list[ProcessRecord]:
        placed = []
        for seat in self.empty():
            record = self._records.get(seat.name)
            if record is not None and record.blank:
                placed.append(self._seat(record, seat))
        while found := self._for_a_spare():
            placed.append(self._seat(*found))
        while halves := self._place_halves():
            placed += halves
        return placed

    def _for_a_spare(self) -> tuple[ProcessRecord, Seat] | None:
        """Return the block server with the least room that is enough for a lost seat, and the seat:
        the one that is missed most."""
        for seat in sorted(self._lost(), key=lambda seat: len(self.holders(seat.stage))):
            needed = self._memory.needed_bytes(seat.first, seat.last)
            fitting = [record for record in self._blank() if record.room >= needed]
            if fitting:
                return min(fitting, key=lambda record: record.room), seat
        return None

    def _lost(self) -> list[Seat]:
        """Return the empty seats that are not kept for anybody."""
        return [seat for seat in self.empty() if seat.name not in self._awaited]

    def _tell_passed_over(self) -> None:
        """Note with each blank block server which seat it is too small for, the one that needs
        least; nothing where no seat is lost."""
        needs = [(self._memory.needed_bytes(seat.first, seat.last), seat) for seat in self._lost()]
        needed, seat = min(needs, key=lambda need: need[0], default=(0, None))
        for record in self._blank():
            record.pass_over(_too_small(record, seat, needed) if seat is not None else "")

    def _place_halves(self) -> list[ProcessRecord]:
        """Cut one stage that nobody holds, for the two block servers with the most room: they fit
        if any two do. Return these two, or none."""
        roomiest = sorted(self._blank(), key=lambda record: record.room, reverse=True)[:2]
        for stage in range(self.num_stages if len(roomiest) == 2 else 0):
            plan = self.of_stage(stage)
            if self.holders(stage) or any(seat.name in self._awaited or seat.lends for seat in plan):
                continue
            first, last = plan[0].first, plan[0].last
            cuts = []
            for cut in range(first + 1, last + 1):
                for low, high in (roomiest, roomiest[::-1]):
                    fill = max(
                        self._memory.needed_bytes(first, cut - 1) / low.room,
                        self._memory.needed_bytes(cut, last) / high.room,
                    )
                    if fill <= 1:
                        cuts.append((fill, cut, low, high))
            if cuts:
                _, cut, low, high = min(cuts, key=lambda each: each[:2])
                self._cut(stage, cut)
                heads = (next(seat for seat in self.empty() if seat.stage == half) for half in (stage, stage + 1))
                return [self._seat(record, seat) for record, seat in zip((low, high), heads, strict=True)]
        return []

    def _cut(self, stage: int, cut: int) -> None:
        """Cut a stage in two before block `cut`: the plan grows by a stage."""
        self.plan = sorted(
            (part for seat in self.plan for part in cut_stage(seat, stage, cut)),
            key=lambda seat: (seat.stage, seat.replica),
        )
        for record in self._records.values():
            if record.seat is not None:
                if record.seat.stage == stage:
                    record.leave_seat()
                else:
                    record.take_seat(cut_stage(record.seat, stage, cut)[0])

    def _seat(self, record: ProcessRecord, seat: Seat) -> ProcessRecord:
        for failed in self._records.values():
            if failed.seat == seat:
                failed.leave_seat()
        record.take_seat(seat)
        self.room_changes(record.host, record.last_beat.rss_bytes - self._memory.needed_bytes(seat.first, seat.last))
        return record

    def room_changes(self, host: str, by: int) -> None:
        """Count `by` bytes as free on a machine (below 0: as taken) until the next beats of its
        blank block servers say how it came out."""
        for record in self._blank():
            if record.host == host:
                record.shift_room(by)

    def _blank(self) -> list[ProcessRecord]:
        return [record for record in self._records.values() if record.blank]

    def holders(self, stage: int) -> list[ProcessRecord]:
        """Return the block servers that hold the stage or load it."""
        return [record for record in self.seated(stage) if record.state != "failed"]

    def empty(self) -> list[Seat]:
        """Return the seats that nobody holds, in pipeline order."""
        taken = {record.seat for record in self._records.values() if record.seat and record.state != "failed"}
        return [seat for seat in self.plan if seat not in taken]


def _too_small(record: ProcessRecord, seat: Seat, needed: int) -> str:
    """Return why a block server does not get a seat that needs so many bytes."""
    blocks, limit = block_range(seat.first, seat.last), record.registration.memory_bytes
    has = "it may take" if limit and record.room == limit else "its machine has free for it"
    return (
        f"too little memory for stage {seat.stage} (blocks {blocks}), which lacks a block server: "
        f"that takes {byte_size(needed)}, {has} {byte_size(int(record.room))}"
    )
