"""Which workers a block server may use."""

import pytest

from zrt.actors.coordinator.fleet.worker_allocation import WorkerAllocation
from zrt.runtime.cluster.file_loader import parse
from zrt.runtime.cluster.seats import Seat
from zrt.runtime.messages.members import Lend

FILE = """
[model]
ref = "m"
[[stage]]
backend = "layers"
[[stage.lend]]
worker = "attic"
blocks = "0-1"
[[stage]]
backend = "layers"
[[worker]]
name = "attic"
[[worker]]
name = "cellar"
"""
FIRST = Seat("stage0", 0, 0, 0, 4, lend=(Lend("attic", 0, 1),), helped=True)
SECOND = Seat("stage1", 1, 0, 5, 9, helped=True)


def given(helping: WorkerAllocation, *there: str, waits: tuple[str, ...] = ()) -> dict[str, list[str]]:
    helping.share_out(there, {"stage0": "stage0" in waits, "stage1": "stage1" in waits})
    return {seat.name: helping.of(seat.name, seat, there)[0] for seat in (FIRST, SECOND)}


def test_a_pinned_worker_is_its_stages_and_the_others_are_shared_out() -> None:
    helping = WorkerAllocation(parse(FILE, ""))
    assert given(helping, "attic", "a", "b", "c") == {"stage0": ["a", "attic", "c"], "stage1": ["b"]}


def test_a_stage_that_waits_comes_first_and_a_worker_stays_where_it_is() -> None:
    helping = WorkerAllocation(parse(FILE, ""))
    assert given(helping, "a", waits=("stage1",)) == {"stage0": [], "stage1": ["a"]}
    assert given(helping, "a", "b", waits=("stage0",)) == {"stage0": ["b"], "stage1": ["a"]}
    assert given(helping, "b") == {"stage0": ["b"], "stage1": []}
    assert given(helping, "a", "b") == {"stage0": ["b"], "stage1": ["a"]}


STAGE = '[model]\nref = "m"\n[[stage]]\n'
LEND = '[[stage.lend]]\nworker = "attic"\nblocks = "0-1"\n[[worker]]\nname = "attic"\n'


@pytest.mark.parametrize(
    ("file", "why"),
    [
        (FILE, ""),
        (STAGE, 'no [[stage]] takes the help of workers: give one backend = "layers", or [[stage.lend]]'),
        (STAGE + LEND, "no [[stage.lend]] names it: they name attic"),
        (STAGE + LEND.replace("attic", "atttic"), ""),
    ],
)
def test_a_worker_that_nothing_can_be_given_to_is_told_apart(file: str, why: str) -> None:
    assert WorkerAllocation(parse(file, "")).useless("atttic") == why


def test_what_an_earlier_coordinator_gave_is_left() -> None:
    helping = WorkerAllocation(parse(FILE, ""))
    helping.came("a", "stage1")
    assert given(helping, "a") == {"stage0": [], "stage1": ["a"]}


def test_workers_of_the_file_are_awaited_until_they_are_lost() -> None:
    helping = WorkerAllocation(parse(FILE, ""))
    assert helping.of("stage0", FIRST, []) == ([], ["attic", "cellar"])
    assert helping.of("stage1", SECOND, []) == ([], ["cellar"])
    helping.lost("attic")
    assert helping.of("stage0", FIRST, []) == ([], ["cellar"])
    helping.came("attic", "")
    assert helping.of("stage0", FIRST, ["attic"]) == (["attic"], ["cellar"])
