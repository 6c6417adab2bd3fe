"""What is told of a process is its own: nothing of the one that was in its place before."""

import msgspec
import pytest
from support.snapshots import group, worker

from zrt.actors.block_server.layer_lending.lent_worker import LentWorker
from zrt.actors.block_server.tensor_parallel.group_stats import GroupStats
from zrt.actors.coordinator.fleet.roster import Roster
from zrt.runtime.actor.actor import Actor
from zrt.runtime.cluster.seats import Seat, seats
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.cluster import ActorInfo
from zrt.runtime.messages.control import Address, Fault
from zrt.runtime.messages.members import Assignment, Beat, LoadProgress, Register, StateChanged
from zrt.runtime.messages.stats import KvStats, LendLoad, Load, RankLoad, WorkerLoad

TEMPLATE = Assignment(0, "m", "files", 0, 0, 2, "float32", 1024, 64, 1, 16, 60.0)
LOAD = Load(
    2, 3, 4, 5, 600, 70_000, 8, KvStats(1, 2, 3, 6, 16), 9, group(2), 10, 11, LendLoad("0", workers=[worker("w")]), 12
)


class Memory:
    """Any stage fits any process."""

    def needed_bytes(self, first: int, last: int) -> int:
        return 1

    def kv_pages(self, seat: Seat) -> int:
        return 6


def register(roster: Roster, incarnation: int, now: float, **more: object) -> Address:
    address = Address("stage0", incarnation, f"tcp://10.0.0.{incarnation}:1")
    told = {"state": "blank", "pid": incarnation, "host": f"host{incarnation}", "device": "cpu", "restarts": 1} | more
    roster.register(address, Register(kind="block_server", endpoint=address.endpoint, **told), now)  # type: ignore[arg-type]
    return address


def beat(roster: Roster, address: Address) -> None:
    for now in (1.0, 2.0):
        load = msgspec.structs.replace(LOAD, busy_us=int(LOAD.busy_us * now), tokens=int(LOAD.tokens * now))
        roster.beat(address, Beat("ready", 0, 1 << 20, load), now)


def busy(roster: Roster) -> Address:
    """A process of which everything that is ever told of one has been told."""
    address = register(roster, 1, 0.0)
    (record,) = roster.place()
    record.assign(TEMPLATE, 7)
    roster.load_progress(address, LoadProgress(7, 5, 9, LOAD.lend, 1, 2, 3))
    beat(roster, address)
    roster.state_changed(address, StateChanged("failed", 7, Fault("bad_model", "no such tensor")))
    record.pass_over("too small")
    return address


def shown(roster: Roster, now: float = 3.0) -> ActorInfo:
    return roster.infos(now)[0]


def test_nothing_that_is_shown_of_a_process_is_shown_of_its_successor() -> None:
    """Of everything shown, the successor has what a process has that was never anything else."""
    roster, fresh = (Roster(seats([(0, 1)], [1]), Memory()) for _ in range(2))
    busy(roster)
    dead, empty = shown(roster), ActorInfo("stage0", "block_server", "starting")
    assert {field for field in ActorInfo.__struct_fields__ if getattr(dead, field) == getattr(empty, field)} == {
        "name",  # the seat's, and the kind as well
        "kind",
    }
    roster.died("stage0", 1)
    for each in (roster, fresh):
        register(each, 2, 3.0, restarts=2)
        each.place()
    assert shown(roster) == shown(fresh)


def test_a_process_that_is_given_blocks_anew_is_shown_without_its_last_fault_and_progress() -> None:
    roster = Roster(seats([(0, 1)], [1]), Memory())
    record = roster.known(busy(roster))
    record.assign(TEMPLATE, 8)
    info = shown(roster)
    assert (info.state, info.fault, info.done_bytes, info.total_bytes, info.graphs) == ("loading", "", 0, 0, 0)


def test_a_process_that_registers_again_is_shown_as_it_was() -> None:
    """It is the same: a broken connection makes nothing of what was said before untrue."""
    roster = Roster(seats([(0, 1)], [1]), Memory())
    busy(roster)
    before = shown(roster)
    register(roster, 1, 2.0, state="failed")
    roster.known(Address("stage0", 1, "")).pass_over("too small")
    assert shown(roster) == before


RANK_SEAT = {"rank", "steps", "errors", "forward_us", "drain_us"}
"""Fields of a rank's place in the group: they are counted over all its processes."""


@pytest.mark.parametrize("field", RankLoad.__struct_fields__)
def test_a_field_of_a_rank_is_the_seats_or_is_begun_anew(field: str) -> None:
    stats = GroupStats(2, 1)
    rank = stats.ranks[1]
    for number, name in enumerate(RankLoad.__struct_fields__, 5):
        if name != "rank":
            setattr(rank, name, {"state": "lost", "error": "rank_failed: it died"}.get(name, number))
    before = getattr(rank, field)
    stats.begin()
    assert getattr(rank, field) == (before if field in RANK_SEAT else getattr(RankLoad(1), field))


def test_a_rank_is_shown_without_the_error_of_the_one_before() -> None:
    stats = GroupStats(2, 1)
    stats.blame(1, ZrtError("rank_failed", "killed by signal 9"))
    stats.begin()
    assert [(one.errors, one.error) for one in stats.load().ranks] == [(0, ""), (1, "")]


WORKER_OWN = {"name", "device", "pushed_bytes", "free_mb", "total_mb", "latency_us", "layer_us", "hop_us", "hops"} | {
    "overhead_us"
}
"""Fields of a worker that do not depend on the layers that it has."""


@pytest.mark.parametrize("field", WorkerLoad.__struct_fields__)
def test_a_field_of_a_worker_is_its_own_or_goes_with_its_layers(field: str) -> None:
    made = LentWorker(Actor("master"), Address("attic", 1, ""))
    for number, name in enumerate(WorkerLoad.__struct_fields__, 5):
        setattr(
            made._load, name, {"name": "attic", "state": "ready", "layers": "1-2", "device": "cpu"}.get(name, number)
        )
    before = getattr(made._load, field)
    made.reserve()
    assert getattr(made._load, field) == (before if field in WORKER_OWN else getattr(WorkerLoad("", "reserve"), field))
