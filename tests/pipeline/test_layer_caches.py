"""What becomes of a stage when the cache of one of its layer workers cannot be used, or loses what
it held."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.clusters import Local, local_cluster, memory_for
from support.tiny_models import reference

from zrt.actors.block_server.layer_lending import lending
from zrt.runtime.actor.envelope import Envelope
from zrt.runtime.messages.layers import ModelDataDone
from zrt.runtime.wire.envelopes import Body

PROMPT = [5, 17, 99, 3, 42, 42, 7, 120]
TOKENS = 8


@pytest.fixture(scope="module")
def model(make_model: Callable[..., Path]) -> Path:
    return make_model("llama", num_hidden_layers=4)


@pytest.fixture(scope="module")
def wanted(model: Path) -> list[int]:
    return reference(model, PROMPT, TOKENS)


async def test_a_pinned_worker_whose_cache_cannot_be_used_is_named_until_it_comes_back_with_another(
    model: Path, wanted: list[int], tmp_path: Path
) -> None:
    async with local_cluster(model, [None], lend={"attic": ["1-2"]}, waits=False) as cluster:
        usable, cluster.cache = cluster.cache, tmp_path / "layers"
        cluster.cache.write_text("no folder")
        worker = await cluster.join_worker("attic")
        seen = await cluster.until(lambda seen: bool(seen.actors[0].fault))
        fault = seen.actors[0].fault
        assert fault.startswith("bad_config: attic: layers cannot be kept: ")
        assert str(cluster.cache) in fault
        assert "set the worker's ZRT_HOME elsewhere" in fault
        await worker.stop()
        cluster.cache = usable
        await cluster.join_worker("attic")
        await cluster.until(lambda seen: seen.ready)
        assert await cluster.greedy(PROMPT, TOKENS) == wanted


async def test_a_worker_whose_cache_cannot_be_used_is_left_out_where_another_may_help(
    model: Path, wanted: list[int], tmp_path: Path
) -> None:
    room, memory = memory_for(model, 2, worker=True), memory_for(model, 2)
    async with local_cluster(model, [None], helped=True, memory=memory, waits=False) as cluster:
        usable, cluster.cache = cluster.cache, tmp_path / "layers"
        cluster.cache.write_text("no folder")
        await cluster.join_worker("attic", room)
        said = "not attic: layers cannot be kept"
        await cluster.until(lambda seen: (lend := seen.actors[0].lend) is not None and said in lend.waits_for)
        cluster.cache = usable
        await cluster.join_worker("cellar", room)
        seen = await cluster.until(lambda seen: seen.ready)
        assert await cluster.greedy(PROMPT, TOKENS) == wanted
        assert seen.actors[0].lend is not None
        assert {each.name: each.layers for each in seen.actors[0].lend.workers} == {"attic": "", "cellar": "2-3"}


def losing(cluster: Local, times: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """So many times the worker's files are gone when it is told that it has all of them; how often
    it is told so."""
    server, told = cluster.servers[0], []
    ask = server.ask

    async def ask_losing(to: object, body: Body, **words: object) -> Envelope:
        if isinstance(body, ModelDataDone):
            told.append(len(told))
            for number in (1, 2) if len(told) <= times else ():
                for half in (".part", ""):  # the one becomes the other, perhaps just now
                    for folder in cluster.cache.iterdir():
                        (folder / f"layer-{number:05d}.safetensors{half}").unlink(missing_ok=True)
        return await ask(to, body, **words)  # type: ignore[arg-type]

    monkeypatch.setattr(server, "ask", ask_losing)
    monkeypatch.setattr(lending, "PAUSE_S", 0.01)
    return told


async def test_files_that_are_gone_before_they_are_read_are_pushed_again(
    model: Path, wanted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with local_cluster(model, [None], lend={"attic": ["1-2"]}, waits=False) as cluster:
        told = losing(cluster, 2, monkeypatch)
        await cluster.join_worker("attic")
        seen = await cluster.until(lambda seen: seen.ready)
        assert len(told) == 3
        assert await cluster.greedy(PROMPT, TOKENS) == wanted
        assert seen.actors[0].lend is not None
        (worker,) = seen.actors[0].lend.workers
        assert (worker.pushed_bytes, worker.push_bytes) == (3 * worker.total_bytes, worker.total_bytes)


async def test_files_that_are_gone_each_time_are_pushed_a_few_times_and_the_stage_says_so(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with local_cluster(model, [None], lend={"attic": ["1-2"]}, waits=False) as cluster:
        told = losing(cluster, 99, monkeypatch)
        await cluster.join_worker("attic")
        seen = await cluster.until(lambda seen: bool(seen.actors[0].fault))
        assert seen.actors[0].fault.startswith("worker_failed: attic: layer-00001.safetensors, layer-00002.safetensors")
        assert "is gone" in seen.actors[0].fault
        assert len(told) == lending.ATTEMPTS
