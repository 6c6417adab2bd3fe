"""Who may run, who waits, who goes back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from zrt.actors.coordinator.sessions.admission import HEADROOM, Admission
from zrt.runtime.errors import ZrtError


def admission(*, capacity: int = 100, sessions: int = 8, queue: int = 4, slots: int = 2) -> Admission:
    return Admission(capacity=capacity, page_tokens=16, sessions=sessions, queue=queue, slots=slots)


def test_slots_fill_evenly() -> None:
    made = admission()
    for session in range(4):
        made.offer(session, 10, 100)
    assert made.admit() == [(0, 0), (1, 1), (2, 0), (3, 1)]


def test_what_could_never_fit_is_refused_at_once() -> None:
    with pytest.raises(ZrtError, match="need 101 KV pages and a stage has 100") as caught:
        admission().offer(1, 10, 1601)
    assert caught.value.kind == "kv_full"


def test_a_full_queue_is_overloaded_with_a_time_to_retry() -> None:
    made = admission(sessions=1, queue=2)
    made.offer(0, 1, 1)
    made.admit()
    made.offer(1, 1, 1)
    made.offer(2, 1, 1)
    with pytest.raises(ZrtError, match=r"2 may wait besides the 1 that may run .*; retry after 2 s") as caught:
        made.offer(3, 1, 1)
    assert caught.value.kind == "overloaded"
    assert made.place(2) == (1, 2)


@pytest.mark.parametrize(("queue", "served"), [(0, 3), (1, 4), (2, 5)])
def test_the_queue_holds_those_that_cannot_start_at_once(queue: int, served: int) -> None:
    for at_once in (False, True):
        made = admission(sessions=3, queue=queue)
        for session in range(served):
            made.offer(session, 1, 1)
            if at_once:
                made.admit()
        with pytest.raises(ZrtError, match=f"{queue} may wait besides the 3 that may run"):
            made.offer(9, 1, 1)
        assert len(made.admit()) == (0 if at_once else 3)


def test_a_queue_of_none_refuses_who_finds_no_pages() -> None:
    made = admission(capacity=8, queue=0)
    made.offer(0, 60, 64)
    made.admit()
    with pytest.raises(ZrtError) as caught:
        made.offer(1, 60, 64)
    assert caught.value.kind == "overloaded"


def test_nobody_overtakes_a_large_session_that_waits() -> None:
    made = admission()
    made.offer(0, 800, 1600)
    made.offer(1, 900, 1600)
    made.offer(2, 10, 20)
    assert made.admit() == [(0, 0)]
    made.remove(0)
    assert [session for session, _ in made.admit()] == [1, 2]


def test_a_lone_session_is_always_admitted_and_never_preempted() -> None:
    made = admission(capacity=4)
    made.offer(0, 60, 64)
    assert made.admit() == [(0, 0)]
    assert made.youngest({0}) is None


def test_replicas_make_room_for_more_sessions_not_for_larger_ones() -> None:
    made = admission(capacity=10)
    made.resize(capacity=10, room=20, slots=2)
    with pytest.raises(ZrtError, match="need 11 KV pages and a stage has 10"):
        made.offer(0, 10, 161)
    for session in range(3):
        made.offer(session, 96, 160)
    assert [session for session, _ in made.admit()] == [0, 1]


def test_a_stage_more_is_a_slot_more() -> None:
    made = admission(queue=6)
    for session in range(6):
        made.offer(session, 10, 20)
    made.admit()
    made.resize(capacity=100, room=100, slots=3)
    assert [made.rebalance(session) for session in range(6)] == [2, 2, 0, 1, 0, 1]


def test_sessions_of_a_slot_that_is_no_more_go_to_the_others() -> None:
    made = admission(queue=6, slots=3)
    for session in range(6):
        made.offer(session, 10, 20)
    made.admit()
    made.resize(capacity=100, room=100, slots=2)
    assert [made.rebalance(session) for session in range(6)] == [0, 1, 0, 0, 1, 1]
    made.resize(capacity=100, room=100, slots=1)
    assert [made.rebalance(session) for session in range(6)] == [0] * 6
    for session in range(6):
        made.remove(session)
    assert made.running == 0


def test_a_parked_session_holds_no_place_and_comes_back_first() -> None:
    made = admission(sessions=1)
    for session in range(3):
        made.offer(session, 10, 20)
    assert made.admit() == [(0, 0)]
    made.park(0)
    assert [session for session, _ in made.admit()] == [1]
    assert made.place(0) is None
    made.unpark(0)
    made.unpark(0)
    assert made.place(0) == (0, 2)
    made.remove(1)
    assert [session for session, _ in made.admit()] == [0]
    made.park(0)
    made.remove(0)
    made.unpark(0)
    assert [session for session, _ in made.admit()] == [2]


def test_the_youngest_goes_back_to_the_head_of_the_queue_and_waits_for_room() -> None:
    made = admission(capacity=20)
    for session in range(3):
        made.offer(session, 16, 320)
    assert len(made.admit()) == 3
    made.grow(0, 200)
    made.grow(1, 80)
    assert made.youngest({0, 1, 2}) == 2
    assert made.youngest({0, 1}) == 1
    made.preempt(2)
    assert made.place(2) == (0, 1)
    assert made.admit() == []
    made.remove(1)
    assert made.admit() == [(2, 1)]


def test_slots_are_evened_out_as_sessions_go() -> None:
    made = admission()
    for session in range(4):
        made.offer(session, 1, 1)
    made.admit()
    made.remove(1)
    made.remove(3)
    assert made.rebalance(0) == 1
    assert made.rebalance(2) == 0


class Machine(RuleBasedStateMachine):
    """Any order of events keeps the books."""

    @initialize(
        capacity=st.integers(4, 40), sessions=st.integers(1, 6), queue=st.integers(1, 5), slots=st.integers(1, 3)
    )
    def begin(self, capacity: int, sessions: int, queue: int, slots: int) -> None:
        self.made = admission(capacity=capacity, sessions=sessions, queue=queue, slots=slots)
        self.limits = capacity, sessions, queue
        self.known: set[int] = set()
        self.serial = 0

    @rule(length=st.integers(1, 100), more=st.integers(0, 100))
    def offer(self, length: int, more: int) -> None:
        self.serial += 1
        try:
            self.made.offer(self.serial, length, length + more)
        except ZrtError as error:
            assert error.kind in ("kv_full", "overloaded")
        else:
            self.known.add(self.serial)

    @rule()
    def admit(self) -> None:
        before = self.made.running
        admitted = self.made.admit()
        assert self.made.running == before + len(admitted)
        if self.made.waiting:
            assert self.made.running > 0

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(sorted(self.known)))
        self.known.discard(session)
        self.made.remove(session)

    @rule()
    def preempt(self) -> None:
        session = self.made.youngest(self.known)
        if session is not None:
            self.made.preempt(session)
            assert self.made.place(session) == (0, self.made.waiting)

    @invariant()
    def books_are_right(self) -> None:
        if not hasattr(self, "made"):
            return
        assert self.made.running + self.made.waiting == len(self.known)
        assert self.made.running <= self.limits[1]
        assert sum(self.made._populations) == self.made.running
        assert min(self.made._populations) >= 0


TestMachine = Machine.TestCase


@given(st.lists(st.integers(1, 300), min_size=2, max_size=12))
def test_rebalancing_everybody_leaves_slots_even(removed: list[int]) -> None:
    made = admission(capacity=10_000, sessions=64, queue=64, slots=3)
    for session in range(24):
        made.offer(session, HEADROOM, HEADROOM)
    made.admit()
    left = set(range(24)) - {number % 24 for number in removed}
    for session in set(range(24)) - left:
        made.remove(session)
    for session in sorted(left):
        made.rebalance(session)
    assert max(made._populations) - min(made._populations) <= 1
