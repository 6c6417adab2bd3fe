"""What `zrt up` says of what came back."""

import pytest

from zrt.runtime.messages.client import Cluster
from zrt.runtime.messages.cluster import ActorInfo
from zrt.runtime.recovery import Recoveries

PIDS = {"coordinator": 1, "stage0": 11, "stage1": 12, "spare0": 13, "attic": 14}


def seen(*actors: ActorInfo, ready: bool = True) -> Cluster:
    return Cluster(id="", name="test", model="m", ready=ready, context=1, num_blocks=4, actors=list(actors))


def stage(state: str, pid: int = 11, number: int = 0) -> ActorInfo:
    return ActorInfo("stage0", "block_server", state, pid=pid, stage=number)  # type: ignore[arg-type]


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


@pytest.mark.parametrize(
    ("actor", "said"),
    [
        (ActorInfo("attic", "layer_worker", "ready", pid=14), "attic is back, 2.0 s after it was lost"),
        (
            ActorInfo("coordinator", "coordinator", "ready", pid=1),
            "coordinator is ready again, 2.0 s after it was lost",
        ),
    ],
)
def test_a_worker_and_a_coordinator_are_back_when_all_stages_are_ready(actor: ActorInfo, said: str) -> None:
    recoveries = Recoveries()
    recoveries.lost(actor.name, 5.0)
    assert recoveries.seen(seen(actor, stage("loading"), ready=False), PIDS, 6.0) == []
    assert recoveries.seen(seen(actor, stage("ready")), PIDS, 7.0) == [said]


def test_what_is_not_started_again_or_was_drained_is_not_said_to_be_back() -> None:
    recoveries = Recoveries()
    recoveries.lost("stage0", 5.0)
    recoveries.given_up("stage0")
    assert recoveries.seen(seen(stage("drained"), ready=False), PIDS, 6.0) == []
    assert recoveries.seen(seen(stage("ready")), PIDS, 7.0) == []
