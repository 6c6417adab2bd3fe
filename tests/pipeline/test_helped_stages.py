"""Stages that take help: workers that join by themselves get what memory and speed say, and what
comes out is the model's own."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from support.clusters import Local, local_cluster, memory_for
from support.tiny_models import reference

from zrt.runtime.cluster.layer_sharing import Holder, plan_layers, ranges
from zrt.runtime.messages.client import Cluster
from zrt.runtime.messages.members import Workers
from zrt.runtime.messages.stats import LendLoad
from zrt.tui.status import tree

PROMPT = [5, 17, 99, 3, 42, 42, 7, 120]
TOKENS = 24


@pytest.fixture(scope="module")
def model(make_model: Callable[..., Path]) -> Path:
    return make_model("llama", num_hidden_layers=8)


@pytest.fixture(scope="module")
def wanted(model: Path) -> list[int]:
    return reference(model, PROMPT, TOKENS)


async def lent(cluster: Local) -> LendLoad:
    seen = await cluster.until(lambda seen: bool(seen.actors[0].lend and seen.ready))
    load = seen.actors[0].lend
    assert load is not None
    return load


async def helping(cluster: Local) -> set[str]:
    return {worker.name for worker in (await lent(cluster)).workers if worker.layers}


async def test_a_worker_that_no_stage_takes_is_told_of(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with local_cluster(model, [None]) as cluster:
        await (await cluster.join_worker("atttic")).there()
    told = [record.getMessage() for record in caplog.records if "atttic" in record.getMessage()]
    assert told[0].startswith("the worker atttic has nothing to do here: no [[stage]] takes the help of workers")


async def test_a_stage_that_fits_starts_without_workers(model: Path, wanted: list[int]) -> None:
    async with local_cluster(model, [None], helped=True) as cluster:
        assert await cluster.greedy(PROMPT, TOKENS) == wanted
        assert (await lent(cluster)).own == "0-7"
        await cluster.settled()
        await cluster.join_worker("attic")  # the stage has no session, and is given out anew
        seen = await cluster.until(
            lambda seen: bool(seen.actors[0].lend and seen.actors[0].lend.workers and seen.ready)
        )
        assert await cluster.greedy(PROMPT, TOKENS) == wanted
        assert seen.actors[0].lend is not None


async def test_a_stage_is_not_loaded_again_for_workers_that_it_did_without(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each that joins is new once; that another goes is no reason at all."""
    caplog.set_level("INFO", "zrt.actors.block_server.block_server")

    def loads() -> int:
        return sum("loads blocks" in record.getMessage() for record in caplog.records)

    async with local_cluster(model, [None], helped=True, workers={"attic": 1 << 10}) as cluster:
        assert loads() == 1
        await (await cluster.join_worker("cellar", 1 << 10)).there()
        await cluster.until(lambda seen: loads() == 2 and seen.ready and len(seen.actors[0].lend.workers) == 2)  # type: ignore[union-attr]
        await cluster.workers["cellar"].stop()
        await cluster.until(lambda seen: len(seen.actors[0].lend.workers) == 1)  # type: ignore[union-attr]
        server = cluster.servers[0]
        await cluster.coordinator.ask(server.address, Workers([cluster.workers["attic"].address]), timeout=10.0)
        assert (loads(), server.state) == (2, "ready")


async def test_a_worker_without_room_is_no_reason_not_to_wait_for_one_that_was_lost(
    model: Path, wanted: list[int]
) -> None:
    async with local_cluster(model, [None], helped=True, workers={"attic": 0, "cellar": 1 << 10}) as cluster:
        assert await helping(cluster) == {"attic"}
        await cluster.workers["attic"].stop()
        await cluster.until(lambda seen: not seen.ready)
        await cluster.join_worker("attic")
        assert await cluster.greedy(PROMPT, TOKENS) == wanted
        assert await helping(cluster) == {"attic"}


@pytest.mark.parametrize(
    ("here", "there", "runs"),
    [
        (0, {"attic": 0}, {"attic": "0-7"}),
        (3, {"attic": 2, "cellar": 3}, {"attic": "3-4", "cellar": "5-7"}),
        (4, {"attic": 4}, {"attic": "4-7"}),
    ],
)
async def test_blocks_that_do_not_fit_go_to_workers_as_far_as_they_have_room(
    model: Path, wanted: list[int], here: int, there: dict[str, int], runs: dict[str, str]
) -> None:
    """Nobody has room to spare, so that it does not matter how fast they are; 0 is a worker with
    room for all."""
    workers = {name: memory_for(model, blocks, worker=True) if blocks else 0 for name, blocks in there.items()}
    memory = memory_for(model, here)
    async with local_cluster(model, [None], helped=True, memory=memory, workers=workers) as cluster:
        assert await cluster.greedy(PROMPT, TOKENS) == wanted
        load = await lent(cluster)
        assert {worker.name: worker.layers for worker in load.workers} == runs
        for worker in load.workers:
            assert worker.state == "ready"
            assert worker.pushed_bytes == worker.held_bytes == worker.total_bytes > 0
            assert min(worker.layer_us, worker.latency_us, worker.total_mb) > 0
        assert (load.waits_for, load.rebuilds) == ("", 0)


async def test_blocks_that_fit_in_more_than_one_way_are_shared_out_by_measured_speed(
    model: Path, wanted: list[int]
) -> None:
    there = {"attic": 2, "cellar": 8}
    workers = {name: memory_for(model, blocks, worker=True) for name, blocks in there.items()}
    memory = memory_for(model, 3)
    async with local_cluster(model, [None], helped=True, memory=memory, workers=workers) as cluster:
        assert await cluster.greedy(PROMPT, TOKENS) == wanted
        measured = {worker.name: worker.layer_us for worker in (await lent(cluster)).workers}
        own_us = cluster.servers[0].blocks.lending._own_us
        assert min(own_us, *measured.values()) > 0
        holders = [Holder("", 3, own_us), *(Holder(name, there[name], us) for name, us in measured.items())]
        plan = plan_layers(0, 7, [], holders)
        held = {worker.name: worker.layers for worker in (await lent(cluster)).workers}
        assert held == {name: ranges(plan.layers(name)) for name in there}


async def test_a_stage_waits_for_as_many_workers_as_it_needs_and_says_so(model: Path, wanted: list[int]) -> None:
    narrow = memory_for(model, 3, worker=True)
    async with local_cluster(model, [None], helped=True, memory=memory_for(model, 2), waits=False) as cluster:
        asked = asyncio.create_task(cluster.greedy(PROMPT, TOKENS))
        for name, lacking in (("attic", 6), ("cellar", 3)):
            said = f"layer workers with room for {lacking} of blocks 0-7"
            seen = await cluster.until(lambda seen: said in waits(seen))  # noqa: B023
            assert (seen.actors[0].state, seen.ready) == ("loading", False)
            assert f"stage0 waits for {said}" in "\n".join(line.plain for line in tree(seen))
            await cluster.join_worker(name, narrow)
        assert await asked == wanted
        await cluster.until(lambda seen: not waits(seen))


def waits(seen: Cluster) -> str:
    lend = seen.actors[0].lend
    return lend.waits_for if lend is not None else ""
