"""Blocks over a block server and its layer workers: by speed and memory, pinned runs as they
are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zrt.runtime.cluster.layer_sharing import Holder, plan_layers, ranges, usable
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.members import Lend

MIB, GIB = 1 << 20, 1 << 30


def pins(text: str) -> list[Lend]:
    """ "a 1-3, b 5" """
    found = []
    for part in filter(None, text.split(", ")):
        worker, _, blocks = part.partition(" ")
        first, _, last = blocks.partition("-")
        found.append(Lend(worker, int(first), int(last or first)))
    return found


@pytest.mark.parametrize(
    ("holders", "pinned", "planned"),
    [
        ([("", 99, 10)], "", ""),
        ([("", 99, 10), ("a", 99, 10)], "", "a 5-9"),
        ([("", 99, 10), ("a", 3, 10)], "", "a 7-9"),
        ([("", 2, 10), ("a", 99, 10)], "", "a 2-9"),
        ([("", 0, 10), ("a", 99, 10)], "", "a 0-9"),
        ([("", 0, 10), ("a", 5, 10), ("b", 5, 10)], "", "a 0-4, b 5-9"),
        ([("", 99, 30), ("a", 99, 10)], "", "a 3-9"),
        ([("", 99, 10), ("a", 99, 30)], "", "a 8-9"),
        ([("", 99, 10), ("a", 1, 1), ("b", 99, 10)], "", "a 5, b 6-9"),
        ([("", 99, 10), ("a", 99, 10)], "p 0-1, p 2, q 9", "p 0-1, p 2, a 6-8, q 9"),
        ([("", 3, 10), ("a", 99, 10)], "p 4-5", "a 3, p 4-5, a 6-9"),
        ([("", 0, 10)], "p 0-9", "p 0-9"),
    ],
)
def test_blocks_go_by_speed_as_far_as_memory_reaches(
    holders: list[tuple[str, int, int]], pinned: str, planned: str
) -> None:
    plan = plan_layers(0, 9, pins(pinned), [Holder(*holder) for holder in holders])
    assert plan.lends == tuple(pins(planned))
    assert plan.lacking == 0


@pytest.mark.parametrize(
    ("holders", "lacking"), [([("", 2, 10), ("a", 3, 10)], 5), ([], 10), ([("", 9, 1), ("a", 0, 1)], 1)]
)
def test_what_has_no_place_is_counted(holders: list[tuple[str, int, int]], lacking: int) -> None:
    plan = plan_layers(0, 9, [], [Holder(*holder) for holder in holders])
    assert (plan.lends, plan.lacking) == ((), lacking)


@pytest.mark.parametrize(
    ("pinned", "said"),
    [
        ("a 2-5, b 5-7", "blocks 2-5 of a and 5-7 of b overlap"),
        ("a 2-5, a 3", "blocks 2-5 of a and 3-3 of a overlap"),
        ("a 8-10", "blocks 8-10 of a are not within the stage's 1-9"),
        ("a 0-2", "blocks 0-2 of a are not within the stage's 1-9"),
    ],
)
def test_pinned_runs_that_cannot_be_are_refused_with_both_named(pinned: str, said: str) -> None:
    with pytest.raises(ZrtError, match="bad_config") as raised:
        plan_layers(1, 9, pins(pinned), [Holder("", 99, 1)])
    assert said in raised.value.message


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 1000)), min_size=1, max_size=5),
    st.sets(st.integers(0, 9), max_size=6),
)
def test_every_block_has_one_place_and_nobody_more_than_fits(rooms: list[tuple[int, int]], taken: set[int]) -> None:
    holders = [Holder("" if not number else f"w{number}", *room) for number, room in enumerate(rooms)]
    pinned = [Lend("p", block, block) for block in sorted(taken)]
    plan = plan_layers(0, 9, pinned, holders)
    assert plan.lacking == max(0, 10 - len(taken) - sum(layers for layers, _ in rooms))
    if plan.lacking:
        return
    blocks = [block for lend in plan.lends for block in range(lend.first, lend.last + 1)]
    assert blocks == sorted(set(blocks))
    assert plan.layers("p") == sorted(taken)
    for holder in holders[1:]:
        assert len(plan.layers(holder.name)) <= holder.layers
    assert 10 - len(blocks) <= rooms[0][0]


@pytest.mark.parametrize(
    ("free", "total", "device", "most", "left"),
    [
        (10 * GIB, 10 * GIB, "cpu", 0, 8 * GIB),
        (1 * GIB, 10 * GIB, "cpu", 0, 0),
        (10 * GIB, 10 * GIB, "cpu", 3 * GIB, 3 * GIB),
        (10 * GIB, 10 * GIB, "cuda:0", 0, 10 * GIB - 768 * MIB),
        (70 * GIB, 80 * GIB, "cuda:1", 0, 66 * GIB),
    ],
)
def test_a_reserve_is_left_alone(free: int, total: int, device: str, most: int, left: int) -> None:
    assert usable(free, total, device, most) == left


def test_blocks_in_words() -> None:
    assert ranges([]) == ""
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
