"""What a block server plans of its layer workers: whom it waits for, and what each has room for."""

import pytest

from zrt.actors.block_server.layer_lending.lending_plan import (
    FIRST_S,
    GRACE_S,
    BlockBytes,
    OwnMemory,
    grace_s,
    holders_of,
    pinned_shortage,
    share_out,
)
from zrt.runtime.cluster.layer_sharing import Holder, LayerPlan
from zrt.runtime.cluster.memory import BLOCK_SERVER_BYTES
from zrt.runtime.messages.layers import LayersPrepared
from zrt.runtime.messages.members import Assignment, Lend

GIB = 1 << 30
SIZES = BlockBytes(GIB, GIB // 2)


def assignment(*, lend: list[Lend] | None = None, helped: bool = True) -> Assignment:
    return Assignment(1, "model", "random", 0, 9, 10, "float32", GIB, 64, 2, 16, 60.0, lend=lend or [], helped=helped)


def own(*, device: str = "cpu", free: int = 8, memory: int = 0) -> OwnMemory:
    return OwnMemory("here", device, free * GIB, 16 * GIB, GIB, memory, 0.5, 10)


def worker(host: str, *, free: int = 64, most: int = 0) -> LayersPrepared:
    return LayersPrepared(free * GIB, 64 * GIB, most, 20, "cpu", host)


@pytest.mark.parametrize(
    ("there", "awaited", "had", "no_use", "seconds"),
    [
        ("", "", "", "", FIRST_S),
        ("a", "", "", "", 0.0),
        ("a", "b", "", "", GRACE_S),
        ("", "", "b", "", GRACE_S),
        ("a", "", "b", "", 0.0),  # a takes the place of b
        ("a", "", "b", "a", GRACE_S),
        ("p", "", "b", "", GRACE_S),  # p has its own blocks
    ],
)
def test_a_stage_waits_for_those_it_had_unless_another_is_spare(
    there: str, awaited: str, had: str, no_use: str, seconds: float
) -> None:
    given = assignment(lend=[Lend("p", 0, 1)])
    assert grace_s(given, set(there), set(awaited), set(had), set(no_use)) == seconds


def test_a_stage_that_takes_no_help_waits_for_nobody_it_could_do_without() -> None:
    assert grace_s(assignment(helped=False), set(), {"a"}, {"b"}, set()) == 0.0


@pytest.mark.parametrize(
    ("mine", "layers"),
    [
        (own(), 6),  # 8 GiB less 1 of ends and half of a turn
        (own(memory=BLOCK_SERVER_BYTES + 4 * GIB), 2),
        (own(memory=BLOCK_SERVER_BYTES), 0),
        (own(device="cuda", free=16), 6),  # half of 16 GiB
        (own(device="cuda", free=4), 2),
    ],
)
def test_what_the_block_server_has_room_for(mine: OwnMemory, layers: int) -> None:
    assert holders_of(mine, {}, SIZES) == [Holder("", layers, 10)]


def test_those_of_one_machine_share_its_memory() -> None:
    helpers = {"near": worker("here", free=24), "far": worker("there", free=24)}
    mine, near, far = holders_of(own(free=24), helpers, SIZES)
    assert mine == Holder("", 10, 10)  # 12 GiB
    assert near.layers < far.layers
    (limited,) = holders_of(own(), {"a": worker("there", most=3 * GIB)}, SIZES)[1:]
    assert limited == Holder("a", 2, 20)


def test_pinned_blocks_wait_for_a_worker_with_more_memory() -> None:
    pins = [Lend("a", 0, 1), Lend("b", 2, 9), Lend("a", 4, 4)]
    assert pinned_shortage("a", 0, pins, SIZES) == pinned_shortage("a", 4 * GIB, pins, SIZES) == ""
    said = "layer worker a to have 3.5 GiB for the 3 blocks pinned to it: its --memory leaves "
    assert pinned_shortage("a", 3 * GIB, pins, SIZES) == said + "3.0 GiB"
    assert pinned_shortage("a", 1, pins, SIZES) == said + "nothing beside what the process takes"


def test_blocks_without_room_wait_and_say_who_has_how_much() -> None:
    found = share_out(assignment(), [], [Holder("", 3, 1), Holder("a", 4, 1)], ["b: no such dtype"])
    assert found == "layer workers with room for 3 of blocks 0-9 (room: here 3, a 4); not b: no such dtype"
    plan = share_out(assignment(), [Lend("p", 7, 9)], [Holder("", 3, 1), Holder("a", 4, 1)], [])
    assert isinstance(plan, LayerPlan)
    assert [(lend.worker, lend.first, lend.last) for lend in plan.lends] == [("a", 3, 6), ("p", 7, 9)]
