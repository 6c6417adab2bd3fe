"""How many threads a turn runs on, by simulated machines: seconds by the number of threads, which
the choice is told of and nothing else."""

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from zrt.runtime.compute.thread_tuner import ThreadTuner

Machine = Callable[[int], float]


def run(
    team: ThreadTuner, machine: Machine, seconds: float, *, limit: int = 2, rows: int = 1
) -> tuple[list[int], float]:
    """The threads of each turn within so many seconds, and the mean seconds of a turn."""
    sizes: list[int] = []
    now = 0.0
    while now < seconds:
        sizes.append(team.size(limit, rows))
        took = machine(sizes[-1])
        team.took(took)
        now += took
    return sizes, now / len(sizes)


def quiet(threads: int) -> float:
    """Memory is the limit: a thread more helps less and less."""
    return 0.008 + 0.010 / threads


def beside_one(threads: int) -> float:
    return quiet(1) if threads == 1 else 0.086


@pytest.mark.parametrize("slow", [0.1, 1.0, 10.0, 100.0])
@pytest.mark.parametrize("limit", [2, 16])
def test_a_quiet_machine_uses_all_threads_and_trials_cost_a_hundredth(slow: float, limit: int) -> None:
    """However long a turn is, and from the first turns on."""

    def machine(threads: int) -> float:
        return slow * quiet(threads)

    team = ThreadTuner()
    _, mean = run(team, machine, 50 * machine(limit), limit=limit)
    assert mean < 1.04 * machine(limit)
    sizes, mean = run(team, machine, 5000 * machine(limit), limit=limit)
    assert mean < 1.011 * machine(limit)
    assert limit // 2 in sizes


@pytest.mark.parametrize("slow", [0.1, 1.0, 10.0, 100.0])
def test_trials_of_what_is_far_slower_cost_a_hundredth(slow: float) -> None:
    team = ThreadTuner()
    run(team, beside_one, 5.0)

    def machine(threads: int) -> float:
        return slow * beside_one(threads)

    sizes, mean = run(team, machine, 5000 * machine(1))
    assert 2 in sizes
    assert (2, 2) not in pairwise(sizes)
    assert mean < 1.011 * machine(1)


def test_beside_a_busy_process_one_thread_computes_within_a_second_of_that() -> None:
    team = ThreadTuner()
    run(team, quiet, 10.0)
    sizes, _ = run(team, beside_one, 3.0)
    assert sizes[-1] == 1
    settled = sizes.index(1)
    assert sum(beside_one(size) for size in sizes[:settled]) < 2.5
    _, mean = run(team, beside_one, 60.0)
    assert mean < 1.05 * quiet(1)


def test_all_threads_compute_again_when_the_machine_is_quiet() -> None:
    team = ThreadTuner()
    run(team, beside_one, 30.0)
    sizes, _ = run(team, quiet, 10.0)
    assert sizes[-1] == 2


@pytest.mark.parametrize(("best", "limit"), [(16, 16), (8, 16), (2, 16), (1, 16), (12, 12), (3, 12), (5, 5), (1, 3)])
def test_the_best_number_is_found_by_halves(best: int, limit: int) -> None:
    team = ThreadTuner()
    run(team, lambda threads: 0.010 * (1 + abs(threads - best)), 60.0, limit=limit)
    sizes, mean = run(team, lambda threads: 0.010 * (1 + abs(threads - best)), 20.0, limit=limit)
    assert max(set(sizes), key=sizes.count) == best
    assert mean < 1.3 * 0.010


def test_more_threads_are_found_again_from_the_middle() -> None:
    team = ThreadTuner()
    run(team, lambda threads: 0.010 * (1 + abs(threads - 2)), 60.0, limit=16)
    sizes, _ = run(team, lambda threads: 0.010 * (1 + abs(threads - 8)), 60.0, limit=16)
    assert max(set(sizes[len(sizes) // 2 :]), key=sizes.count) == 8


@pytest.mark.parametrize("seed", range(5))
def test_hiccups_change_nothing(seed: int) -> None:
    """Nor does a first turn that is cold."""
    draw, turns = random.Random(seed), 0

    def machine(threads: int) -> float:
        nonlocal turns
        turns += 1
        return 2.0 if turns == 1 else quiet(threads) + (0.1 if draw.random() < 0.1 else 0.0)

    sizes, _ = run(ThreadTuner(), machine, 60.0)
    assert sizes.count(1) < 0.04 * len(sizes)


def test_a_hiccup_in_a_trial_does_not_end_it() -> None:
    team, trials = ThreadTuner(), 0

    def machine(threads: int) -> float:
        nonlocal trials
        trials += threads == 1
        return 0.150 if trials == 2 and threads == 1 else beside_one(threads)

    sizes, _ = run(team, machine, 2.0)
    assert sizes[8:12] == [1, 1, 1, 1]
    assert set(sizes[12:]) == {1}


def test_turns_that_are_long_and_short_by_turns_are_no_reason() -> None:
    """As those of two groups of sessions are."""
    turns = 0

    def machine(threads: int) -> float:
        nonlocal turns
        turns += 1
        return quiet(threads) * (1.8 if turns % 2 else 1.0)

    sizes, _ = run(ThreadTuner(), machine, 60.0)
    assert sizes.count(1) < 0.03 * len(sizes)


@pytest.mark.parametrize("seed", range(5))
def test_noise_costs_little(seed: int) -> None:
    draw = random.Random(seed)
    _, mean = run(ThreadTuner(), lambda threads: quiet(threads) * draw.uniform(0.9, 1.3), 60.0)
    assert mean < 1.05 * 1.1 * quiet(2)


def test_a_turn_that_is_not_told_of_changes_nothing() -> None:
    told, both = ThreadTuner(), ThreadTuner()
    for _ in range(500):
        size = told.size(2, 1)
        assert both.size(2, 1) == size
        assert both.size(2, 1) == size  # it failed, and took no time to speak of
        told.took(beside_one(size))
        both.took(beside_one(size))


def test_kinds_of_turns_are_apart() -> None:
    team = ThreadTuner()
    run(team, beside_one, 5.0, rows=1)
    assert (team.size(2, 1), team.size(2, 16), team.size(4, 1)) == (1, 2, 4)


def test_one_thread_is_left_alone() -> None:
    sizes, _ = run(ThreadTuner(), beside_one, 30.0, limit=1)
    assert set(sizes) == {1}
