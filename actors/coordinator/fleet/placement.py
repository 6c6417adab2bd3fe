"""Who sits in which seat of the plan, and who gets what is empty. Pure."""

from collections.abc import Callable, Mapping, Sequence

from zrt.actors.coordinator.fleet.process_record import ProcessRecord
from zrt.runtime.cluster.seats import Seat, cut_stage


class Placement:
    """The seats of a plan, which may grow, and the roster's `entries` by name, whose seats are
    given here.

    `needed(first, last)` is the bytes a block server takes in all that holds these blocks. The
    seats of `awaited` names are kept for them.
    """

    def __init__(
        self,
        plan: Sequence[Seat],
        entries: Mapping[str, ProcessRecord],
        needed: Callable[[int, int], int],
        awaited: set[str],
    ) -> None:
        self.plan = list(plan)
        self.awaited = awaited
        self._entries = entries
        self._needed = needed

    @property
    def num_stages(self) -> int:
        return 1 + max((seat.stage for seat in self.plan), default=-1)

    def of_stage(self, stage: int) -> list[Seat]:
        return [seat for seat in self.plan if seat.stage == stage]

    def seated(self, stage: int) -> list[ProcessRecord]:
        """All that have a seat of the stage, the failed too."""
        return [entry for entry in self._entries.values() if entry.seat and entry.seat.stage == stage]

    def place(self) -> list[ProcessRecord]:
        """Give empty seats to blank block servers; those that got one.

        A seat goes to the actor it is named after. One whose actor was lost goes to any that has
        the memory, first where no other replica is left; the actor that comes back finds it taken
        and is a spare from then on. Where none has the memory for a stage that nobody holds, but
        two have it together, the stage is cut in two.
        """
        placed = []
        for seat in self.empty():
            entry = self._entries.get(seat.name)
            if entry is not None and entry.blank:
                placed.append(self._seat(entry, seat))
        while found := self._for_a_spare():
            placed.append(self._seat(*found))
        while halves := self._place_halves():
            placed += halves
        return placed

    def _for_a_spare(self) -> tuple[ProcessRecord, Seat] | None:
        """The lost seat that is missed most, and the block server with the least room that is
        enough for it."""
        lost = [seat for seat in self.empty() if seat.name not in self.awaited]
        for seat in sorted(lost, key=lambda seat: len(self.holders(seat.stage))):
            needed = self._needed(seat.first, seat.last)
            fitting = [entry for entry in self._blank() if entry.room >= needed]
            if fitting:
                return min(fitting, key=lambda entry: entry.room), seat
        return None

    def _place_halves(self) -> list[ProcessRecord]:
        """Cut one stage that nobody holds, for the two block servers with the most room: they fit
        if any two do."""
        roomiest = sorted(self._blank(), key=lambda entry: entry.room, reverse=True)[:2]
        for stage in range(self.num_stages if len(roomiest) == 2 else 0):
            plan = self.of_stage(stage)
            if self.holders(stage) or any(seat.name in self.awaited or seat.lends for seat in plan):
                continue
            first, last = plan[0].first, plan[0].last
            cuts = []
            for cut in range(first + 1, last + 1):
                for low, high in (roomiest, roomiest[::-1]):
                    fill = max(self._needed(first, cut - 1) / low.room, self._needed(cut, last) / high.room)
                    if fill <= 1:
                        cuts.append((fill, cut, low, high))
            if cuts:
                _, cut, low, high = min(cuts, key=lambda each: each[:2])
                self._cut(stage, cut)
                heads = (next(seat for seat in self.empty() if seat.stage == half) for half in (stage, stage + 1))
                return [self._seat(entry, seat) for entry, seat in zip((low, high), heads, strict=True)]
        return []

    def _cut(self, stage: int, cut: int) -> None:
        """The plan grows by a stage."""
        self.plan = sorted(
            (part for seat in self.plan for part in cut_stage(seat, stage, cut)),
            key=lambda seat: (seat.stage, seat.replica),
        )
        for entry in self._entries.values():
            if entry.seat is not None:
                entry.seat = None if entry.seat.stage == stage else cut_stage(entry.seat, stage, cut)[0]

    def _seat(self, entry: ProcessRecord, seat: Seat) -> ProcessRecord:
        for failed in self._entries.values():
            if failed.seat == seat:
                failed.seat = None
        entry.seat = seat
        self.room_changes(entry.host, entry.rss_bytes - self._needed(seat.first, seat.last))
        return entry

    def room_changes(self, host: str, by: int) -> None:
        """So much memory will be free on a machine (or, below 0, taken); the next beats say how it
        came out."""
        for entry in self._blank():
            if entry.host == host and entry.room_bytes:
                entry.room_bytes = max(1, entry.room_bytes + by)

    def _blank(self) -> list[ProcessRecord]:
        return [entry for entry in self._entries.values() if entry.blank]

    def holders(self, stage: int) -> list[ProcessRecord]:
        """Those that hold the stage or are getting it."""
        return [entry for entry in self.seated(stage) if entry.state != "failed"]

    def empty(self) -> list[Seat]:
        """Seats that nobody holds, in pipeline order."""
        taken = {entry.seat for entry in self._entries.values() if entry.seat and entry.state != "failed"}
        return [seat for seat in self.plan if seat not in taken]
