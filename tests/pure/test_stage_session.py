"""Where a stage's results go, and how far a ring runs on its credit."""

import pytest

from zrt.actors.block_server.stage_session import StageSession
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.control import Address
from zrt.runtime.messages.header import HopTime, Step
from zrt.runtime.messages.sessions import Open

ROUTE = [Address(f"s{i}", i, f"tcp://127.0.0.1:{i}") for i in range(3)]


def stage(index: int, *, length: int = 4, credit: int = 6, max_length: int = 100) -> StageSession:
    return StageSession.opened(Open(7, 2, 0, index, ROUTE, length, eos=[99], max_length=max_length, credit=credit))


def test_results_go_to_the_next_stage_and_the_last_closes_the_ring() -> None:
    assert [stage(i).next.name for i in range(3)] == ["s1", "s2", "s0"]
    assert [stage(i).is_last for i in range(3)] == [False, False, True]


def test_a_replay_ends_where_it_was_meant_to() -> None:
    assert [stage(i).ends(1) for i in range(3)] == [False, True, True]
    assert [stage(i).ends(-1) for i in range(3)] == [False, False, True]


@pytest.mark.parametrize(
    ("index", "seq_pos", "n", "until", "samples"),
    [(2, 0, 4, -1, True), (2, 0, 3, -1, False), (2, 3, 1, -1, True), (2, 0, 4, 2, False), (1, 0, 4, -1, False)],
)
def test_the_last_stage_samples_at_the_end_of_the_history(
    index: int, seq_pos: int, n: int, until: int, samples: bool
) -> None:
    assert stage(index).samples(seq_pos, n, until) is samples


def test_the_ring_stops_without_credit_and_goes_on_with_more() -> None:
    last = stage(2, length=4, credit=6)
    assert last.sampled(11) == Step(7, 2, 4, 1)
    assert last.sampled(12) is None
    assert last.grant(6, 0) is None
    assert last.grant(8, 0) == (12, Step(7, 2, 5, 1))
    assert last.grant(9, 0) is None
    assert last.sampled(13) == Step(7, 2, 6, 1)


@pytest.mark.parametrize(("token", "max_length"), [(99, 100), (11, 5)])
def test_the_ring_ends_at_an_end_token_and_at_the_limit(token: int, max_length: int) -> None:
    last = stage(2, credit=50, max_length=max_length)
    assert last.sampled(token) is None
    assert last.grant(80, 0) is None


def test_a_step_may_begin_before_its_token_is_known() -> None:
    last = stage(2, length=4, credit=7)
    assert last.begin_next() == Step(7, 2, 4, 1)
    assert last.begin_next() is None  # once
    assert last.sampled(11) is None  # it is on its way
    assert last.begin_next() == Step(7, 2, 5, 1)
    assert last.sampled(12) is None
    assert last.begin_next() is None  # no credit
    assert last.sampled(13) is None
    assert last.grant(9, 0) == (13, Step(7, 2, 6, 1))
    assert not last.over


def test_a_step_begun_after_the_end_is_dropped() -> None:
    last = stage(2, credit=50)
    assert last.begin_next() is not None
    assert last.sampled(99) is None
    assert last.over
    assert last.begin_next() is None


def test_a_step_begun_after_a_token_that_could_not_be_picked_is_dropped() -> None:
    last = stage(2, credit=50)
    last.failed()
    assert not last.over
    assert last.begin_next() is not None
    last.failed()
    assert last.over


def test_no_step_begins_beyond_the_limit() -> None:
    assert stage(2, length=4, credit=50, max_length=5).begin_next() is None
    assert stage(2, length=4, credit=50, max_length=6).begin_next() is not None


def test_a_step_goes_on_with_its_times() -> None:
    step = Step(7, 2, 0, 10, 1, -1, [HopTime(1, 2)])
    assert stage(1).onward(step, 5, 3, HopTime(3, 4)) == Step(7, 2, 5, 3, 1, -1, [HopTime(1, 2), HopTime(3, 4)])
    assert step.times == [HopTime(1, 2)]


@pytest.mark.parametrize(
    "message",
    [
        Open(1, 1, 0, 3, ROUTE, 4),
        Open(1, 1, 0, -1, ROUTE, 4),
        Open(1, 1, 0, 0, ROUTE, 0),
        Open(1, 1, 0, 2, ROUTE, 4, tokens=[5, 6, 7]),
    ],
)
def test_an_open_that_makes_no_sense_is_refused(message: Open) -> None:
    with pytest.raises(ZrtError) as caught:
        StageSession.opened(message)
    assert caught.value.kind == "bad_request"
