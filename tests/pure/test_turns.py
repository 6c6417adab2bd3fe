"""Which waiting steps make a turn."""

from hypothesis import given
from hypothesis import strategies as st
from zrt.runtime.turns import TurnQueue, Waiting


def step(key: int, seq_pos: int, n: int) -> Waiting:
    return Waiting(key, seq_pos, n, list(range(seq_pos, seq_pos + n)), 0.0)


def taken(queue: TurnQueue, budget: int) -> list[tuple[object, int, int]]:
    return [(s.key, s.seq_pos, s.n) for s in queue.take(budget)]


def test_decodes_go_before_prompts() -> None:
    queue = TurnQueue()
    for waiting in (step(1, 0, 10), step(2, 5, 1), step(3, 7, 1)):
        queue.add(waiting)
    assert taken(queue, 8) == [(2, 5, 1), (3, 7, 1), (1, 0, 6)]
    assert taken(queue, 8) == [(1, 6, 4)]
    assert taken(queue, 8) == []


def test_one_step_a_session_in_its_own_order() -> None:
    queue = TurnQueue()
    queue.add(step(1, 0, 3))
    queue.add(step(1, 3, 1))
    assert taken(queue, 8) == [(1, 0, 3)]
    assert taken(queue, 8) == [(1, 3, 1)]


def test_a_long_prompt_does_not_starve_another() -> None:
    queue = TurnQueue()
    queue.add(step(1, 0, 100))
    queue.add(step(2, 0, 100))
    assert taken(queue, 10) == [(1, 0, 10)]
    assert taken(queue, 10) == [(2, 0, 10)]
    assert taken(queue, 10) == [(1, 10, 10)]


def test_drop_forgets_a_session_alone() -> None:
    queue = TurnQueue()
    queue.add(step(1, 0, 4))
    queue.add(step(1, 4, 1))
    queue.add(step(2, 0, 4))
    assert queue.drop(1) == 2
    assert queue.drop(1) == 0
    assert len(queue) == 1
    assert queue.drop(2, unless=lambda waiting: waiting.seq_pos == 0) == 0
    assert taken(queue, 8) == [(2, 0, 4)]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), max_size=30), st.integers(1, 50))
def test_every_token_runs_once_in_order_within_the_budget(steps: list[tuple[int, int]], budget: int) -> None:
    queue = TurnQueue()
    ends: dict[int, int] = {}
    for key, n in steps:
        queue.add(step(key, ends.get(key, 0), n))
        ends[key] = ends.get(key, 0) + n
    ran: dict[object, int] = dict.fromkeys(ends, 0)
    for _ in range(sum(ends.values()) + 1):
        turn = queue.take(budget)
        if not turn:
            break
        assert sum(s.n for s in turn) <= budget
        assert len({s.key for s in turn}) == len(turn)
        for s in turn:
            assert s.seq_pos == ran[s.key]
            assert s.rows == list(range(s.seq_pos, s.seq_pos + s.n))
            ran[s.key] += s.n
    assert ran == ends
    assert len(queue) == 0
