"""A cluster whose stages are on a GPU: sessions outlive a lost or drained block server, and a turn
without memory ends its own sessions alone."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path

import pytest
import torch
from support.clusters import cluster_file, local_cluster
from support.loads import load, undisturbed
from support.running import Running, running

from zrt.runtime.client.client import Client
from zrt.runtime.compute.loading import EngineOptions, LoadWatch, read_engine
from zrt.runtime.compute.weight_sources import RandomCheckpoint, open_checkpoint
from zrt.runtime.errors import ZrtError
from zrt.runtime.models.architecture.spec import read_spec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

COUNT, LENGTH = 6, 400


@pytest.fixture(scope="module")
def folder(make_model: Callable[..., Path]) -> Path:
    return make_model("llama")


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[list[int]]:
    """What the CPU says."""
    return asyncio.run(undisturbed(folder, COUNT, LENGTH))


@pytest.fixture(scope="module")
def replicas(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Two stages of two block servers each, all on one GPU."""
    home = tmp_path_factory.mktemp("home")
    conf = home / "cluster.toml"
    settings = {"model_context": 512, "kv_bytes": "16MiB"}
    conf.write_text(cluster_file(folder, ["0-1", "2-3"], replicas=2, device="cuda:0", **settings))
    with running(str(conf), home=home) as cluster:
        yield cluster


@pytest.mark.timeout(180)
@pytest.mark.parametrize("lost", ["stage0.0", "stage1.1"])
async def test_a_killed_replica_costs_no_token(lost: str, replicas: Running, wanted: list[list[int]]) -> None:
    async with Client(replicas.endpoint) as client, load(client, COUNT, LENGTH) as made:
        await made.have(20)
        replicas.children()[lost].kill()
        assert await made.over() == wanted
        async with asyncio.timeout(90), aclosing(client.watch()) as watch:  # it comes back
            async for seen in watch:
                servers = [actor for actor in seen.actors if actor.kind == "block_server"]
                if len(servers) == 4 and all(actor.state == "ready" for actor in servers):
                    break


@pytest.mark.timeout(180)
async def test_a_rolling_drain_loses_no_token(replicas: Running, wanted: list[list[int]]) -> None:
    async with Client(replicas.endpoint) as client, load(client, COUNT, LENGTH) as made:
        for name in ("stage0.0", "stage0.1", "stage1.0", "stage1.1"):
            drained = await client.drain(name)
            assert (drained.left, drained.parked) == (0, 0)
            await client.undrain(name)
        assert await made.over() == wanted


@pytest.fixture
def little_memory() -> Iterator[Callable[[int], None]]:
    """Call it to leave so many bytes beside what is taken."""
    total = torch.cuda.get_device_properties(0).total_memory

    def leave(count: int) -> None:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(0) + count) / total, 0)

    yield leave
    torch.cuda.set_per_process_memory_fraction(1.0, 0)


async def test_a_turn_without_memory_ends_its_sessions_and_nothing_else(
    make_model: Callable[..., Path], little_memory: Callable[[int], None]
) -> None:
    folder = make_model("llama", max_position_embeddings=16384, intermediate_size=16384)
    settings = {"model_context": 16384, "limits_chunk": 8192}
    async with local_cluster(folder, [None]) as cluster:
        wanted = await cluster.greedy([5, 17, 99], 20)
    async with local_cluster(folder, [None], device="cuda:0", **settings) as cluster:
        little_memory(64 << 20)
        with pytest.raises(ZrtError) as caught:  # a gigabyte of activations: nobody decodes, so it is run at once
            await cluster.greedy([3 + token % 150 for token in range(8192)], 2)
        assert caught.value.kind == "insufficient_vram"
        assert await cluster.greedy([5, 17, 99], 20) == wanted
        assert cluster.servers[0].state == "ready"


def test_what_is_more_than_its_share_is_refused_with_the_numbers(folder: Path) -> None:
    spec = read_spec(folder)
    with pytest.raises(ZrtError) as caught:
        read_engine(
            spec,
            RandomCheckpoint(spec),
            (0, 3),
            EngineOptions(
                dtype=torch.float32, kv_bytes=1 << 30, context=256, sessions=4, device="cuda:0", gpu_memory=0.001
            ),
        )
    assert caught.value.kind == "insufficient_vram"
    assert f"{1 << 30} for KV" in caught.value.message
    assert "gpu_memory is 0.001" in caught.value.message


def test_weights_from_files_come_whole_and_graphs_are_counted(make_model: Callable[..., Path]) -> None:
    folder = make_model("llama", hidden_size=1024, intermediate_size=6144, dtype="bfloat16")
    source, graphs = open_checkpoint(folder), []
    name, shape = "model.layers.0.mlp.gate_proj.weight", (6144, 1024)  # more than one chunk
    on_cpu, on_gpu = torch.empty(shape), torch.empty(shape, device="cuda:0")
    for into in (on_cpu, on_gpu):
        source.read(name, shape, into, lambda _: None)
    assert torch.equal(on_gpu.cpu(), on_cpu)
    read_engine(
        read_spec(folder),
        source,
        (0, 3),
        EngineOptions(dtype=torch.bfloat16, kv_bytes=1 << 24, context=256, sessions=4, device="cuda:0"),
        watch=LoadWatch(captured=lambda done, count: graphs.append((done, count))),
    )
    count = 3 + 9 + 5  # of decodes, of prompts alone, and of both
    assert graphs == [(done, count) for done in range(count + 1)]
