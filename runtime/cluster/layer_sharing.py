"""The sharing of blocks between a block server and its layer workers. Pure: numbers in, runs of
blocks out.

Blocks run one after the other, and each worker is one hop more, so that runs are as long as can be.
Every holder takes blocks in proportion to its measured speed, at most as many as its memory holds;
what the workers have no room for stays with the block server. The reserves are Cake's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.members import Lend

CUDA_RESERVE: Final = 768 << 20
"""Bytes of a GPU's memory that are left alone; CUDA_SHARE of its memory, if that is more."""
CUDA_SHARE: Final = 0.05
CPU_SHARE: Final = 0.20
"""The part of a machine's memory that is left alone."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A block server or layer worker that can hold `layers` blocks besides the pinned ones; one
    token takes `layer_us` through each block. The block server's own name is empty."""

    name: str
    layers: int
    layer_us: int


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Blocks that workers get: `lends` in the order of their blocks; `lacking` blocks have no
    place, and then there are only the pinned lends."""

    lends: tuple[Lend, ...]
    lacking: int = 0

    def layers(self, worker: str) -> list[int]:
        """Return the blocks of one worker, ascending."""
        return [block for lend in self.lends if lend.worker == worker for block in range(lend.first, lend.last + 1)]


def usable(free: int, total: int, device: str, most: int = 0) -> int:
    """Return the bytes that layers may take of a device with `total` bytes, `free` of them free; at
    most `most`, if that is not 0."""
    reserve = max(CUDA_RESERVE, int(total * CUDA_SHARE)) if device.startswith("cuda") else int(total * CPU_SHARE)
    room = free - reserve
    return max(0, min(room, most) if most else room)


def plan_layers(first: int, last: int, pinned: Sequence[Lend], holders: Sequence[Holder]) -> LayerPlan:
    """Return the plan for blocks first..last: the pinned runs as they are, the others shared out
    over the holders in their order, each holder's blocks together.

    ZrtError bad_config: pinned runs overlap, or are not within the stage.
    """
    pins = sorted(pinned, key=lambda lend: lend.first)
    check_pins(first, last, pins)
    taken = {block: lend.worker for lend in pins for block in range(lend.first, lend.last + 1)}
    free = [block for block in range(first, last + 1) if block not in taken]
    counts = shares(len(free), holders)
    if sum(counts) < len(free):
        return LayerPlan(tuple(pins), len(free) - sum(counts))
    owners = [holder.name for holder, count in zip(holders, counts, strict=True) for _ in range(count)]
    taken |= dict(zip(free, owners, strict=True))
    lends = list(pins)
    for (owner, _), run in groupby(enumerate(free), key=lambda place: (taken[place[1]], place[1] - place[0])):
        blocks = [block for _, block in run]
        if owner:
            lends.append(Lend(owner, blocks[0], blocks[-1]))
    return LayerPlan(tuple(sorted(lends, key=lambda lend: lend.first)))


def check_pins(first: int, last: int, pins: Sequence[Lend]) -> None:
    """Raise ZrtError bad_config unless these runs, ascending, are within first..last and do not
    overlap."""
    before: Lend | None = None
    for lend in pins:
        if lend.first < first or lend.last > last or lend.first > lend.last:
            text = f"blocks {lend.first}-{lend.last} of {lend.worker} are not within the stage's {first}-{last}"
            raise ZrtError("bad_config", text)
        if before is not None and lend.first <= before.last:
            text = f"blocks {before.first}-{before.last} of {before.worker} and {lend.first}-{lend.last} of {lend.worker} overlap"
            raise ZrtError("bad_config", text)
        before = lend


def shares(count: int, holders: Sequence[Holder]) -> list[int]:
    """Return how many of `count` blocks each holder gets: in proportion to its speed, at most what
    it can hold; fewer in all where the holders have too little room.

    Blocks are shared by largest remainders among the holders with room, equal remainders to the
    earlier holder.
    """
    given = [0] * len(holders)
    left = count
    open_to = [index for index, holder in enumerate(holders) if holder.layers]
    while left and open_to:
        speeds = {index: 1 / max(1, holders[index].layer_us) for index in open_to}
        whole = sum(speeds.values())
        wanted = {index: left * speeds[index] / whole for index in open_to}
        full = [index for index in open_to if wanted[index] >= holders[index].layers]
        if full:
            for index in full:
                given[index] = holders[index].layers
                left -= given[index]
                open_to.remove(index)
            continue
        floors = {index: int(wanted[index]) for index in open_to}
        rest = left - sum(floors.values())
        by_remainder = sorted(open_to, key=lambda index: (floors[index] - wanted[index], index))
        for index in open_to:
            given[index] = floors[index] + (index in by_remainder[:rest])
        left = 0
    return given


def ranges(blocks: Sequence[int]) -> str:
    """Return ascending blocks for people: "0-4,7"."""
    parts: list[list[int]] = []
    for block in blocks:
        if parts and parts[-1][1] + 1 == block:
            parts[-1][1] = block
        else:
            parts.append([block, block])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
