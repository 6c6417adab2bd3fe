"""A group over gloo whose other rank is a process that tests may harm."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

import pytest
import torch

from zrt.runtime.compute.collectives.communicator import LOOK_S, Communicator, Rendezvous
from zrt.runtime.errors import ZrtError

T = TypeVar("T")
CPU = torch.device("cpu")
PATIENCE_S = 30.0
PEER = """
import sys, torch
from zrt.runtime.compute.collectives.communicator import join
group = join(sys.argv[1], 1, 2, torch.device("cpu"))
for line in sys.stdin:
    group.sum_of_ones()
"""


@pytest.fixture
def peer() -> Iterator[tuple[Communicator, "subprocess.Popen[str]"]]:
    """The leader's end of a group of two, and the other's process: it joins in one operation for
    every line it reads."""
    rendezvous = Rendezvous(CPU)
    process = subprocess.Popen([sys.executable, "-c", PEER, rendezvous.comm_id], stdin=subprocess.PIPE, text=True)
    try:
        yield beside(lambda: rendezvous.join(2)).result(PATIENCE_S), process
    finally:
        process.kill()
        process.wait(PATIENCE_S)


def beside(work: Callable[[], T]) -> "Future[T]":
    """Run it in a thread of its own, as a executor does."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def ask(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def waiting_in_gloo() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "gloo"]


def test_a_rank_that_waits_for_long_gets_its_result_and_leaves_once_its_group_is_aborted(peer) -> None:
    """However often it looked meanwhile whether it is; and though its peer lives, so that gloo
    itself still waits."""
    group, process = peer
    waits = beside(group.sum_of_ones)
    with pytest.raises(TimeoutError):
        waits.result(2.4 * LOOK_S)
    ask(process)
    assert waits.result(PATIENCE_S) == 2
    assert not waiting_in_gloo()

    waits = beside(group.sum_of_ones)
    with pytest.raises(TimeoutError):
        waits.result(0.1)
    group.abort()
    with pytest.raises(ZrtError) as left:
        waits.result(PATIENCE_S)
    assert left.value.kind == "rank_failed"
    assert "aborted" in left.value.message
    (holder,) = waiting_in_gloo()
    process.kill()
    holder.join(PATIENCE_S)
    assert not holder.is_alive()


def test_a_rank_leaves_a_group_that_nobody_joins_once_its_rendezvous_closes() -> None:
    rendezvous = Rendezvous(CPU)
    waits = beside(lambda: rendezvous.join(2))
    with pytest.raises(TimeoutError):
        waits.result(0.1)
    rendezvous.close()
    with pytest.raises(ZrtError) as left:
        waits.result(PATIENCE_S)
    assert left.value.kind == "nccl_init_failed"
