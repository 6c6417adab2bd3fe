"""Several block servers a stage, and spares: sessions spread over them, stay where they are, and
outlive each of them."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from support.clusters import Local, local_cluster
from support.loads import load, undisturbed

TWO: list[str | None] = ["0-1", "2-3"]
COUNT, LENGTH = 6, 250


@pytest.fixture(scope="module")
def folder(make_model: Callable[..., Path]) -> Path:
    return make_model("llama")


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[list[int]]:
    return asyncio.run(undisturbed(folder, COUNT, LENGTH))


def routes(cluster: Local) -> list[tuple[str, ...]]:
    return [tuple(info.route) for info in cluster.coordinator.generations.infos()]


async def test_sessions_spread_over_replicas_and_stay(folder: Path, wanted: list[list[int]]) -> None:
    """Each stage's replicas get half of them each, and half of each slot, although all came before
    any beat told of them."""
    async with local_cluster(folder, TWO, replicas=2, model_context=512) as cluster:
        async with load(cluster.client, 8, LENGTH) as made:
            at_first = routes(cluster)
            for stage in range(2):
                names = [route[stage] for route in at_first]
                assert [names.count(f"stage{stage}.{replica}") for replica in range(2)] == [4, 4]
            crowds = [cluster.coordinator.generations.rerouting.crowd(slot) for slot in range(2)]
            assert {crowd[name] for crowd in crowds for name in crowd} == {(4, 2)}
            await made.have(50)
            assert routes(cluster) == at_first
            assert (await made.over())[:COUNT] == wanted
        assert await cluster.used_pages() == 0


@pytest.mark.parametrize("lost", ["stage0.0", "stage1.1"])
async def test_a_lost_replica_costs_no_token(lost: str, folder: Path, wanted: list[list[int]]) -> None:
    """Its sessions move to the other; those of the other stay as they are, and nothing is replayed
    into what holds the history."""
    async with local_cluster(folder, TWO, replicas=2, model_context=512) as cluster:
        async with load(cluster.client, COUNT, LENGTH) as made:
            before = {info.session: info for info in cluster.coordinator.generations.infos()}
            await cluster.lose(lost)
            await made.have(20)
            for info in cluster.coordinator.generations.infos():
                was = before[info.session]
                moved = [(old, new) for old, new in zip(was.route, info.route, strict=True) if old != new]
                assert [old for old, _ in moved] == ([lost] if lost in was.route else [])
                assert info.epoch == was.epoch + len(moved)
            assert await made.over() == wanted
        assert await cluster.used_pages() == 0


async def test_a_replay_ends_at_the_last_stage_that_lacks_the_history(folder: Path) -> None:
    async with (
        local_cluster(folder, ["0", "1-2", "3"], replicas=2, model_context=512) as cluster,
        load(cluster.client, 1, LENGTH) as made,
    ):
        await made.have(100)
        (route,) = routes(cluster)
        last = cluster.server(route[2]).turns.tally
        ran = last.tokens
        await cluster.lose(route[1])
        await made.have(5)
        length = len(made.tokens[0])
        assert last.tokens - ran < 60 < length
        await made.over()


async def test_a_spare_takes_a_lost_range_at_once(folder: Path, wanted: list[list[int]]) -> None:
    """The process that comes back is the spare then, and takes what is lost next."""
    async with local_cluster(folder, TWO, spares_count=1, model_context=512) as cluster:
        async with load(cluster.client, COUNT, LENGTH) as made:
            await cluster.lose("stage1")
            await made.have(20)
            assert set(routes(cluster)) == {("stage0", "spare0")}
            await cluster.join("stage1")
            seen = await cluster.until(lambda seen: any(info.name == "stage1" and info.pid for info in seen.actors))
            assert [(info.name, info.state, info.blocks) for info in seen.actors if info.kind == "block_server"] == [
                ("stage0", "ready", "0-1"),
                ("spare0", "ready", "2-3"),
                ("stage1", "blank", ""),
            ]
            await cluster.lose("stage0")
            await made.have(20)
            assert set(routes(cluster)) == {("stage1", "spare0")}
            assert await made.over() == wanted
        assert await cluster.used_pages() == 0


async def test_one_that_joins_by_hand_is_a_spare(folder: Path, wanted: list[list[int]]) -> None:
    async with local_cluster(folder, TWO, model_context=512) as cluster, load(cluster.client, COUNT, LENGTH) as made:
        await cluster.lose("stage0")
        await made.in_phase("waiting")
        await cluster.join("attic")
        await made.have(20)
        assert set(routes(cluster)) == {("attic", "stage1")}
        assert await made.over() == wanted


@pytest.mark.parametrize("lost", ["stage0", "stage1"])
async def test_a_lost_range_goes_to_two_narrower_spares(lost: str, folder: Path, wanted: list[list[int]]) -> None:
    """None of the spares has the memory for both blocks: the pipeline grows by a stage, and by a
    slot."""
    async with local_cluster(folder, TWO, model_context=512) as cluster:
        needed = cluster.coordinator.roster._placement._memory.needed_bytes
        room = max(needed(0, 0), needed(3, 3))
        assert room < min(needed(0, 1), needed(2, 3))
        async with load(cluster.client, COUNT, LENGTH) as made:
            for number in range(2):
                await cluster.join(f"spare{number}", room)
            await cluster.until(lambda seen: sum(info.state == "blank" for info in seen.actors) == 2)
            await cluster.lose(lost)
            await made.have(20)
            other = "stage1" if lost == "stage0" else "stage0"
            taken = {name for route in routes(cluster) for name in route}
            assert taken == {"spare0", "spare1", other}
            assert cluster.coordinator.roster.pipeline.num_stages == 3
            assert await made.over() == wanted
        async with load(cluster.client, COUNT, 20) as made:
            assert slots(cluster) == {0, 1, 2}
            assert await made.over() == [tokens[:20] for tokens in wanted]
        assert await cluster.used_pages() == 0


def slots(cluster: Local) -> set[int]:
    return {generation.session.slot for generation in cluster.coordinator.generations._live.values()}
