"""Who holds what, and which way a session goes."""

import pytest

from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.control import Address, Beat, Fault, Load, LoadProgress, Register, StateChanged
from zrt.runtime.roster import Roster
from zrt.runtime.seats import seats

PLAN = seats([(0, 14), (15, 29)], [1, 2])


def make_roster(spares: int = 0) -> Roster:
    """A block takes 10 bytes, and what holds any 5 more; a pool of KV memory has 60 pages of one block."""
    return Roster(
        PLAN,
        needed=lambda first, last: 5 + 10 * (last - first + 1),
        pages=lambda first, last: 60 // (last - first + 1),
        spares=[f"spare{number}" for number in range(spares)],
    )


def join(roster: Roster, name: str, incarnation: int = 1, state: str = "blank") -> Address:
    address = Address(name, incarnation, f"tcp://127.0.0.1:{incarnation}")
    roster.register(address, Register("block_server", address.endpoint, 1, "host", state), 0.0)  # type: ignore[arg-type]
    return address


def make_ready(roster: Roster, *names: str) -> None:
    addresses = [join(roster, name) for name in names]
    roster.place()
    for address in addresses:
        roster.state_changed(address, StateChanged("ready", 0))


def test_seats_are_named_by_stage_and_replica() -> None:
    assert [seat.name for seat in PLAN] == ["stage0", "stage1.0", "stage1.1"]


def test_a_seat_goes_to_the_actor_of_its_name() -> None:
    roster = make_roster()
    join(roster, "stage1.1")
    join(roster, "stranger")
    placed = roster.place()
    assert [(entry.address.name, entry.seat and entry.seat.replica) for entry in placed] == [("stage1.1", 1)]
    assert roster.place() == []


def test_a_stranger_takes_the_seat_of_a_process_that_will_not_come_back() -> None:
    roster = make_roster()
    join(roster, "stranger")
    assert roster.place() == []
    roster.lost("stage0", "it ended")
    assert [entry.seat and entry.seat.stage for entry in roster.place()] == [0]


def test_a_route_has_one_ready_replica_a_stage_the_least_loaded() -> None:
    roster = make_roster()
    make_ready(roster, "stage0")
    assert roster.route() is None
    assert not roster.ready
    make_ready(roster, "stage1.0", "stage1.1")
    busy = Address("stage1.0", 1, "")
    roster.beat(busy, Beat("ready", 0, 0, Load(sessions=3)), 1.0)
    assert [address.name for address in roster.route() or []] == ["stage0", "stage1.1"]


def test_a_name_belongs_to_one_living_process() -> None:
    roster = make_roster()
    make_ready(roster, "stage0")
    with pytest.raises(ZrtError, match="the name stage0 is taken by process 1 on host"):
        join(roster, "stage0", incarnation=2)
    roster.died("stage0", 1)
    join(roster, "stage0", incarnation=2)
    with pytest.raises(ZrtError) as caught:
        roster.beat(Address("stage0", 1, ""), Beat("ready", 0, 0), 1.0)
    assert caught.value.kind == "unknown_session"
    assert roster.died("stage0", 1) is None
    assert roster.died("stage0", 2) is not None
    assert roster.find("stage0") is None


def test_what_belongs_to_an_older_assignment_is_ignored() -> None:
    roster = make_roster()
    address = join(roster, "stage0")
    (entry,) = roster.place()
    entry.serial = 5
    roster.state_changed(address, StateChanged("failed", 4, Fault("bad_model", "old")))
    roster.load_progress(address, LoadProgress(4, 1, 2))
    assert (entry.state, entry.total_bytes) == ("blank", 0)
    roster.load_progress(address, LoadProgress(5, 1, 2))
    assert (entry.done_bytes, entry.total_bytes) == (1, 2)


def test_a_failed_load_is_the_clusters_fault() -> None:
    roster = make_roster()
    address = join(roster, "stage0")
    roster.place()
    assert roster.fault() == ""
    roster.state_changed(address, StateChanged("failed", 0, Fault("bad_model", "no such tensor", "model.safetensors")))
    assert roster.fault() == "bad_model: no such tensor (model.safetensors)"


def test_a_stage_is_lost_when_no_replica_is_left_or_comes_back() -> None:
    roster = make_roster()
    make_ready(roster, "stage1.0", "stage1.1")
    roster.died("stage1.0", 1)
    roster.lost("stage1.0", "gone")
    assert roster.stage_lost() is None
    roster.died("stage1.1", 1)
    assert roster.stage_lost() is None
    roster.lost("stage1.1", "gone too")
    assert roster.stage_lost() == "stage 1 (blocks 15-29) is lost: gone too"


def test_a_stage_is_lost_when_its_process_came_back_and_cannot_load_it() -> None:
    roster = make_roster()
    make_ready(roster, "stage0", "stage1.0", "stage1.1")
    roster.died("stage0", 1)
    address = join(roster, "stage0", incarnation=2)
    roster.place()
    assert roster.stage_lost() is None
    roster.state_changed(address, StateChanged("failed", 0, Fault("bad_model", "no such file")))
    assert roster.stage_lost() == "stage 0 (blocks 0-14) is lost: bad_model: no such file"


def test_silence_is_told_by_the_last_beat() -> None:
    roster = make_roster()
    address = join(roster, "stage0")
    assert roster.silent(3.0, 3.0) == []
    assert [entry.address for entry in roster.silent(3.1, 3.0)] == [address]
    roster.beat(address, Beat("blank", 0, 0), 3.1)
    assert roster.silent(6.0, 3.0) == []


def test_people_see_also_who_is_awaited() -> None:
    roster = make_roster()
    join(roster, "stage1.0")
    roster.place()
    infos = roster.infos(2.0)
    assert [(info.name, info.state, info.stage, info.silent_ms) for info in infos] == [
        ("stage0", "starting", 0, 0),
        ("stage1.0", "blank", 1, 2000),
        ("stage1.1", "starting", 1, 0),
    ]
