"""Blocks over stages: every block once, in order, none without; bytes as even as whole blocks
allow."""

from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zrt.runtime.cluster.partition import Blocks, Wish, misfits, plan
from zrt.runtime.errors import ZrtError

FREE = Wish()


def pinned(text: str) -> Wish:
    return Wish(Blocks.parse(text))


def ranges(count: int, stages: Sequence[Wish], block: int = 100, embedding: int = 0, head: int = 0) -> str:
    return " ".join(map(str, plan([block] * count, embedding, head, stages)))


@pytest.mark.parametrize(
    ("count", "stages", "planned"),
    [
        (30, [FREE], "0-29"),
        (30, [FREE] * 2, "0-14 15-29"),
        (30, [FREE] * 4, "0-7 8-15 16-22 23-29"),
        (4, [FREE] * 4, "0-0 1-1 2-2 3-3"),
        (10, [Wish(weight=3), Wish(weight=1)], "0-7 8-9"),
        (10, [Wish(weight=3), Wish(weight=2)], "0-5 6-9"),
        (10, [Wish(weight=1), Wish(weight=1000)], "0-0 1-9"),
        (30, [pinned("0-19"), FREE], "0-19 20-29"),
        (30, [FREE, pinned("20-29")], "0-19 20-29"),
        (30, [FREE, FREE, pinned("10-11"), FREE, FREE], "0-4 5-9 10-11 12-20 21-29"),
        (30, [pinned("0-9"), pinned("10-29")], "0-9 10-29"),
    ],
)
def test_equal_blocks(count: int, stages: list[Wish], planned: str) -> None:
    assert ranges(count, stages) == planned


@pytest.mark.parametrize(
    ("embedding", "head", "stages", "planned"),
    [
        (400, 0, [FREE] * 2, "0-7 8-19"),
        (0, 400, [FREE] * 2, "0-11 12-19"),
        (800, 800, [FREE] * 3, "0-3 4-15 16-19"),
        (9000, 0, [FREE] * 3, "0-0 1-10 11-19"),
        (9000, 9000, [FREE] * 3, "0-0 1-18 19-19"),
        (400, 0, [pinned("0-1"), FREE, FREE], "0-1 2-10 11-19"),
        (0, 400, [FREE, FREE, pinned("18-19")], "0-8 9-17 18-19"),
    ],
)
def test_embedding_and_head_count(embedding: int, head: int, stages: list[Wish], planned: str) -> None:
    assert ranges(20, stages, 100, embedding, head) == planned


def test_unequal_blocks_are_shared_by_bytes() -> None:
    assert [str(blocks) for blocks in plan([100] * 10 + [300] * 10, 0, 0, [FREE, FREE])] == ["0-12", "13-19"]


@pytest.mark.parametrize(
    ("count", "stages", "says"),
    [
        (2, [FREE] * 3, ["3 stages", "2 blocks"]),
        (30, [], ["no stage"]),
        (30, [pinned("0-30")], ["[[stage]] 1 blocks: 0-30, but the model has 0-29"]),
        (30, [pinned("0-9")], ["[[stage]] 1 blocks: blocks 10-29 after 0-9 belong to no stage"]),
        (30, [pinned("1-29")], ["[[stage]] 1 blocks: blocks 0-0 before 1-29 belong to no stage"]),
        (30, [pinned("0-9"), pinned("12-29")], ["[[stage]] 2 blocks: blocks 10-11 before 12-29 belong to no stage"]),
        (30, [pinned("0-9"), pinned("9-29")], ["[[stage]] 2 blocks: 9-29 overlap 0-9 of [[stage]] 1"]),
        (
            30,
            [pinned("20-29"), pinned("0-19")],
            ["[[stage]] 2 blocks: 0-19 come before 20-29 of [[stage]] 1", "blocks 0-19 before 20-29 belong"],
        ),
        (
            30,
            [pinned("0-9"), FREE, pinned("10-29")],
            ["[[stage]] 3 blocks: room of 0 blocks before 10-29 for 1 planned stage"],
        ),
        (30, [FREE, FREE, pinned("1-29")], ["[[stage]] 3 blocks: room of 1 block before 1-29 for 2 planned stages"]),
        (30, [pinned("0-29"), FREE], ["[[stage]] 1 blocks: room of 0 blocks after 0-29 for 1 planned stage"]),
        (30, [Wish(weight=0.0), FREE], ["weight"]),
    ],
)
def test_what_cannot_be_planned_is_a_bad_config_with_the_numbers(
    count: int, stages: list[Wish], says: list[str]
) -> None:
    with pytest.raises(ZrtError) as raised:
        ranges(count, stages)
    assert raised.value.kind == "bad_config"
    assert [text for text in says if text not in raised.value.message] == []


@pytest.mark.parametrize(
    ("text", "count", "lines"),
    [
        (
            "0-14 16-29 31-40",
            30,
            ["2 blocks: blocks 15-15 before", "3 blocks: 31-40, but", "3 blocks: blocks 30-30 before"],
        ),
        (
            "0-14 10-20 15-35",
            30,
            ["2 blocks: 10-20 overlap 0-14", "3 blocks: 15-35, but", "3 blocks: 15-35 overlap 10-20"],
        ),
        (
            "0-9 2-3 4-29",
            None,
            ["2 blocks: 2-3 overlap 0-9 of [[stage]] 1", "3 blocks: 4-29 overlap 0-9 of [[stage]] 1"],
        ),
        ("0-14 ? 16-29 31-40", None, ["4 blocks: blocks 30-30 before"]),
        ("0-14 - ? 15-29", None, []),
        ("0-14", None, []),
    ],
)
def test_every_misfit_is_told_also_before_the_model_is_known(text: str, count: int | None, lines: list[str]) -> None:
    """- is a stage to be planned, ? one that cannot be read."""
    words = enumerate(text.split(), 1)
    wrong = misfits({n: None if word == "-" else Blocks.parse(word) for n, word in words if word != "?"}, count)
    assert len(wrong) == len(lines)
    for said, line in zip(wrong, lines, strict=True):
        assert said.startswith(f"[[stage]] {line}")


BLOCK = 100


def parts(count: int, fixed: list[int], weights: list[float]) -> list[float]:
    """Bytes of blocks each stage should hold: one level of bytes per weight for all, but a block at
    least, by bisection."""
    low, high = 0.0, (sum(fixed) + count * BLOCK) / min(weights)
    for _ in range(200):
        level = (low + high) / 2
        held = [max(BLOCK, level * weight - own) for own, weight in zip(fixed, weights, strict=True)]
        low, high = (level, high) if sum(held) < count * BLOCK else (low, level)
    return held


@given(
    count=st.integers(6, 60),
    weights=st.lists(st.floats(0.1, 10), min_size=1, max_size=6),
    embedding=st.integers(0, 2000),
    head=st.integers(0, 2000),
)
def test_every_block_once_and_every_stage_within_a_block_of_its_part(
    count: int, weights: list[float], embedding: int, head: int
) -> None:
    planned = plan([BLOCK] * count, embedding, head, [Wish(weight=weight) for weight in weights])
    assert [n for blocks in planned for n in range(blocks.first, blocks.last + 1)] == list(range(count))
    fixed = [0] * len(weights)
    fixed[0] += embedding
    fixed[-1] += head
    for blocks, part in zip(planned, parts(count, fixed, weights), strict=True):
        assert abs(len(blocks) * BLOCK - part) < BLOCK + 1


@given(st.lists(st.integers(1, 9), min_size=3, max_size=9), st.integers(1, 3))
def test_no_other_cut_into_equal_parts_is_better(sizes: list[int], stages: int) -> None:
    block_bytes = [size * stages for size in sizes]  # so that the parts are whole bytes

    def cost(cuts: Sequence[int]) -> int:
        ends = [0, *cuts, len(sizes)]
        return sum((sum(block_bytes[start:end]) - sum(sizes)) ** 2 for start, end in pairwise(ends))

    planned = plan(block_bytes, 0, 0, [FREE] * stages)
    best = min(cost(cuts) for cuts in combinations(range(1, len(sizes)), stages - 1))
    assert cost([blocks.first for blocks in planned[1:]]) == best


@pytest.mark.parametrize(
    ("stages", "planned"),
    [
        ([Wish(room=3000), Wish(room=3000)], "0-9 10-19"),
        ([Wish(room=700), FREE], "0-6 7-19"),
        ([FREE, Wish(room=400)], "0-15 16-19"),
        ([Wish(weight=9, room=1200), Wish(weight=1, room=900)], "0-11 12-19"),
        ([Wish(room=399), Wish(room=500), FREE], "0-2 3-7 8-19"),
        ([pinned("0-4"), Wish(room=500), FREE], "0-4 5-9 10-19"),
        ([Wish(room=50), FREE], "0-0 1-19"),
        ([Wish(weight=9, room=900), Wish(weight=1, room=900)], "0-10 11-19"),
    ],
)
def test_a_stage_is_not_given_more_than_it_has_room_for(stages: list[Wish], planned: str) -> None:
    assert ranges(20, stages) == planned


def test_embedding_and_head_take_room() -> None:
    assert ranges(20, [Wish(room=1000), FREE], 100, embedding=600) == "0-3 4-19"
    assert ranges(20, [FREE, Wish(room=1000)], 100, head=700) == "0-16 17-19"


@given(
    sizes=st.lists(st.integers(1, 9), min_size=3, max_size=9),
    rooms=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    embedding=st.integers(0, 9),
    head=st.integers(0, 9),
)
def test_no_other_cut_exceeds_the_rooms_less(sizes: list[int], rooms: list[int], embedding: int, head: int) -> None:
    def excess(cuts: Sequence[int]) -> int:
        held = [sum(sizes[start:end]) for start, end in pairwise([0, *cuts, len(sizes)])]
        held[0] += embedding
        held[-1] += head
        return sum(max(0, size - room) for size, room in zip(held, rooms, strict=True))

    planned = plan(sizes, embedding, head, [Wish(room=room) for room in rooms])
    least = min(excess(cuts) for cuts in combinations(range(1, len(sizes)), len(rooms) - 1))
    assert excess([blocks.first for blocks in planned[1:]]) == least


@pytest.mark.parametrize(("text", "first", "last"), [("0-14", 0, 14), ("7", 7, 7), ("3-3", 3, 3)])
def test_a_block_range_is_read_and_written(text: str, first: int, last: int) -> None:
    blocks = Blocks.parse(text)
    assert (blocks, len(blocks)) == (Blocks(first, last), last - first + 1)
    assert Blocks.parse(str(blocks)) == blocks


@pytest.mark.parametrize("text", ["", "-", "a-b", "0-", "-3", "5-2", "1-2-3", "0 - 3", "٣-٤"])
def test_what_is_no_block_range_is_said(text: str) -> None:
    with pytest.raises(ValueError, match=r"blocks|range"):
        Blocks.parse(text)
