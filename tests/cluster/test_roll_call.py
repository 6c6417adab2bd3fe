"""Processes that hang while there is no coordinator: the next one has never heard of them, so `zrt
up` finds them."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing, suppress
from pathlib import Path

import psutil
import pytest
from support.clusters import cluster_file
from support.running import GREEDY, Running, gone, running

from zrt.actors.node.absentees import ABSENT, ASK_S
from zrt.runtime.client.client import Client
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.client import Cluster

KILLED_S = ABSENT * ASK_S + 10.0
"""The next coordinator starts, nobody joins it for so long; and a loaded machine."""
BACK_S = 30.0
FAMILY = {"stage0", "stage1", "attic"}


def conf_file(model: Path, home: Path) -> str:
    """Two stages, the first of which lends a block to a worker that `zrt up` starts as well."""
    text = cluster_file(model, ["0-1", "2-3"], lend={"attic": ["1"]})
    file = home / "cluster.toml"
    file.write_text(text.replace("join = true", "threads = 1"))
    return str(file)


async def until(cluster: Running, wanted: Callable[[Cluster], bool]) -> Cluster:
    """What the coordinator says as soon as it says so, whichever coordinator it is."""
    async with asyncio.timeout(BACK_S):
        while True:
            with suppress(ZrtError):
                async with Client(cluster.endpoint) as client, aclosing(client.watch()) as watch:
                    async for now in watch:
                        if wanted(now):
                            return now
            await asyncio.sleep(0.1)


def pids(cluster: Cluster) -> dict[str, int]:
    return {actor.name: actor.pid for actor in cluster.actors if actor.name in FAMILY and actor.pid}


def test_whoever_hangs_as_the_coordinator_is_replaced_is_killed_and_comes_back(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = make_model("llama", num_hidden_layers=4, eos_token_id=None)
    with running(conf_file(model, tmp_path), home=tmp_path) as cluster:
        before = cluster.children()
        hung = [before["stage1"], before["attic"]]
        for process in hung:
            process.suspend()
        before["coordinator"].kill()
        assert gone(hung, KILLED_S), [process for process in hung if process.is_running()]

        def back(now: Cluster) -> bool:
            found = pids(now)
            return (
                now.ready and set(found) == FAMILY and all(found[one] != before[one].pid for one in ("stage1", "attic"))
            )

        again = pids(asyncio.run(until(cluster, back)))
        assert again["stage0"] == before["stage0"].pid
        answer = cluster.zrt(*GREEDY, "--max-tokens", "3")
        assert answer.returncode == 0, answer.stderr


@pytest.mark.chaos
def test_a_machine_that_is_suspended_as_the_coordinator_is_replaced_kills_nobody(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    """All processes stop, `zrt up` too, for longer than it waits for whoever is missing, before
    anybody has joined the next coordinator."""
    model = make_model("llama", num_hidden_layers=4, eos_token_id=None)
    with running(conf_file(model, tmp_path), home=tmp_path) as cluster:
        before = cluster.children()
        servers = [process for name, process in before.items() if name != "coordinator"]
        for process in servers:
            process.suspend()
        before["coordinator"].kill()
        next_one = asyncio.run(until(cluster, lambda now: any(actor.kind == "supervisor" for actor in now.actors)))
        assert pids(next_one) == {}
        everybody = [psutil.Process(cluster.process.pid), *cluster.children().values()]
        for process in everybody:
            process.suspend()
        assert not gone(servers, ABSENT * ASK_S + 2)
        for process in everybody:
            process.resume()
        again = asyncio.run(until(cluster, lambda now: now.ready and set(pids(now)) == FAMILY))
        assert pids(again) == {name: before[name].pid for name in FAMILY}
