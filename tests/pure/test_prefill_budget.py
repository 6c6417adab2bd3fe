"""How many prompt tokens a turn carries."""

from hypothesis import example, given
from hypothesis import strategies as st

from zrt.actors.block_server.prefill_budget import LEAST, QUIET_S, SHARED, STRETCH, Crowd, PrefillBudget


def test_nobody_decodes_so_a_prompt_takes_all_it_may() -> None:
    pace = PrefillBudget(512)
    assert pace.budget(0.0) == 512
    pace.observe(1.0, 0, 512, 1.5)
    assert pace.budget(1.0) == 512


def test_while_somebody_decodes_the_measured_costs_decide() -> None:
    pace = PrefillBudget(512)
    pace.observe(1.0, 4, 0, 0.040)
    assert pace.budget(1.0) == LEAST
    pace.observe(1.1, 4, 16, 0.072)  # 2 ms a prompt token
    assert pace.budget(1.1) == (STRETCH - 1) * 20


def test_after_a_while_without_decodes_the_bound_is_lifted() -> None:
    pace = PrefillBudget(512)
    pace.observe(1.0, 4, 0, 0.040)
    assert pace.budget(1.0 + QUIET_S) == LEAST
    assert pace.budget(1.1 + QUIET_S) == 512


def test_while_several_prompts_wait_a_turn_is_short() -> None:
    pace = PrefillBudget(512)
    assert pace.budget(0.0, several=True) == SHARED
    assert PrefillBudget(32).budget(0.0, several=True) == 32
    assert PrefillBudget(2048, 512, 2048).budget(0.0, several=True) == 2048
    pace.observe(1.0, 4, 0, 0.040)
    assert pace.budget(1.0, several=True) == LEAST


@given(st.lists(st.tuples(st.integers(0, 64), st.integers(0, 512), st.floats(0, 10)), max_size=50), st.integers(1, 512))
@example([(0, 2, 2.2e-308), (1, 0, 1.0)], 1)
def test_a_prompt_always_gets_on_and_never_beyond_the_bound(turns: list[tuple[int, int, float]], most: int) -> None:
    pace = PrefillBudget(most)
    for now, turn in enumerate(turns):
        pace.observe(float(now), *turn)
        assert min(LEAST, most) <= pace.budget(float(now)) <= most


def test_slots_that_had_a_turn_lately_are_at_work() -> None:
    crowd = Crowd()
    assert [crowd.observe(0.0, 0), crowd.observe(0.1, 1), crowd.observe(0.2, 0)] == [1, 2, 2]
    assert crowd.observe(0.15 + QUIET_S, 0) == 1
