"""Clusters in this process whose block servers lead ranks: real child processes, which tests may
harm."""

import asyncio
import os
import resource
import signal
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import zmq

from support.clusters import Local, local_cluster
from support.peers import raw, until
from zrt.actors.block_server.block_server import BlockServer
from zrt.actors.block_server.tensor_parallel.group import RankGroup
from zrt.actors.block_server.tensor_parallel.group_stats import GroupStats
from zrt.actors.block_server.tensor_parallel.rank_processes import RankProcess
from zrt.runtime.actor.executor import ComputeExecutor
from zrt.runtime.compute.collectives.communicator import WAIT_S
from zrt.runtime.errors import ZrtError

SPLIT = {
    "hidden_size": 96,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "head_dim": 16,
    "intermediate_size": 3072,
}
"""The config of a tiny model that 2, 3 and 6 ranks can hold, and whose prompts need memory."""


@asynccontextmanager
async def ranked(folder: Path, tp: Sequence[int] = (2,), **settings: Any) -> AsyncIterator[Local]:
    """Run a cluster with these ranks in its stages; none of them outlives the block."""
    async with local_cluster(folder, [None] * len(tp), tp=tp, **settings) as cluster:
        children = [child for server in cluster.servers for child in ranks_of(server)]
        yield cluster
        children += [child for server in cluster.servers for child in ranks_of(server)]
    assert not [child for child in children if alive(child)]


def alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


async def alone(folder: Path, prompt: Sequence[int], tokens: int) -> list[int]:
    """Return the greedy ids of the model in one process."""
    async with local_cluster(folder, [None]) as cluster:
        return await cluster.greedy(prompt, tokens)


class GroupBreaks:
    """A group's listener that keeps the errors that broke it."""

    def __init__(self, executor: ComputeExecutor) -> None:
        self.errors: list[ZrtError] = []
        self._executor = executor

    def group_broken(self, error: ZrtError) -> None:
        self.errors.append(error)

    def group_stuck(self) -> None:
        self._executor.close()


def group_of(cluster: Local, stage: int = 0) -> RankGroup:
    group = cluster.servers[stage].blocks.group
    assert group is not None
    return group


def record_of(cluster: Local, stage: int = 0) -> GroupStats:
    record = cluster.servers[stage].blocks.group_stats
    assert record is not None
    return record


def member(cluster: Local, rank: int, stage: int = 0) -> RankProcess:
    return group_of(cluster, stage).processes.members[rank - 1]


def ranks_of(server: BlockServer) -> list[psutil.Process]:
    """Return the processes of a server's ranks that run."""
    group, found = server.blocks.group, []
    for one in group.processes.members if group is not None else ():
        with suppress(psutil.NoSuchProcess):
            found += [psutil.Process(one.child.pid)] if one.child.pid else []
    return found


async def rebuilt(cluster: Local, first: RankGroup, stage: int = 0) -> RankGroup:
    """Wait until another group is at work in the place of `first`, and the coordinator knows."""
    server = cluster.servers[stage]
    await until(lambda: server.blocks.group not in (None, first) and server.state == "ready")
    await server.catch_up()
    return group_of(cluster, stage)


def holdings() -> tuple[Counter[str], int]:
    """Return what this process has open, by kind, and how many children it has."""
    kinds: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            kinds[os.readlink(f"/proc/self/fd/{name}").split(":")[0]] += 1
    return kinds, sum(map(alive, psutil.Process().children(recursive=True)))


async def holds_no_more_than(held: tuple[Counter[str], int]) -> None:
    """Check that this process has no more open than `held`, and no other children, once what was
    under way has had its time to end.

    Where gloo missed the end of a rank, what gloo holds goes when its own timeout ends.
    """
    for thread in threading.enumerate():
        if thread.name == "gloo":
            await asyncio.to_thread(thread.join, WAIT_S + 10)
    with suppress(TimeoutError):
        await until(lambda: holdings() == held)
    now = holdings()
    assert now == held, f"{now}, not {held}"


# ---- what may happen to a rank -------------------------------------------------------------------


def pid_of(rank: RankProcess) -> int:
    """Return the pid of a rank, which must run: to signal number 0 would be to signal this process
    and its whole group."""
    assert rank.child.pid, f"{rank.child.name} does not run"
    return rank.child.pid


def kill(rank: RankProcess) -> None:
    os.kill(pid_of(rank), signal.SIGKILL)


def stop(rank: RankProcess) -> None:
    os.kill(pid_of(rank), signal.SIGSTOP)


def starve(rank: RankProcess) -> None:
    """Let a rank have no more memory than it has: an operation that needs more, in the middle of a
    forward, raises."""
    pid = pid_of(rank)
    with open(f"/proc/{pid}/status") as status:
        kib = next(int(line.split()[1]) for line in status if line.startswith("VmData"))
    resource.prlimit(pid, resource.RLIMIT_DATA, (kib << 10, resource.RLIM_INFINITY))


def unload(rank: RankProcess) -> None:
    """Tell a rank as a stranger to unload: its next step raises, and it does not join the operation
    in which the others wait."""
    with raw(zmq.DEALER) as socket:
        socket.connect(rank.address.endpoint)
        socket.send(b'{"op":"unload_model","model_id":""}')
        assert socket.recv() == b'{"op":"unloaded"}'


FAULTS: dict[str, Callable[[RankProcess], None]] = {
    "killed": kill,
    "stopped": stop,
    "starved": starve,
    "unloaded": unload,
}


async def harm(cluster: Local, fault: str, rank: int, stage: int = 0) -> None:
    """Do a rank harm. That is done at once, so that a rank seen running still runs; only a
    stranger's request goes over a socket."""
    if fault == "unloaded":
        await asyncio.to_thread(unload, member(cluster, rank, stage))
    else:
        FAULTS[fault](member(cluster, rank, stage))
