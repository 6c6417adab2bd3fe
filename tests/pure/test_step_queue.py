"""Which waiting steps make a turn."""

from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from zrt.actors.block_server.step_queue import OVERDUE, ROUND_S, SHORT, StepQueue, Waiting

OWNER: Any = object()
"""The queue asks nothing of it."""


def step(key: int, seq_pos: int, n: int, slot: int = 0, arrived: float = 0.0) -> Waiting:
    return Waiting(key, seq_pos, n, list(range(seq_pos, seq_pos + n)), arrived, slot, OWNER)


def taken(queue: StepQueue, budget: int, now: float = 0.0) -> list[tuple[object, int, int]]:
    return [(s.key, s.seq_pos, s.n) for s in queue.take(budget, now)]


def test_decodes_go_before_prompts_and_cost_no_budget() -> None:
    queue = StepQueue()
    for waiting in (step(1, 0, 10), step(2, 5, 1), step(3, 7, 1)):
        queue.add(waiting)
    assert taken(queue, 6) == [(2, 5, 1), (3, 7, 1), (1, 0, 6)]
    assert taken(queue, 6) == [(1, 6, 4)]
    assert taken(queue, 6) == []


def test_one_step_a_session_in_its_own_order() -> None:
    queue = StepQueue()
    queue.add(step(1, 0, 3))
    queue.add(step(1, 3, 1))
    assert taken(queue, 8) == [(1, 0, 3)]
    assert taken(queue, 8) == [(1, 3, 1)]


def test_a_long_prompt_does_not_starve_another() -> None:
    queue = StepQueue()
    queue.add(step(1, 0, 100))
    queue.add(step(2, 0, 100))
    assert taken(queue, 10) == [(1, 0, 10)]
    assert taken(queue, 10) == [(2, 0, 10)]
    assert taken(queue, 10) == [(1, 10, 10)]


def test_a_short_prompt_waits_for_no_long_one_and_takes_half_of_a_turn_from_them() -> None:
    queue = StepQueue()
    for key in range(40):
        queue.add(step(key, 0, 10 * SHORT))
    for key in range(40, 44):
        queue.add(step(key, 0, 36))
    assert taken(queue, 100) == [(40, 0, 36), (41, 0, 14), (0, 0, 50)]
    assert taken(queue, 100) == [(42, 0, 36), (43, 0, 14), (1, 0, 50)]
    assert taken(queue, 100) == [(41, 14, 22), (43, 14, 22), (2, 0, 56)]
    assert taken(queue, 1) == [(3, 0, 1)]


def test_short_prompts_alone_have_the_whole_turn() -> None:
    queue = StepQueue()
    for key in range(3):
        queue.add(step(key, 0, 40))
    queue.add(step(3, 0, SHORT + 1))
    assert taken(queue, 300) == [(0, 0, 40), (1, 0, 40), (2, 0, 40), (3, 0, SHORT + 1)]
    for key in range(3):
        queue.add(step(key, 0, 40))
    assert taken(queue, 100) == [(0, 0, 40), (1, 0, 40), (2, 0, 20)]


@dataclass(frozen=True, slots=True)
class OfLong(Waiting):
    """A step of a long prompt, which came in pieces."""

    @property
    def left(self) -> int:
        return 10 * SHORT


def test_a_piece_of_a_long_prompt_is_not_short() -> None:
    queue = StepQueue()
    for key in range(9):
        queue.add(OfLong(key, 0, 16, list(range(16)), 0.0, 0, OWNER))
    queue.add(step(9, 0, 36))
    assert taken(queue, 72) == [(9, 0, 36), (0, 0, 16), (1, 0, 16), (2, 0, 4)]


def test_a_slot_of_long_prompts_lets_a_short_one_go_first_and_is_passed_over_once_at_a_time() -> None:
    queue = StepQueue()
    for slot in range(2):
        queue.add(step(slot, 0, 100 * SHORT, slot=slot))
    assert queue.several_prompts
    assert [taken(queue, 8) for _ in range(3)] == [[(0, 0, 8)], [(1, 0, 8)], [(0, 8, 8)]]
    for key in range(2, 5):
        queue.add(step(key, 0, 4, slot=0))
    assert [taken(queue, 8) for _ in range(5)] == [
        [(2, 0, 4), (0, 16, 4)],
        [(1, 8, 8)],
        [(3, 0, 4), (0, 20, 4)],
        [(4, 0, 4), (0, 24, 4)],
        [(1, 16, 8)],
    ]


def test_slots_take_turns() -> None:
    queue = StepQueue()
    for key in range(4):
        queue.add(step(key, 0, 1, slot=key % 2))
        queue.add(step(key, 1, 1, slot=key % 2))
    assert [taken(queue, 8) for _ in range(5)] == [
        [(0, 0, 1), (2, 0, 1)],
        [(1, 0, 1), (3, 0, 1)],
        [(0, 1, 1), (2, 1, 1)],
        [(1, 1, 1), (3, 1, 1)],
        [],
    ]


def test_a_step_put_back_goes_before_its_sessions_others() -> None:
    queue = StepQueue()
    queue.add(step(1, 0, 1))
    queue.add(step(1, 1, 1))
    (first,) = queue.take(8, 0.0)
    queue.put_back(first)
    assert taken(queue, 8) == [(1, 0, 1)]


def test_drop_forgets_a_session_alone() -> None:
    queue = StepQueue()
    queue.add(step(1, 0, 4))
    queue.add(step(1, 4, 1))
    queue.add(step(2, 0, 4))
    assert len(queue.drop(1)) == 2
    assert queue.drop(1) == []
    assert len(queue) == 1
    assert taken(queue, 8) == [(2, 0, 4)]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), max_size=30), st.integers(1, 50), st.integers(1, 3))
def test_every_token_runs_once_in_order_within_the_budget(
    steps: list[tuple[int, int]], budget: int, slots: int
) -> None:
    queue = StepQueue()
    ends: dict[int, int] = {}
    for key, n in steps:
        queue.add(step(key, ends.get(key, 0), n, key % slots))
        ends[key] = ends.get(key, 0) + n
    ran: dict[object, int] = dict.fromkeys(ends, 0)
    served: list[int] = []
    for _ in range(sum(ends.values()) + 1):
        turn = queue.take(budget, 0.0)
        if not turn:
            break
        assert sum(s.n for s in turn if s.n > 1) <= budget
        assert len({s.key for s in turn}) == len(turn)
        assert len({s.slot for s in turn}) == 1
        served.append(turn[0].slot)
        for s in turn:
            assert s.seq_pos == ran[s.key]
            assert s.rows == list(range(s.seq_pos, s.seq_pos + s.n))
            ran[s.key] += s.n
    assert ran == ends
    assert len(queue) == 0


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40))
def test_no_slot_is_served_twice_while_another_waits(slots: list[int]) -> None:
    queue = StepQueue()
    for key, slot in enumerate(slots):
        queue.add(step(key, 0, 40, slot))
    last = None
    while turn := queue.take(7, 0.0):
        waiting = {s.slot for s in queue}
        if turn[0].slot == last:
            assert waiting <= {last}
        last = turn[0].slot


def test_a_slot_waits_for_those_of_its_sessions_that_are_on_their_way() -> None:
    queue = StepQueue()
    queue.expect(1, 0, now=0.0)
    queue.expect(2, 0, now=0.0)
    queue.add(step(1, 5, 1, arrived=0.01))
    queue.add(step(9, 0, 4, slot=1, arrived=0.01))
    assert taken(queue, 8, now=0.02) == [(9, 0, 4)]  # another slot does not wait with it
    assert taken(queue, 8, now=0.02) == []
    assert queue.due() is not None
    queue.add(step(2, 5, 1, arrived=0.03))
    assert queue.due() is None
    assert taken(queue, 8, now=0.03) == [(1, 5, 1), (2, 5, 1)]


def test_it_waits_no_longer_than_a_few_rounds_and_once() -> None:
    queue = StepQueue()
    queue.expect(2, 0, now=1.0)
    queue.add(step(1, 5, 1, arrived=1.0))
    due = queue.due()
    assert due == 1.0 + OVERDUE * ROUND_S
    assert taken(queue, 8, now=due - 0.001) == []
    assert taken(queue, 8, now=due) == [(1, 5, 1)]
    queue.add(step(1, 6, 1, arrived=due))
    assert taken(queue, 8, now=due) == [(1, 6, 1)]


def test_a_session_that_is_over_is_not_waited_for() -> None:
    queue = StepQueue()
    queue.expect(2, 0, now=0.0)
    queue.add(step(1, 5, 1))
    queue.drop(2)
    assert taken(queue, 8) == [(1, 5, 1)]


def test_how_long_a_round_takes_is_learned() -> None:
    queue = StepQueue()
    for n in range(60):
        queue.expect(1, 0, now=float(n))
        queue.add(step(1, n, 1, arrived=n + 0.2))
        assert taken(queue, 8, now=n + 0.2) == [(1, n, 1)]
    queue.expect(1, 0, now=100.0)
    queue.add(step(2, 0, 1, arrived=100.0))
    due = queue.due()
    assert due is not None
    assert abs(due - 100.0 - OVERDUE * 0.2) < 0.01


def test_the_parts_of_a_cut_step_keep_their_owner_and_what_it_knows_of_them() -> None:
    @dataclass(frozen=True, slots=True)
    class Noted(Waiting):
        note: list[str]

    queue, note = StepQueue(), ["one request"]
    queue.add(Noted(1, 0, 10, list(range(10)), 0.0, 0, OWNER, note))
    (head,), (tail,) = queue.take(6, 0.0), queue.take(6, 0.0)
    for part, rows in ((head, list(range(6))), (tail, list(range(6, 10)))):
        assert isinstance(part, Noted)
        assert part.note is note
        assert part.owner is OWNER
        assert (part.rows, part.n) == (rows, len(rows))
