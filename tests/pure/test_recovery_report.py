"""What `zrt up` says of what came back."""

import pytest

from zrt.actors.node.recovery_report import Recoveries
from zrt.runtime.messages.client import Cluster
from zrt.runtime.messages.cluster import ActorInfo

PIDS = {"coordinator": 1, "stage0": 11, "stage1": 12, "spare0": 13, "attic": 14}


def seen(*actors: ActorInfo, ready: bool = True) -> Cluster:
    return Cluster(id="", name="test", model="m", ready=ready, context=1, num_blocks=4, actors=list(actors))


def stage(state: str, pid: int = 11, number: int = 0, name: str = "stage0") -> ActorInfo:
    return ActorInfo(name, "block_server", state, pid=pid, stage=number)  # type: ignore[arg-type]


def test_a_stage_is_ready_again_when_its_new_process_is() -> None:
    recoveries = Recoveries()
    recoveries.lost("stage0", 5.0)
    assert recoveries.seen(seen(stage("ready", pid=10)), PIDS, 5.1) == []  # the coordinator has not noticed yet
    assert recoveries.seen(seen(ready=False), PIDS, 5.2) == []
    assert recoveries.seen(seen(stage("loading"), ready=False), PIDS, 7.0) == []
    assert recoveries.seen(seen(stage("ready")), PIDS, 8.4) == ["stage0 is ready again, 3.4 s after it was lost"]
    assert recoveries.seen(seen(stage("ready")), PIDS, 9.0) == []


def test_where_a_spare_takes_over_the_cluster_is_ready_again_and_the_process_the_spare() -> None:
    recoveries = Recoveries()
    recoveries.lost("stage0", 5.0)
    assert recoveries.seen(seen(ready=False), PIDS, 5.2) == []
    assert recoveries.seen(seen(), PIDS, 6.2) == ["test is ready again, after 1.0 s"]
    back = ["stage0 is back, as a spare, 4.0 s after it was lost"]
    assert recoveries.seen(seen(stage("blank", number=-1)), PIDS, 9.0) == back


ATTIC = ActorInfo("attic", "layer_worker", "blank", pid=14)
COORDINATOR = ActorInfo("coordinator", "coordinator", "ready", pid=1)
LOADS, READY = stage("loading"), stage("ready")
OTHER_LOADS, OTHER_READY = stage("loading", 12, 1, "stage1"), stage("ready", 12, 1, "stage1")


@pytest.mark.parametrize(
    ("lost", "then"),
    [
        pytest.param(
            "stage0",
            [
                ([OTHER_LOADS], False, []),
                ([READY, OTHER_LOADS], False, ["stage0 is ready again, 2.0 s after it was lost"]),
                ([READY, OTHER_READY], True, ["test is ready again, after 2.0 s"]),
            ],
            id="another stage, whose ranks were lost, comes after it",
        ),
        pytest.param(
            "stage0",
            [
                ([OTHER_READY], False, []),
                ([stage("blank"), OTHER_READY], False, []),
                ([LOADS, OTHER_READY], False, []),
                ([READY, OTHER_READY], True, ["stage0 is ready again, 4.0 s after it was lost"]),
            ],
            id="it has its blocks, and no state of them yet",
        ),
        pytest.param(
            "stage0",
            [
                ([stage("loading", 13, 0, "spare0")], False, []),
                ([stage("blank", number=-1), stage("loading", 13, 0, "spare0")], False, []),
                (
                    [stage("blank", number=-1), stage("ready", 13, 0, "spare0")],
                    True,
                    ["stage0 is back, as a spare, 3.0 s after it was lost", "test is ready again, after 2.0 s"],
                ),
            ],
            id="a spare takes its place",
        ),
        pytest.param(
            "attic",
            [
                ([LOADS], False, []),
                ([ATTIC, LOADS], False, ["attic is back, 2.0 s after it was lost"]),
                ([ATTIC, READY], True, ["test is ready again, after 2.0 s"]),
            ],
            id="its stage waits for a worker",
        ),
        pytest.param(
            "coordinator",
            [
                ([COORDINATOR], False, ["coordinator is ready again, 1.0 s after it was lost"]),
                ([COORDINATOR, READY], True, []),
            ],
            id="the stages join the next coordinator",
        ),
        pytest.param("", [([LOADS], False, []), ([READY], True, ["test is ready again, after 1.0 s"])], id="ranks"),
    ],
)
def test_who_is_ready_again_is_told_at_once_and_the_cluster_where_that_is_not_all(
    lost: str, then: list[tuple[list[ActorInfo], bool, list[str]]]
) -> None:
    recoveries = Recoveries()
    if lost:
        recoveries.lost(lost, 5.0)
    for seconds, (actors, ready, said) in enumerate(then, 6):
        assert recoveries.seen(seen(*actors, ready=ready), PIDS, float(seconds)) == said
    assert recoveries.seen(seen(ready=False), PIDS, 20.0) == []
    assert recoveries.seen(seen(), PIDS, 21.0) == ["test is ready again, after 1.0 s"]  # nothing of before is left


def test_what_is_not_started_again_or_was_drained_is_not_said_to_be_back() -> None:
    recoveries = Recoveries()
    recoveries.lost("stage0", 5.0)
    recoveries.given_up("stage0")
    assert recoveries.seen(seen(stage("drained"), ready=False), PIDS, 6.0) == []
    assert recoveries.seen(seen(stage("ready")), PIDS, 7.0) == []


def test_why_a_process_cannot_load_is_said_once_and_again_when_it_is_another_reason() -> None:
    recoveries = Recoveries()

    def failed(fault: str) -> Cluster:
        return seen(ActorInfo("stage0", "block_server", "failed", pid=11, stage=0, fault=fault), ready=False)

    recoveries.lost("stage0", 5.0)
    assert recoveries.seen(failed("bad_model: a"), PIDS, 6.0) == ["stage0 is not ready: bad_model: a"]
    assert recoveries.seen(failed("bad_model: a"), PIDS, 7.0) == []
    assert recoveries.seen(failed("bad_model: b"), PIDS, 8.0) == ["stage0 is not ready: bad_model: b"]
    assert recoveries.seen(seen(stage("loading"), ready=False), PIDS, 9.0) == []
    assert recoveries.seen(failed("bad_model: b"), PIDS, 10.0) == ["stage0 is not ready: bad_model: b"]
    assert recoveries.seen(seen(stage("ready")), PIDS, 11.0) == ["stage0 is ready again, 6.0 s after it was lost"]


def test_the_fault_of_a_process_that_is_not_started_again_was_said_when_it_ended() -> None:
    assert Recoveries().seen(seen(stage("failed", pid=0), ready=False), PIDS, 6.0) == []
