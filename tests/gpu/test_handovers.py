"""Stages on the GPUs of one machine, in processes of their own, that hand rows over in memory: the
CPU's tokens, whoever ends or dies."""

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path

import pytest
import torch
from support.clusters import cluster_file, local_cluster
from support.loads import load, undisturbed
from support.running import Running, running

from zrt.runtime.client.client import Client
from zrt.runtime.messages.client import Cluster

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

COUNT, LENGTH = 6, 400
PROMPTS = [random.Random(number).choices(range(3, 150), k=9 + number) for number in range(COUNT)]
SETTINGS = {"model_context": 512, "kv_bytes": "16MiB"}


@pytest.fixture(scope="module")
def folder(make_model: Callable[..., Path]) -> Path:
    return make_model("llama")


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[list[int]]:
    """What the CPU says, greedily."""

    return asyncio.run(undisturbed(folder, COUNT, LENGTH, heat=0.0))


CUTS = {
    "two stages": (["0-1", "2-3"], 1),
    "three stages": (["0-1", "2-2", "3-3"], 1),
    "four stages": (["0-0", "1-1", "2-2", "3-3"], 1),
    "two GPUs": (["0-1", "2-3"], 2),
}


@pytest.fixture(scope="module", params=CUTS.values(), ids=CUTS)
def cluster(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Running]:
    blocks, gpus = request.param
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"{gpus} GPUs are needed")
    home = tmp_path_factory.mktemp("home")
    conf = home / "cluster.toml"
    text = cluster_file(folder, blocks, device="cuda:0", **SETTINGS)
    if gpus == 2:
        first, last = text.rsplit('"cuda:0"', 1)
        text = f'{first}"cuda:1"{last}'
    conf.write_text(text)
    with running(str(conf), home=home) as up:
        yield up


async def _greedy(client: Client, prompt: list[int], tokens: int = LENGTH, **options: object) -> list[int]:
    ids: list[int] = []
    options = {"temperature": 0.0, "ignore_eos": True} | options
    async for piece in client.generate(token_ids=prompt, max_tokens=tokens, **options):
        ids += piece.token_ids
    return ids


async def _seen(client: Client, wanted: Callable[[Cluster], bool]) -> Cluster:
    async with asyncio.timeout(60), aclosing(client.watch()) as watch:
        async for seen in watch:
            if wanted(seen):
                return seen
    raise AssertionError("the watch ended")


def _handed(seen: Cluster) -> dict[str, int]:
    return {actor.name: actor.handed for actor in seen.actors if actor.kind == "block_server"}


@pytest.mark.timeout(180)
async def test_rings_run_through_memory(cluster: Running, wanted: list[list[int]]) -> None:
    async with Client(cluster.endpoint) as client:
        before = _handed(await client.status())
        assert await asyncio.gather(*(_greedy(client, prompt) for prompt in PROMPTS)) == wanted
        goal = {name: count + LENGTH // 2 for name, count in before.items()}
        seen = await _seen(client, lambda seen: all(_handed(seen)[name] >= count for name, count in goal.items()))
        assert all(actor.stale == 0 for actor in seen.actors)


@pytest.mark.timeout(180)
async def test_a_ring_ends_where_it_is_to_end(cluster: Running, wanted: list[list[int]]) -> None:
    """At a token that ends it, at the most tokens, and when it is cancelled; the others go on, and
    nothing of it is left."""
    at = next(index for index in range(40, LENGTH) if wanted[0][index] not in wanted[0][:index])
    async with Client(cluster.endpoint) as client:
        others = [asyncio.create_task(_greedy(client, prompt)) for prompt in PROMPTS[2:]]
        ended = _greedy(client, PROMPTS[0], stop_token_ids=[wanted[0][at]])
        short = _greedy(client, PROMPTS[1], tokens=77)
        assert await asyncio.gather(ended, short) == [wanted[0][: at + 1], wanted[1][:77]]
        stream = client.generate(token_ids=PROMPTS[0], max_tokens=LENGTH, temperature=0.0, ignore_eos=True)
        ids: list[int] = []
        async for piece in stream:
            ids += piece.token_ids
            if len(ids) >= 20:
                break
        await stream.aclose()
        assert ids == wanted[0][: len(ids)]
        assert await asyncio.gather(*others) == wanted[2:]
        seen = await _seen(client, lambda seen: not seen.sessions)
        used = [actor.kv.used for actor in seen.actors if actor.kv is not None]
        if any(used):
            await _seen(client, lambda seen: all(actor.kv.used == 0 for actor in seen.actors if actor.kv is not None))


@pytest.mark.timeout(180)
async def test_sampled_sessions_beside_greedy_ones(cluster: Running, wanted: list[list[int]], folder: Path) -> None:
    def sampled(client: Client) -> object:
        return _greedy(client, PROMPTS[1], temperature=0.8, seed=5)

    async with local_cluster(folder, ["0-3"], **SETTINGS) as cpu:
        drawn = await sampled(cpu.client)
    async with Client(cluster.endpoint) as client:
        got = await asyncio.gather(_greedy(client, PROMPTS[0]), sampled(client), _greedy(client, PROMPTS[2]))
    assert got == [wanted[0], drawn, wanted[2]]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("round_", range(2))
async def test_a_killed_stage_costs_no_token(round_: int, cluster: Running, wanted: list[list[int]]) -> None:
    """Whichever it is: what others were handed by it, and what came of that, is void."""
    for name in [name for name in cluster.children() if name.startswith("stage")]:
        async with Client(cluster.endpoint) as client, load(client, COUNT, LENGTH, heat=0.0) as made:
            await made.have(30 + 20 * round_)
            cluster.children()[name].kill()
            assert await made.over() == wanted
