"""The partition of a model: which stage holds which blocks. Pure: numbers in, block ranges out."""

import re
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from zrt.runtime.errors import ZrtError
from zrt.runtime.formatting import block_range, counted

_RANGE: Final = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)


class Blocks(msgspec.Struct, frozen=True):
    """A range of decoder layers by global index, both ends included. Raises ValueError if it is
    empty."""

    first: int
    last: int

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.last:
            raise ValueError(f"blocks {self} end before they begin")

    @classmethod
    def parse(cls, text: str) -> "Blocks":
        """Return the blocks in "0-14", or "7" for one block. Raises ValueError."""
        match = _RANGE.fullmatch(text)
        if match is None:
            raise ValueError(f'{text!r} is no block range; write FIRST-LAST, both included, such as "0-14"')
        return cls(int(match[1]), int(match[2] or match[1]))

    @property
    def numbers(self) -> range:
        """Every block of the range."""
        return range(self.first, self.last + 1)

    def __len__(self) -> int:
        return self.last - self.first + 1

    def __str__(self) -> str:
        return block_range(self.first, self.last)


class Wish(msgspec.Struct, frozen=True):
    """What is asked for one stage: the blocks it is pinned to, else its weight relative to the
    other planned stages.

    `room` is the bytes that the stage can hold; None is any number.
    """

    blocks: Blocks | None = None
    weight: float = 1.0
    room: int | None = None


def plan(block_bytes: Sequence[int], embedding_bytes: int, head_bytes: int, stages: Sequence[Wish]) -> list[Blocks]:
    """Return the blocks of each stage, in pipeline order: every stage at least one, every block
    exactly once.

    `block_bytes` holds the size of each block. The first stage also carries the embedding, the last
    one norm and head. Pinned ranges stay as they are. Each run of planned stages shares the blocks
    between its pinned neighbours, so that bytes come as near to the weights as whole blocks allow
    (for equal blocks: the method of largest remainders, equal remainders to the earlier stage).
    Above all, as few bytes as possible exceed the stages' rooms: none, if there is any such plan.
    Errors: bad_config, a line for each mistake.
    """
    count = len(block_bytes)
    if not stages:
        raise ZrtError("bad_config", "there is no stage")
    if not all(wish.weight > 0 for wish in stages):
        raise ZrtError("bad_config", f"a stage has a weight that is not above 0: {[wish.weight for wish in stages]}")
    wrong = misfits({number: wish.blocks for number, wish in enumerate(stages, 1)}, count)
    if wrong:
        raise ZrtError("bad_config", "\n".join(wrong))
    planned: list[Blocks] = []
    while len(planned) < len(stages):
        start = planned[-1].last + 1 if planned else 0
        run = stages[len(planned) :]
        free = next((n for n, wish in enumerate(run) if wish.blocks is not None), len(run))
        pinned = run[free].blocks if free < len(run) else None
        if free:
            fixed = [0] * free
            fixed[0] += embedding_bytes if not planned else 0
            fixed[-1] += head_bytes if pinned is None else 0
            sizes = _share(block_bytes[start : count if pinned is None else pinned.first], fixed, run[:free])
            for size in sizes:
                planned.append(Blocks(start, start + size - 1))
                start += size
        if pinned is not None:
            planned.append(pinned)
    return planned


def misfits(stages: Mapping[int, Blocks | None], count: int | None = None) -> list[str]:
    """Return what no plan can mend, a line each.

    `stages` are by their number, from 1 on, with the blocks they are pinned to or None where those
    are to be planned; `count` is the model's number of blocks, None before it is known. What
    depends on a number that is left out is not checked.
    """
    wrong = []
    far: tuple[int, Blocks] | None = None  # the pinned stage so far whose blocks reach furthest
    free: int | None = 0  # planned stages since the last pinned stage; None: not known
    last = 0
    for number, blocks in stages.items():
        if number > last + 1:
            free = None
        last = number
        if blocks is None:
            free = None if free is None else free + 1
            continue
        at = f"[[stage]] {number} blocks:"
        if count is not None and blocks.last >= count:
            wrong.append(f"{at} {blocks}, but the model has 0-{count - 1}")
        if far is not None and blocks.first <= far[1].last:
            how = "overlap" if blocks.last >= far[1].first else "come before"
            wrong.append(f"{at} {blocks} {how} {far[1]} of [[stage]] {far[0]}")
        else:
            wrong += _between(at, far[1].last + 1 if far is not None else 0, blocks.first, free, f"before {blocks}")
        if far is None or blocks.last > far[1].last:
            far = number, blocks
        free = 0
    if count is not None and len(stages) > count:
        wrong.append(f"{counted(len(stages), 'stage')} for {counted(count, 'block')}: every stage needs at least one")
    elif count is not None and far is not None and far[1].last < count:
        wrong += _between(f"[[stage]] {far[0]} blocks:", far[1].last + 1, count, free, f"after {far[1]}")
    return wrong


def _between(at: str, start: int, end: int, free: int | None, place: str) -> list[str]:
    """Return what is wrong with `free` planned stages for blocks start..end-1."""
    if free == 0 and end > start:
        return [f"{at} blocks {start}-{end - 1} {place} belong to no stage"]
    if free and free > end - start:
        room, planned = counted(end - start, "block"), counted(free, "planned stage")
        return [f"{at} room of {room} {place} for {planned}: one each is needed"]
    return []


def _share(block_bytes: Sequence[int], fixed: Sequence[int], wishes: Sequence[Wish]) -> list[int]:
    """Return how many of the blocks each stage gets: of the cuts that exceed the rooms least, the
    one with the least squared distance from the targets. `fixed` are the bytes that each stage
    holds besides blocks."""
    weights = [wish.weight for wish in wishes]
    targets = _targets(sum(block_bytes), sum(block_bytes) / len(block_bytes), fixed, weights)
    ends = [0]
    for size in block_bytes:
        ends.append(ends[-1] + size)
    count, stages = len(block_bytes), len(targets)
    # best[n]: the least cost (excess, distance) of n blocks on the stages so far, and their sizes.
    # Of equal costs the first found stays: fewer blocks for the later stage
    best: dict[int, tuple[tuple[int, int], list[int]]] = {0: ((0, 0), [])}
    for stage, (target, wish) in enumerate(zip(targets, wishes, strict=True)):
        reached: dict[int, tuple[tuple[int, int], list[int]]] = {}
        for end in range(stage + 1, count - stages + stage + 2):
            for start in range(end - 1, stage - 1, -1):
                if start in best:
                    (excess, distance), sizes = best[start]
                    held = ends[end] - ends[start]
                    if wish.room is not None:
                        excess += max(0, held + fixed[stage] - wish.room)
                    cost = (excess, distance + (held - target) ** 2)
                    if end not in reached or cost < reached[end][0]:
                        reached[end] = (cost, [*sizes, end - start])
        best = reached
    return best[count][1]


def _targets(total: int, block: float, fixed: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Return bytes of blocks for each stage so that, with its fixed bytes, the stage holds its
    weight's part of all bytes.

    A stage whose fixed bytes alone leave less than one block gets one, and the others share the
    rest.
    """
    sharing = set(range(len(fixed)))
    while sharing:
        bytes_left = total - block * (len(fixed) - len(sharing)) + sum(fixed[n] for n in sharing)
        level = bytes_left / sum(weights[n] for n in sharing)
        small = {n for n in sharing if level * weights[n] - fixed[n] < block}
        if not small:
            return [round(level * weights[n] - fixed[n] if n in sharing else block) for n in range(len(fixed))]
        sharing -= small
    return [round(block)] * len(fixed)
