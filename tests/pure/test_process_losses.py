"""What `zrt up` makes of a process that is not started again, and of one that it did not start."""

import logging

import pytest

from zrt.actors.node.node import Node
from zrt.actors.node.process_losses import final_loss
from zrt.actors.options import ClusterOptions
from zrt.runtime.actor.envelope import Envelope
from zrt.runtime.cluster.file_loader import parse
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.control import Done
from zrt.runtime.messages.header import PROTOCOL, Header
from zrt.runtime.messages.members import Kill
from zrt.runtime.process.supervisor import Child, ChildObserver, RestartPolicy, Supervisor

CONF = parse('[model]\nref = "m"\n[[stage]]\nbackend = "layers"\n[[worker]]\nname = "attic"\n', "test")


@pytest.mark.parametrize(
    ("name", "kind"), [("attic", "worker_failed"), ("stage0", "stage_lost"), ("coordinator", "coordinator_lost")]
)
async def test_a_loss_is_of_the_kind_that_clients_get(name: str, kind: str) -> None:
    child = Child(Supervisor(ChildObserver()), name, [], {}, 1.0, RestartPolicy())
    child.restarts = 1
    error = final_loss(child, CONF, f"{name} is gone; its last words:\nah", f"{name} is gone")
    assert (error.kind, error.message) == (kind, f"{name} is gone, after 1 restart")


async def test_what_a_process_said_itself_to_be_wrong_is_its_kind() -> None:
    child = Child(Supervisor(ChildObserver()), "attic", [], {}, 1.0, RestartPolicy())
    child.fault = ZrtError("bad_config", "no such device", "attic")
    assert str(final_loss(child, CONF, "attic is gone", "attic is gone")) == str(child.fault)


async def test_whoever_asks_for_a_kill_of_a_stranger_is_refused_and_whoever_tells_of_one_is_no_news(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "zrt")
    parent = Node(CONF, ClusterOptions(), detached=False)
    asked, told = (
        Envelope(Header(PROTOCOL, "coordinator", 1, 2, request=request), Kill("cellar", 7), b"") for request in (5, 0)
    )
    with pytest.raises(ZrtError) as raised:
        parent._on_kill(asked.body, asked)
    assert raised.value.kind == "bad_request"
    assert not caplog.records
    assert parent._on_kill(told.body, told) == Done()
    (record,) = caplog.records
    assert (record.levelname, record.getMessage()) == ("DEBUG", "no Kill: cellar was not started by this `zrt up`")
