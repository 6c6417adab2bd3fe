"""A block server that lends blocks to layer workers: a whole cluster in this process. What comes
out is transformers' own."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.clusters import Local, cluster_file, local_cluster, memory_for
from support.peers import until
from support.tiny_models import reference

from zrt.actors.block_server.layer_lending import lent_run
from zrt.actors.block_server.layer_lending.lending_backend import LendingBackend
from zrt.runtime.cluster.file_loader import parse
from zrt.runtime.cluster.memory import needs
from zrt.runtime.cluster.seats import stage_ranges
from zrt.runtime.messages.client import Cluster
from zrt.runtime.messages.layers import Batch
from zrt.runtime.models.architecture.spec import read_spec

PROMPT = [5, 17, 99, 3, 42, 42, 7, 120]
TOKENS = 32
LENT = {
    "one run": {"attic": ["1-3"]},
    "two workers": {"attic": ["1-2"], "cellar": ["3-4"]},
    "interleaved": {"attic": ["1", "3", "5"]},
    "interleaved, two workers": {"attic": ["1", "4"], "cellar": ["2-3", "6"]},
    "the first": {"attic": ["0-1"]},
    "the last": {"attic": ["7"]},
    "both ends": {"attic": ["0", "7"]},
    "all": {"attic": ["0-3"], "cellar": ["4-7"]},
}


@pytest.fixture
def model(make_model: Callable[..., Path]) -> Path:
    return make_model("llama", num_hidden_layers=8)


def lent_by(cluster: Local) -> LendingBackend:
    lent = cluster.servers[0].blocks.lending.lent
    assert lent is not None
    return lent


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stages", [["0-2", "3-5"], ["0-1", "2-3", "4-5"]])
async def test_a_stage_in_the_pipeline_may_lend_all_it_has(
    make_model: Callable[..., Path], stages: list[str | None], tied: bool
) -> None:
    """Each of its stages in turn: with the embedding, with the head, with neither."""
    folder = make_model("llama", num_hidden_layers=6, tied=tied)
    wanted = reference(folder, PROMPT, TOKENS)
    for lending in range(len(stages)):
        async with local_cluster(folder, stages, lend={"attic": [str(stages[lending])]}, lending=lending) as cluster:
            assert await cluster.greedy(PROMPT, TOKENS) == wanted
            await until(lambda: all(server.load().kv.used == 0 for server in cluster.servers))


@pytest.mark.parametrize("lend", LENT)
async def test_lent_layers_give_the_models_own_tokens(model: Path, lend: str) -> None:
    wanted = reference(model, PROMPT, TOKENS)
    async with local_cluster(model, [None], lend=LENT[lend]) as cluster:
        assert await cluster.greedy(PROMPT, TOKENS) == wanted


@pytest.mark.parametrize("lend", ["one run", "both ends"])
async def test_a_tied_embedding_is_held_once_and_what_is_loaded_is_what_was_planned(
    make_model: Callable[..., Path], lend: str
) -> None:
    folder = make_model("llama", num_hidden_layers=8, tied=True)
    conf, spec = parse(cluster_file(folder, [None], lend=LENT[lend]), "test"), read_spec(folder)
    planned = needs(conf, spec, stage_ranges(conf, spec), 0).stages[0].weight_bytes
    async with local_cluster(folder, [None], lend=LENT[lend]) as cluster:
        assert await cluster.greedy(PROMPT, TOKENS) == reference(folder, PROMPT, TOKENS)
        shards = [engine.shard for engine in lent_by(cluster).own.values()]
        tables = [table for shard in shards for table in (shard.embedding, shard.head) if table is not None]
        assert [table is tables[0] for table in tables] == [True, True]
        assert sum(shard.nbytes for shard in shards) == planned
        seen = await cluster.until(lambda seen: bool(seen.actors[0].total_bytes))
        assert seen.actors[0].done_bytes == seen.actors[0].total_bytes == planned


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}),
        ("qwen3", {"head_dim": 32}),
        ("gemma2", {"head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 32}),
        ("granite", {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0}),
    ],
)
@pytest.mark.parametrize("held", [["1", "3-4"], ["0-4"]], ids=["some", "all"])
async def test_every_family_is_lent(
    make_model: Callable[..., Path], family: str, config: dict[str, object], held: list[str]
) -> None:
    folder = make_model(family, num_hidden_layers=6, **config)
    wanted = reference(folder, PROMPT, TOKENS)
    async with local_cluster(folder, ["0-4", "5"], lend={"attic": held}) as cluster:
        assert await cluster.greedy(PROMPT, TOKENS) == wanted


async def test_of_an_answers_compute_the_workers_have_a_share(model: Path) -> None:
    async with local_cluster(model, ["0-5", "6-7"], lend={"attic": ["1-4"]}) as cluster:
        stream = cluster.client.generate(token_ids=PROMPT, max_tokens=TOKENS, temperature=0.0)
        async for _ in stream:
            pass
        lends, own = stream.finished.stages
        assert 0 < lends.lent_ms <= lends.compute_ms
        assert own.lent_ms == 0


async def test_random_weights_are_drawn_by_the_worker_itself(model: Path) -> None:
    settings = {"model_weights": "random"}
    async with local_cluster(model, [None], **settings) as cluster:
        wanted = await cluster.greedy(PROMPT, TOKENS)
    async with local_cluster(model, [None], lend={"attic": ["2-5"]}, **settings) as cluster:
        assert await cluster.greedy(PROMPT, TOKENS) == wanted
        assert not list(cluster.cache.rglob("*.safetensors"))


async def test_steps_of_many_sessions_are_one_hop(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[*PROMPT, number] for number in range(10, 16)]
    wanted = [reference(model, prompt, TOKENS) for prompt in prompts]
    async with local_cluster(model, [None], lend={"attic": ["1-6"]}) as cluster:
        server = cluster.servers[0]
        ask, hops = server.ask, []

        async def count(to, body, **words):  # type: ignore[no-untyped-def]
            if isinstance(body, Batch):
                hops.append(len(words["steps"]))
            return await ask(to, body, **words)

        monkeypatch.setattr(server, "ask", count)
        said = await asyncio.gather(*(cluster.greedy(prompt, TOKENS) for prompt in prompts))
        assert said == wanted
        assert max(hops) == 6
        assert len(hops) == server.turns.tally.turns
        assert sum(hops) == server.turns.tally.steps
        await until(lambda: server.load().kv.used == 0)


async def test_a_cached_prefix_is_found_in_all_runs(model: Path) -> None:
    prompt = [*PROMPT * 5]
    async with local_cluster(model, [None], lend={"attic": ["2-5"]}) as cluster:
        first = await cluster.greedy(prompt, 4)
        before = cluster.servers[0].load().tokens
        assert await cluster.greedy(prompt, 4) == first
        assert cluster.servers[0].load().tokens - before < len(prompt) // 2


@pytest.mark.parametrize("again", [pytest.param("at once", marks=pytest.mark.chaos), "later"])
async def test_a_worker_that_is_lost_costs_time_but_no_tokens(model: Path, again: str) -> None:
    wanted = reference(model, PROMPT, 200)
    async with local_cluster(model, [None], lend={"attic": ["1-3"], "cellar": ["5"]}) as cluster:
        running = asyncio.create_task(cluster.greedy(PROMPT, 200))
        await until(lambda: cluster.servers[0].turns.tally.turns > 20)
        await cluster.workers["attic"].stop()
        if again == "later":
            await cluster.until(lambda seen: not seen.ready)
        await cluster.join_worker("attic")
        assert await running == wanted


@pytest.mark.chaos
async def test_a_worker_that_hangs_is_replaced(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lent_run, "STEP_S", 1.0)
    wanted = reference(model, PROMPT, 200)
    async with local_cluster(model, [None], lend={"attic": ["1-3"]}) as cluster:
        running = asyncio.create_task(cluster.greedy(PROMPT, 200))
        await until(lambda: cluster.servers[0].turns.tally.turns > 20)
        worker = cluster.workers["attic"]
        hang = asyncio.create_task(worker._executor.run(time.sleep, 3.0))
        assert await running == wanted
        await hang


async def test_what_a_worker_was_sent_is_not_sent_again(model: Path) -> None:
    async with local_cluster(model, [None], lend={"attic": ["1-3"]}) as cluster:
        files = sorted(cluster.cache.rglob("*.safetensors"))
        assert [file.name for file in files] == [f"layer-{number:05d}.safetensors" for number in (1, 2, 3)]
        assert not list(cluster.cache.rglob("*.part"))
        times = [file.stat().st_mtime_ns for file in files]
        await cluster.workers["attic"].stop()
        await cluster.until(lambda seen: not seen.ready)
        await cluster.join_worker("attic")
        await cluster.until(lambda seen: seen.ready)
        assert [file.stat().st_mtime_ns for file in files] == times


async def test_a_worker_outlives_its_master_and_serves_the_next_with_what_it_holds(model: Path) -> None:
    wanted = reference(model, PROMPT, TOKENS)
    async with local_cluster(model, [None], lend={"attic": ["1-3"]}) as cluster:
        assert await cluster.greedy(PROMPT, TOKENS) == wanted
        held = cluster.workers["attic"]._assigned.held
        await cluster.lose("stage0")
        await cluster.until(lambda seen: not seen.ready)
        await cluster.join("stage0")
        seen = await cluster.until(lambda seen: seen.ready)
        assert await cluster.greedy(PROMPT, TOKENS) == wanted
        assert cluster.workers["attic"]._assigned.held is held
        assert seen.actors[0].lend is not None
        (worker,) = seen.actors[0].lend.workers
        assert (worker.pushed_bytes, worker.push_bytes, worker.held_bytes) == (0, 0, worker.total_bytes)


async def test_a_worker_whose_memory_is_less_than_its_blocks_take_is_waited_for(model: Path) -> None:
    """By its --memory, which a worker of the same name with more of it replaces."""
    lend = {"attic": ["1-3"]}
    narrow, wide = memory_for(model, 2, worker=True), memory_for(model, 3, worker=True)
    async with local_cluster(model, [None], lend=lend, workers={"attic": narrow}, waits=False) as cluster:

        def told(seen: Cluster) -> bool:
            lent = seen.actors[0].lend
            return lent is not None and "the 3 blocks pinned to it: its --memory leaves" in lent.waits_for

        await cluster.until(told)
        await cluster.workers["attic"].stop()
        await cluster.join_worker("attic", wide)
        assert await cluster.greedy(PROMPT, TOKENS) == reference(model, PROMPT, TOKENS)
