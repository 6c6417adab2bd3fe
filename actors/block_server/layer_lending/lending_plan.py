"""The plan of which layer worker gets which blocks: who is waited for, what each has room for, and
what is short. Pure: numbers and names in, a plan or what it waits for out.

How the blocks are shared out over those that have room is layer_sharing.py's.
"""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final

from zrt.runtime.cluster.layer_sharing import Holder, LayerPlan, plan_layers, usable
from zrt.runtime.cluster.memory import BLOCK_SERVER_BYTES
from zrt.runtime.formatting import byte_size, counted
from zrt.runtime.messages.layers import LayersPrepared
from zrt.runtime.messages.members import Assignment, Lend

GRACE_S: Final = 5.0
"""How long a stage that could do without waits for workers of the cluster file, and for those it
had."""
FIRST_S: Final = 2.0
"""How long a stage that takes help waits for a first worker."""


@dataclass(frozen=True, slots=True)
class BlockBytes:
    """The bytes of its holder's memory that one `block` takes, with its KV, and those that a `turn`
    takes besides, however many blocks are held."""

    block: int
    turn: int

    def layers(self, room: int) -> int:
        """Return how many blocks `room` bytes hold."""
        return max(0, room - self.turn) // self.block


@dataclass(frozen=True, slots=True)
class OwnMemory:
    """The block server's own `device` on `host`: bytes that are `free` or would be given back, and
    in all; `ends` are those that embedding, norm and head take.

    `memory_bytes` is the most the process may take, 0 for no limit but these; of a GPU `gpu_memory`
    is the part that may be taken. One token takes `layer_us` through a layer.
    """

    host: str
    device: str
    free: int
    total: int
    ends: int
    memory_bytes: int
    gpu_memory: float
    layer_us: int

    def room(self, processes: int) -> int:
        """Return the bytes that blocks may take where so many processes share the device."""
        if self.device != "cpu":
            return min(self.free, int(self.total * self.gpu_memory)) - self.ends
        room = self.free // processes
        if self.memory_bytes:
            room = min(room, self.memory_bytes - BLOCK_SERVER_BYTES)
        return room - self.ends


def grace_s(given: Assignment, there: Set[str], awaited: Set[str], had: Set[str], no_use: Set[str]) -> float:
    """Return the seconds to wait for workers that the stage could do without.

    Names: of the workers that are `there`; those `awaited` by the coordinator; those it `had` in
    its last plan; those that are there and of `no_use`.
    """
    if not given.helped:
        return 0.0
    spare = there - had - no_use - {lend.worker for lend in given.lend}
    if (awaited | had) - there and not (had and spare):
        return GRACE_S
    return 0.0 if there else FIRST_S


def pinned_shortage(worker: str, most_bytes: int, pins: Sequence[Lend], sizes: BlockBytes) -> str:
    """Return what is waited for, where the blocks pinned to a worker are more than `most_bytes` (0:
    no limit) hold; else nothing."""
    count = sum(lend.last - lend.first + 1 for lend in pins if lend.worker == worker)
    needed = count * sizes.block + sizes.turn
    if not most_bytes or needed <= most_bytes:
        return ""
    blocks = counted(count, "block")
    leaves = byte_size(most_bytes) if most_bytes > 1 else "nothing beside what the process takes"
    return (
        f"layer worker {worker} to have {byte_size(needed)} for the {blocks} pinned to it: its --memory leaves {leaves}"
    )


def holders_of(own: OwnMemory, helpers: Mapping[str, LayersPrepared], sizes: BlockBytes) -> list[Holder]:
    """Return the block server and its helpers, by name, with what each has room for. Those of one
    machine share its memory."""
    crowd = Counter([(own.host, own.device), *((has.host, has.device) for has in helpers.values())])
    holders = [Holder("", sizes.layers(own.room(crowd[own.host, own.device])), own.layer_us)]
    for name, has in helpers.items():
        space = usable(has.free_bytes, has.total_bytes, has.device) // crowd[has.host, has.device]
        space = min(space, has.most_bytes) if has.most_bytes else space
        holders.append(Holder(name, sizes.layers(space), has.layer_us))
    return holders


def share_out(
    given: Assignment, pins: Sequence[Lend], holders: Sequence[Holder], refused: Sequence[str]
) -> LayerPlan | str:
    """Return the plan of a stage that takes help; or what it waits for, in words, with why workers
    `refused`. ZrtError bad_config."""
    plan = plan_layers(given.first, given.last, pins, holders)
    if not plan.lacking:
        return plan
    besides = f"; not {'; not '.join(refused)}" if refused else ""
    room = ", ".join(f"{holder.name or 'here'} {holder.layers}" for holder in holders)
    return f"layer workers with room for {plan.lacking} of blocks {given.first}-{given.last} (room: {room}){besides}"
