"""Who holds what, and which way a session goes."""

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from zrt.actors.coordinator.fleet.process_record import LoadingProgress
from zrt.actors.coordinator.fleet.roster import MOST, Roster
from zrt.runtime.cluster.seats import Seat, seats
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.control import Address, Fault
from zrt.runtime.messages.members import Assignment, Beat, LoadProgress, Register, StateChanged
from zrt.runtime.messages.stats import LendLoad, Load, WorkerLoad


class SizedMemory:
    """Any block takes `block` bytes, and what holds any `fixed` more; a pool of KV memory has
    `pool` pages of one block."""

    def __init__(self, block: int = 10, fixed: int = 5, pool: int = 60) -> None:
        self._block = block
        self._fixed = fixed
        self._pool = pool

    def needed_bytes(self, first: int, last: int) -> int:
        return self._fixed + self._block * (last - first + 1)

    def kv_pages(self, seat: Seat) -> int:
        return self._pool // (seat.last - seat.first + 1)


PLAN = seats([(0, 14), (15, 29)], [1, 2])


def make_roster(spares: int = 0, plan: Sequence[Seat] = PLAN) -> Roster:
    return Roster(plan, SizedMemory(), spares=[f"spare{number}" for number in range(spares)])


def join(
    roster: Roster, name: str, incarnation: int = 1, state: str = "blank", memory: int = 0, room: int = 0
) -> Address:
    address = Address(name, incarnation, f"tcp://127.0.0.1:{incarnation}")
    message = Register("block_server", address.endpoint, 1, "host", state, memory_bytes=memory, room_bytes=room)  # type: ignore[arg-type]
    roster.register(address, message, 0.0)
    return address


def told(error: ZrtError | None) -> str | None:
    return None if error is None else error.message


def places(roster: Roster) -> dict[str, str]:
    """Place, and say which block servers hold what."""
    roster.place()
    return {info.name: info.blocks for info in roster.infos(0.0) if info.blocks}


def make_ready(roster: Roster, *names: str) -> None:
    addresses = [join(roster, name) for name in names]
    roster.place()
    for address in addresses:
        if roster.known(address).seat is not None:
            roster.state_changed(address, StateChanged("ready", 0))


def test_restarts_are_those_that_a_process_told_of_also_while_it_is_gone() -> None:
    roster = make_roster()
    roster.register(Address("stage0", 1, ""), Register("block_server", "", 1, "here", "blank", restarts=2), 0.0)
    assert [actor.restarts for actor in roster.infos(0.0) if actor.name == "stage0"] == [2]
    roster.died("stage0", 1)
    assert [actor.restarts for actor in roster.infos(0.0) if actor.name == "stage0"] == [2]


def test_a_stage_that_loads_anew_has_loaded_nothing() -> None:
    roster = make_roster()
    make_ready(roster, "stage0")
    address = roster.known(Address("stage0", 1, "")).address
    roster.load_progress(address, LoadProgress(0, 8, 8, graphs=2, all_graphs=2))
    for again in range(2):
        roster.state_changed(address, StateChanged("loading", 0))
        record = roster.known(address)
        assert record.loading == LoadingProgress(3 * again, 8, graphs=0, all_graphs=2)
        roster.load_progress(address, LoadProgress(0, 3, 8, all_graphs=2))


def test_seats_are_named_by_stage_and_replica() -> None:
    assert [seat.name for seat in PLAN] == ["stage0", "stage1.0", "stage1.1"]


def test_a_seat_goes_to_the_actor_of_its_name() -> None:
    roster = make_roster()
    join(roster, "stage1.1")
    join(roster, "stranger")
    placed = roster.place()
    assert [(record.address.name, record.seat and record.seat.replica) for record in placed] == [("stage1.1", 1)]
    assert roster.place() == []


def test_a_stranger_takes_the_seat_of_a_process_that_will_not_come_back() -> None:
    roster = make_roster()
    join(roster, "stranger")
    assert roster.place() == []
    roster.lost("stage0", "it ended")
    assert [record.seat and record.seat.stage for record in roster.place()] == [0]


def test_a_route_has_one_ready_replica_a_stage_the_least_loaded() -> None:
    roster = make_roster()
    make_ready(roster, "stage0")
    assert roster.pipeline.route() is None
    assert not roster.pipeline.ready
    make_ready(roster, "stage1.0", "stage1.1")
    busy = Address("stage1.0", 1, "")
    roster.beat(busy, Beat("ready", 0, 0, Load(sessions=3)), 1.0)
    assert [address.name for address in roster.pipeline.route() or []] == ["stage0", "stage1.1"]


def test_what_was_done_before_the_first_beat_is_no_rate() -> None:
    """After a restart of the coordinator its processes have a past."""
    roster = make_roster()
    address = join(roster, "stage0")
    record = roster.beat(address, Beat("ready", 0, 0, Load(busy_us=9_000_000, tokens=500)), 1.0)
    assert (record.last_beat.busy_share, record.last_beat.tokens_s) == (0, 0)
    record = roster.beat(address, Beat("ready", 0, 0, Load(busy_us=9_500_000, tokens=530)), 2.0)
    assert (record.last_beat.busy_share, record.last_beat.tokens_s) == (0.5, 30)


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
    (record,) = roster.place()
    record.serial = 5
    roster.state_changed(address, StateChanged("failed", 4, Fault("bad_model", "old")))
    roster.load_progress(address, LoadProgress(4, 1, 2))
    assert (record.state, record.loading.total_bytes) == ("blank", 0)
    roster.load_progress(address, LoadProgress(5, 1, 2))
    assert (record.loading.done_bytes, record.loading.total_bytes) == (1, 2)


def test_a_failed_load_is_the_clusters_fault() -> None:
    roster = make_roster()
    address = join(roster, "stage0")
    roster.place()
    assert roster.pipeline.fault() == ""
    roster.state_changed(address, StateChanged("failed", 0, Fault("bad_model", "no such tensor", "model.safetensors")))
    assert roster.pipeline.fault() == "bad_model: no such tensor (model.safetensors)"


def test_a_stage_is_lost_when_no_replica_is_left_or_comes_back() -> None:
    roster = make_roster()
    make_ready(roster, "stage1.0", "stage1.1")
    roster.died("stage1.0", 1)
    roster.lost("stage1.0", "gone")
    assert roster.pipeline.stage_lost() is None
    roster.died("stage1.1", 1)
    assert roster.pipeline.stage_lost() is None
    roster.lost("stage1.1", "gone too")
    assert told(roster.pipeline.stage_lost()) == "stage 1 (blocks 15-29) is lost: gone too"


def test_a_stage_is_lost_when_its_process_came_back_and_cannot_load_it() -> None:
    roster = make_roster()
    make_ready(roster, "stage0", "stage1.0", "stage1.1")
    roster.died("stage0", 1)
    address = join(roster, "stage0", incarnation=2)
    roster.place()
    assert roster.pipeline.stage_lost() is None
    roster.state_changed(address, StateChanged("failed", 0, Fault("bad_model", "no such file")))
    assert told(roster.pipeline.stage_lost()) == "stage 0 (blocks 0-14) is lost: bad_model: no such file"


@pytest.mark.parametrize(
    ("kind", "kept"),
    [("bad_model", True), ("worker_failed", True), ("internal", False), ("insufficient_memory", False)],
)
def test_sessions_end_with_the_kind_of_what_is_to_be_put_right(kind: str, kept: bool) -> None:
    roster = make_roster()
    make_ready(roster, "stage1.0", "stage1.1")
    address = join(roster, "stage0")
    roster.place()
    roster.state_changed(address, StateChanged("failed", 0, Fault(kind, "why")))
    lost = roster.pipeline.stage_lost()
    assert lost is not None
    assert lost.kind == (kind if kept else "stage_lost")


def test_silence_is_told_by_the_last_beat() -> None:
    roster = make_roster()
    address = join(roster, "stage0")
    assert roster.silent(3.0, 3.0) == []
    assert [record.address for record in roster.silent(3.1, 3.0)] == [address]
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


def test_a_cluster_has_one_parent() -> None:
    roster = make_roster()
    parent = Register("supervisor", "tcp://127.0.0.1:1", 1, "host", "ready")
    roster.register(Address("up", 1, ""), parent, 0.0)
    roster.register(Address("up", 1, ""), parent, 0.0)
    with pytest.raises(ZrtError, match=r"up \(process 1 on host\) is the parent here"):
        roster.register(Address("another", 2, ""), parent, 0.0)


def test_processes_are_bounded_in_number() -> None:
    roster = make_roster()
    for number in range(MOST):
        join(roster, f"stranger{number}")
    with pytest.raises(ZrtError) as raised:
        join(roster, "one too many")
    assert raised.value.kind == "overloaded"


TEMPLATE = Assignment(0, "m", "files", 0, 0, 30, "float32", 1 << 20, 256, 64, 512, 600.0)


@pytest.mark.parametrize(
    ("name", "change", "seat"),
    [
        ("stage1.1", {}, "stage1.1"),
        ("stranger", {}, "stage1.0"),
        ("stage0", {}, "stage1.0"),
        ("stage0", {"first": 0, "last": 14}, "stage0"),
        ("stage1.0", {"last": 28}, None),
        ("stage1.0", {"first": 14}, None),
        ("stage1.0", {"model": "n"}, None),
        ("stage1.0", {"weights": "random"}, None),
        ("stage1.0", {"dtype": "bfloat16"}, None),
        ("stage1.0", {"kv_bytes": 1}, None),
        ("stage1.0", {"context": 255}, None),
        ("stage1.0", {"chunk": 511}, None),
        ("stage1.0", {"tp": 2}, None),
    ],
)
def test_what_an_earlier_coordinator_gave_is_kept_where_it_fits(
    name: str, change: dict[str, object], seat: str | None
) -> None:
    roster = make_roster()
    address = join(roster, name, state="ready")
    record = roster.known(address)
    holds = replace(TEMPLATE, **{"serial": 77, "first": 15, "last": 29, **change})
    assert roster.take_over(record, holds, TEMPLATE) == (seat is not None)
    assert (record.seat and record.seat.name) == seat
    assert (record.serial, record.state) == ((77, "loading") if seat else (0, "blank"))
    assert not record.routable
    roster.state_changed(address, StateChanged("ready", 77))
    assert record.routable == (seat is not None)


@pytest.mark.parametrize(("tp", "kept"), [(2, True), (1, False), (4, False)])
def test_the_seat_of_a_leader_is_for_one_that_leads_as_many_ranks(tp: int, kept: bool) -> None:
    roster = make_roster(plan=[Seat("stage0", 0, 0, 0, 29, tp=2)])
    record = roster.known(join(roster, "stage0", state="ready"))
    holds = replace(TEMPLATE, serial=77, first=0, last=29, tp=tp)
    assert roster.take_over(record, holds, TEMPLATE) is kept


def test_a_seat_is_taken_over_once() -> None:
    roster = make_roster()
    holds = replace(TEMPLATE, serial=77, first=0, last=14)
    taken = [roster.take_over(roster.known(join(roster, name)), holds, TEMPLATE) for name in ("a", "b")]
    assert taken == [True, False]
    assert [record.address.name for record in roster.place()] == []


@pytest.mark.parametrize(
    ("state", "ready", "taken"), [("loading", True, True), ("loading", False, False), ("ready", True, False)]
)
def test_who_is_ready_goes_before_whoever_still_loads_what_it_was_just_given(
    state: str, ready: bool, taken: bool
) -> None:
    roster = make_roster(plan=PLAN[:1])
    loader = roster.known(join(roster, "stage0"))
    roster.place()
    loader.assign(TEMPLATE, 5)
    loader.state = state  # type: ignore[assignment]
    holder = roster.known(join(roster, "spare0", state="ready"))
    holder.serial = 77
    holds = replace(TEMPLATE, serial=77, first=0, last=14)
    assert roster.take_over(holder, holds, TEMPLATE, ready=ready) is taken
    assert roster.surplus() == [loader if taken else holder]
    assert roster.surplus() == []
    assert (loader.blank, holder.seat is not None) == (taken, taken)


def test_what_an_earlier_coordinator_gave_is_nobodys_to_take_away() -> None:
    roster = make_roster(plan=PLAN[:1])
    holds = replace(TEMPLATE, serial=77, first=0, last=14)
    first = roster.known(join(roster, "a"))
    assert roster.take_over(first, holds, TEMPLATE, ready=True)
    assert first.state == "loading"  # until it says how it is
    assert not roster.take_over(roster.known(join(roster, "b")), holds, TEMPLATE, ready=True)
    assert roster.surplus() == []


def test_what_comes_too_late_is_counted() -> None:
    roster = make_roster()
    address = join(roster, "stage0")
    roster.place()
    roster.known(address).serial = 5
    roster.state_changed(address, StateChanged("failed", 4))
    roster.load_progress(address, LoadProgress(4, 1, 2))
    with pytest.raises(ZrtError):
        roster.load_progress(Address("stage0", 9, ""), LoadProgress(5, 1, 2))
    assert roster.stale == 3


@pytest.mark.parametrize(
    ("hosts", "shares", "slots"),
    [
        (("a", "a", "a"), (True, True, True), 1),
        (("a", "b", "b"), (True, True, True), 2),
        (("a", "a", "a"), (False, False, False), 2),
        (("a", "a", "a"), (True, False, False), 2),
        (("a", "a", "a"), (True, True, False), 2),
    ],
)
def test_stages_that_share_a_machines_cores_share_a_slot(
    hosts: tuple[str, ...], shares: tuple[bool, ...], slots: int
) -> None:
    roster = make_roster()
    for name, host, shared in zip(("stage0", "stage1.0", "stage1.1"), hosts, shares, strict=True):
        message = Register("block_server", "tcp://127.0.0.1:1", 1, host, "blank", shares_cores=shared)
        roster.register(Address(name, 1, "tcp://127.0.0.1:1"), message, 0.0)
    assert roster.pipeline.num_slots == 2  # nobody has a seat yet
    roster.place()
    assert roster.pipeline.num_slots == slots


@pytest.mark.parametrize(
    ("hosts", "devices", "slots"),
    [
        ("aaa", ("cuda:0", "cuda:0", "cuda:0"), 1),
        ("aaa", ("cuda:0", "cuda:1", "cuda:1"), 1),
        ("abb", ("cuda:0", "cuda:0", "cuda:0"), 2),
        ("aaa", ("cuda:0", "cpu", "cpu"), 2),
    ],
)
def test_stages_on_the_gpus_of_a_machine_share_a_slot(hosts: str, devices: tuple[str, ...], slots: int) -> None:
    roster = make_roster()
    for name, host, device in zip(("stage0", "stage1.0", "stage1.1"), hosts, devices, strict=True):
        message = Register("block_server", "tcp://127.0.0.1:1", 1, host, "blank", device)
        roster.register(Address(name, 1, "tcp://127.0.0.1:1"), message, 0.0)
    roster.place()
    assert roster.pipeline.num_slots == slots


# ---- spares --------------------------------------------------------------------------------------


def test_spares_wait_for_the_processes_the_seats_are_named_after() -> None:
    roster = make_roster(spares=1)
    for name in ("spare0", "stage1.0"):
        join(roster, name)
    assert places(roster) == {"stage1.0": "15-29"}


@pytest.mark.parametrize("hears", ["its death", "that it is started again", "that it is not started again"])
def test_a_lost_seat_goes_to_a_spare_at_once(hears: str) -> None:
    roster = make_roster(spares=1)
    make_ready(roster, "stage0", "stage1.0", "stage1.1", "spare0")
    roster.died("stage0", 1)
    if hears == "that it is started again":
        roster.restarted("stage0")
    elif hears == "that it is not started again":
        roster.lost("stage0", "gone")
    assert places(roster) == {"spare0": "0-14", "stage1.0": "15-29", "stage1.1": "15-29"}
    assert roster.pipeline.stage_lost() is None


def test_who_comes_back_and_finds_its_seat_taken_is_a_spare() -> None:
    roster = make_roster(spares=1)
    make_ready(roster, "stage0", "stage1.0", "stage1.1", "spare0")
    roster.died("stage0", 1)
    places(roster)
    join(roster, "stage0", incarnation=2)
    assert "stage0" not in places(roster)
    roster.died("stage1.1", 1)
    assert places(roster) == {"spare0": "0-14", "stage1.0": "15-29", "stage0": "15-29"}


def test_a_process_that_died_before_it_registered_keeps_no_seat() -> None:
    roster = make_roster(spares=1)
    join(roster, "spare0")
    assert places(roster) == {}
    roster.restarted("stage0")
    assert places(roster) == {"spare0": "0-14"}


def test_a_spare_goes_where_no_other_replica_is_left() -> None:
    roster = make_roster(spares=1)
    make_ready(roster, "stage0", "stage1.0", "stage1.1")
    roster.died("stage1.0", 1)
    roster.died("stage0", 1)
    join(roster, "spare0")
    assert places(roster) == {"spare0": "0-14", "stage1.1": "15-29"}


def test_two_spares_serve_two_stages_before_they_serve_one_twice() -> None:
    roster = make_roster(spares=2)
    make_ready(roster, "stage0", "stage1.0", "stage1.1")
    for name in ("stage1.0", "stage1.1", "stage0"):
        roster.died(name, 1)
    for name in ("spare0", "spare1"):
        join(roster, name)
    assert sorted(places(roster).values()) == ["0-14", "15-29"]


@pytest.mark.parametrize(
    ("rooms", "takes"),
    [
        ({"spare0": 154}, None),
        ({"spare0": 155}, "spare0"),
        ({"spare0": 500, "spare1": 160, "spare2": 154}, "spare1"),
        ({"spare0": 0, "spare1": 200}, "spare1"),
    ],
)
def test_a_lost_seat_goes_to_the_least_room_that_is_enough(rooms: dict[str, int], takes: str | None) -> None:
    """15 blocks take 155 bytes; 0 is one that does not say."""
    for kind in ("memory", "room"):
        roster = make_roster(spares=3)
        make_ready(roster, "stage0", "stage1.0", "stage1.1")
        for name, room in rooms.items():
            join(roster, name, **{kind: room})
        roster.died("stage1.0", 1)
        assert [name for name in places(roster) if name in rooms] == ([takes] if takes else [])


@pytest.mark.parametrize(
    ("stage", "rooms", "held"),
    [
        ("stage0", (85, 75), {"spare1": "0-6", "spare0": "7-14"}),
        ("stage0", (75, 85), {"spare0": "0-6", "spare1": "7-14"}),
        ("stage0", (45, 120), {"spare0": "0-3", "spare1": "4-14"}),
        ("stage0", (74, 84), {}),
        ("stage0", (20, 154, 150), {"spare2": "0-6", "spare1": "7-14"}),
        ("stage1", (85, 75), {"spare1": "15-21", "spare0": "22-29"}),
    ],
)
def test_a_lost_range_goes_to_two_narrower_spares(stage: str, rooms: tuple[int, ...], held: dict[str, str]) -> None:
    """The two with the most room share it so that both are equally full; the stages behind move on
    by one."""
    roster = Roster(seats([(0, 14), (15, 29)], [1, 1]), SizedMemory())
    make_ready(roster, "stage0", "stage1")
    for number, room in enumerate(rooms):
        join(roster, f"spare{number}", memory=room)
    other = "stage1" if stage == "stage0" else "stage0"
    roster.died(stage, 1)
    assert places(roster) == held | {other: "15-29" if other == "stage1" else "0-14"}
    assert roster.pipeline.num_stages == (3 if held else 2)
    for name in held:
        roster.state_changed(Address(name, 1, ""), StateChanged("ready", 0))
    if held:
        ordered = sorted([*held, other], key=lambda name: int(places(roster)[name].partition("-")[0]))
        assert [address.name for address in roster.pipeline.route() or []] == ordered
        assert roster.pipeline.capacity() == (4, 4)  # of the stage that is still whole
        join(roster, stage, incarnation=2)
        assert stage not in places(roster)
    else:
        assert roster.pipeline.route() is None


def test_half_a_stage_can_be_lost_and_cut_again() -> None:
    roster = Roster(seats([(0, 3)], [1]), SizedMemory(block=1, fixed=0))
    make_ready(roster, "stage0")
    for name, room in (("a", 2), ("b", 2), ("c", 1), ("d", 1)):
        join(roster, name, memory=room)
    roster.died("stage0", 1)
    assert places(roster) == {"a": "0-1", "b": "2-3"}
    roster.died("a", 1)
    assert places(roster) == {"c": "0-0", "d": "1-1", "b": "2-3"}
    roster.died("d", 1)
    assert places(roster) == {"c": "0-0", "b": "2-3"}
    join(roster, "e", memory=1)
    assert places(roster) == {"c": "0-0", "e": "1-1", "b": "2-3"}


def test_the_memory_of_the_dead_is_free_for_a_spare_of_that_machine() -> None:
    roster = make_roster(spares=1)
    make_ready(roster, "stage0", "stage1.0", "stage1.1")
    roster.beat(Address("stage0", 1, ""), Beat("ready", 0, 100), 1.0)
    join(roster, "spare0", room=60)
    roster.died("stage0", 1)
    assert places(roster)["spare0"] == "0-14"


def test_what_one_spare_is_given_another_of_that_machine_does_not_have() -> None:
    """Until beats say how it came out."""
    roster = make_roster(spares=2)
    make_ready(roster, "stage0", "stage1.0", "stage1.1")
    for name in ("spare0", "spare1"):
        join(roster, name, room=200)
    roster.died("stage0", 1)
    roster.died("stage1.0", 1)
    assert set(places(roster)) == {"spare0", "stage1.1"}
    roster.beat(Address("spare1", 1, ""), Beat("blank", 0, 0, room_bytes=200), 1.0)
    assert set(places(roster)) == {"spare0", "spare1", "stage1.1"}


def test_a_spare_takes_the_seat_of_one_that_cannot_load_it() -> None:
    roster = make_roster(spares=1)
    addresses = [join(roster, name) for name in ("stage0", "spare0")]
    roster.place()
    roster.state_changed(addresses[0], StateChanged("failed", 0, Fault("insufficient_memory", "too small")))
    assert places(roster) == {"spare0": "0-14"}
    assert roster.pipeline.fault() == ""


@pytest.mark.parametrize(
    ("awaited", "lost"),
    [
        ({"spare0"}, False),
        ({"stage0"}, False),
        ({"stage1.0"}, True),  # it takes its own seat
        (set(), True),
    ],
)
def test_a_stage_is_not_lost_while_a_process_that_may_take_it_is_awaited(awaited: set[str], lost: bool) -> None:
    roster = make_roster(spares=1)
    make_ready(roster, "stage0", "stage1.0", "stage1.1", "spare0")
    for name in ("spare0", "stage1.0", "stage0"):
        roster.died(name, 1)
        if name not in awaited:
            roster.lost(name, f"{name} ended")
    assert told(roster.pipeline.stage_lost()) == ("stage 0 (blocks 0-14) is lost: stage0 ended" if lost else None)


# ---- routes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("crowd", "current", "chosen"),
    [
        ({}, None, "stage1.0"),
        ({"stage1.0": (1, 0)}, None, "stage1.1"),
        ({"stage1.0": (2, 1), "stage1.1": (1, 1)}, None, "stage1.1"),
        ({"stage1.0": (2, 1), "stage1.1": (2, 0)}, None, "stage1.1"),  # of its slot there are fewer
        ({"stage1.0": (9, 9)}, "stage1.0", "stage1.0"),  # it stays
    ],
)
def test_a_session_goes_where_fewest_are(crowd: dict[str, tuple[int, int]], current: str | None, chosen: str) -> None:
    roster = make_roster()
    make_ready(roster, "stage0", "stage1.0", "stage1.1")
    here = [record.address for record in roster.of_kind("block_server") if record.address.name == current]
    assert [address.name for address in roster.pipeline.route(here, crowd) or []] == ["stage0", chosen]


def test_a_draining_replica_is_offered_to_those_that_run_there_while_it_is_the_only_one() -> None:
    roster = make_roster()
    make_ready(roster, "stage0", "stage1.0")
    current = roster.pipeline.route() or []
    roster.drain("stage1.0")
    assert roster.pipeline.route() is None
    assert roster.pipeline.route(current) == current
    make_ready(roster, "stage1.1")
    assert [address.name for address in roster.pipeline.route(current) or []] == ["stage0", "stage1.1"]


def test_a_drained_replica_keeps_its_seat_and_comes_back() -> None:
    roster = make_roster(spares=1)
    make_ready(roster, "stage0", "stage1.0", "stage1.1", "spare0")
    roster.drain("stage0").state = "drained"
    assert "spare0" not in places(roster)
    assert roster.pipeline.route() is None
    assert roster.pipeline.stage_lost() is None
    assert roster.pipeline.unready() == "no replica is ready of stage 0 (stage0 is drained)"
    roster.undrain("stage0")
    assert roster.pipeline.ready
    assert roster.pipeline.unready() == ""


def test_one_that_is_being_started_is_not_unknown() -> None:
    roster = make_roster()
    make_ready(roster, "stage0")
    for asked in (roster.drain, roster.undrain):
        with pytest.raises(ZrtError, match=r"stage1\.0 is being started") as raised:
            asked("stage1.0")
        assert raised.value.kind == "warming_up"


@pytest.mark.parametrize(("ready", "pages"), [(["stage0"], (4, 4)), (["stage0", "stage1.0", "stage1.1"], (4, 4))])
def test_the_stage_with_the_fewest_pages_limits(ready: list[str], pages: tuple[int, int]) -> None:
    roster = make_roster()
    make_ready(roster, *ready)
    assert roster.pipeline.capacity() == pages


def test_replicas_add_up() -> None:
    roster = Roster(seats([(0, 1), (2, 2)], [2, 1]), SizedMemory(block=0, fixed=0))
    make_ready(roster, "stage0.0", "stage1")
    assert roster.pipeline.capacity() == (30, 30)
    make_ready(roster, "stage0.1")
    assert roster.pipeline.capacity() == (30, 60)
    roster.drain("stage0.0")
    assert roster.pipeline.capacity() == (30, 30)


def unused(roster: Roster) -> dict[str, str]:
    """Place, and return why block servers are unused."""
    roster.place()
    return {info.name: info.unused for info in roster.infos(0.0) if info.unused}


@pytest.mark.parametrize(
    ("memory", "room", "has"),
    [
        (100, 0, "it may take 100 B"),
        (0, 90, "its machine has free for it 90 B"),
        (100, 90, "its machine has free for it 90 B"),
        (90, 100, "it may take 90 B"),
    ],
)
def test_a_spare_that_is_too_small_is_told_of_for_as_long_as_it_is(memory: int, room: int, has: str) -> None:
    roster = make_roster(spares=1)
    make_ready(roster, "stage0", "stage1.0", "stage1.1")
    address = join(roster, "spare0", memory=memory, room=room)
    assert unused(roster) == {}
    roster.died("stage0", 1)
    words = "too little memory for stage 0 (blocks 0-14), which lacks a block server: that takes 155 B, "
    assert unused(roster) == {"spare0": words + has}
    join(roster, "stage0", incarnation=2)
    assert unused(roster) == {}
    roster.died("stage0", 2)
    assert unused(roster)
    if not memory:
        roster.beat(address, Beat("blank", 0, 0, room_bytes=155), 1.0)
        assert unused(roster) == {}
        assert places(roster)["spare0"] == "0-14"


@pytest.mark.parametrize("lost", ["stage0", "stage1.0"])
def test_of_all_that_is_lost_the_smallest_is_told(lost: str) -> None:
    roster = Roster(seats([(0, 9), (10, 29)], [1, 2]), SizedMemory(), spares=["spare0"])
    make_ready(roster, "stage0", "stage1.0", "stage1.1")
    join(roster, "spare0", memory=50)
    roster.died("stage1.1", 1)
    roster.died(lost, 1)
    assert ("stage 0 " if lost == "stage0" else "stage 1 ") in unused(roster)["spare0"]


@pytest.mark.parametrize("own", ["blank", "loading", "ready", "starting", "stopped"])
@pytest.mark.parametrize("layers", ["3-4", ""])
@pytest.mark.parametrize("seated", [True, False])
def test_a_worker_of_which_no_layers_are_used_is_a_reserve(own: str, layers: str, seated: bool) -> None:
    roster = make_roster()
    roster.register(Address("attic", 2, ""), Register("layer_worker", "", 1, "here", own), 0.0)  # type: ignore[arg-type]
    address = join(roster, "stage0" if seated else "stranger")
    roster.place()
    load = Load(lend=LendLoad("0", workers=[WorkerLoad("attic", "ready", layers), WorkerLoad("cellar", "ready", "7")]))
    roster.beat(address, Beat("ready", 0, 0, load), 1.0)
    (state,) = (info.state for info in roster.infos(1.0) if info.name == "attic")
    used = (layers and seated) or own in ("starting", "stopped")
    assert state == (own if used else "reserve")


def test_who_serves_the_stage_of_a_name_is_told_with_what_the_name_cannot_do() -> None:
    """A process keeps its name, whichever stage it serves."""
    roster = make_roster(spares=1)
    make_ready(roster, "stage0", "stage1.0", "stage1.1", "spare0")
    roster.died("stage0", 1)
    places(roster)
    served = "; stage 0 is served by spare0"
    for happens, kind, words in [
        (lambda: None, "warming_up", "stage0 is being started"),
        (lambda: roster.lost("stage0", "stage0 ended"), "bad_request", "stage0 ended"),
        (lambda: join(roster, "stage0", incarnation=2), None, "stage0 is blank"),
    ]:
        happens()  # type: ignore[no-untyped-call]
        for ask, own in ((roster.drain, "model_not_loaded"), (roster.undrain, "bad_request")):
            with pytest.raises(ZrtError) as raised:
                ask("stage0")
            assert raised.value.kind == (kind or own)
            assert raised.value.message.startswith(words)
            assert raised.value.message.endswith(served)
    with pytest.raises(ZrtError) as raised:
        roster.undrain("stage1.1")
    assert raised.value.message == "stage1.1 is ready, not drained"


@pytest.mark.parametrize("spares", [0, 1, 2])
def test_a_stage_that_is_lost_says_who_is_too_small_for_it(spares: int) -> None:
    roster = make_roster()
    make_ready(roster, "stage0", "stage1.0", "stage1.1")
    for number in range(spares):
        join(roster, f"small{number}", memory=50 + number)
    roster.died("stage0", 1)
    roster.lost("stage0", "stage0 ended")
    roster.place()
    words = "has too little memory for stage 0 (blocks 0-14), which lacks a block server: that takes 155 B, it may take"
    small = [f"; small{number} {words} {50 + number} B" for number in range(spares)]
    assert roster.pipeline.fault() == f"stage 0 (blocks 0-14) is lost: stage0 ended{''.join(small)}"
