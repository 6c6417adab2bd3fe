"""A group of two ranks over NCCL: it forms, sums and gathers, and a peer that is killed or stopped in mid-collective frees the leader."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
import torch

from zrt.actors.group_trial import try_group
from zrt.runtime.compute.communicator import Communicator, Rendezvous

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
PEER = """
import sys, torch
from zrt.runtime.compute.communicator import join
group = join(sys.argv[1], 1, 2, torch.device("cuda:1"))
print(group.sum_of_ones(), flush=True)
group.gather(torch.full((3, 4), 1.0, device="cuda:1"))
torch.cuda.synchronize()
print("gathered", flush=True)
sys.stdin.read()
"""
FREE_S = 10.0


@contextmanager
def two() -> Iterator[tuple[Communicator, "subprocess.Popen[str]"]]:
    """Rank 0, and rank 1 as a process that has summed once and then joins nothing."""
    rendezvous = Rendezvous()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    peer = subprocess.Popen([sys.executable, "-c", PEER, rendezvous.comm_id], **pipes)  # type: ignore[call-overload]
    try:
        group = rendezvous.join(2, torch.device("cuda:0"))
        assert group.sum_of_ones() == 2
        assert peer.stdout.readline() == "2\n"
        yield group, peer
    finally:
        peer.kill()
        peer.communicate()


def test_logits_are_gathered_at_the_leader() -> None:
    with two() as (group, peer):
        parts = group.gather(torch.zeros(3, 4, device="cuda:0"))
        assert parts is not None
        assert parts.sum(dim=(1, 2)).tolist() == [0.0, 12.0]
        assert peer.stdout.readline() == "gathered\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_an_aborted_group_frees_whoever_waits_in_it_and_a_new_one_forms(number: int) -> None:
    with two() as (group, peer):
        group.gather(torch.zeros(3, 4, device="cuda:0"))
        assert peer.stdout.readline() == "gathered\n"
        os.kill(peer.pid, number)
        over = threading.Event()

        def wait_for_peer() -> None:
            with suppress(RuntimeError):
                group.sum_of_ones()
            over.set()

        threading.Thread(target=wait_for_peer, daemon=True).start()
        time.sleep(0.5)
        assert not over.is_set()
        peer.kill()
        threading.Thread(target=group.abort, daemon=True).start()
        assert over.wait(FREE_S)
    with two() as (again, _):
        assert again.rank == 0


def test_check_forms_a_group_of_real_ranks() -> None:
    assert try_group(2, "cuda:0") is None
