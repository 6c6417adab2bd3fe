"""Layers lent to workers where one side or both are on a GPU: transformers' tokens, whoever is
lost; and what the GPU's memory is said to be."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest
import torch
from support.clusters import Local, local_cluster
from support.running import free_port, start_zrt
from support.tiny_models import reference

from zrt.actors.layer_worker.assigned_layers import AssignedLayers, options_of
from zrt.runtime.actor.executor import LOST_DEVICE_STATUS
from zrt.runtime.cluster.layer_sharing import usable
from zrt.runtime.compute.devices import device_memory
from zrt.runtime.compute.layer_engine import LayerEngine
from zrt.runtime.compute.weight_sources import RandomCheckpoint
from zrt.runtime.messages.client import Cluster
from zrt.runtime.messages.layers import LayerAssignment, LayersPrepared, PrepareLayers, WorkerReady
from zrt.runtime.models.architecture.spec import read_spec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

TESTS = Path(__file__).parents[1]
PROMPT = [5, 17, 99, 3, 42, 42, 7, 120]
TOKENS = 40
GPU = "cuda:0"
PLACES = {"a GPU's worker": ("cpu", GPU), "a GPU's master": (GPU, "cpu"), "both": (GPU, GPU)}
LENT = {
    "interleaved": {"attic": ["1", "4"], "cellar": ["2-3", "6"]},
    "both ends": {"attic": ["0", "7"]},
    "all": {"attic": ["0-3"], "cellar": ["4-7"]},
}


@pytest.fixture(scope="module")
def model(make_model: Callable[..., Path]) -> Path:
    return make_model("llama", num_hidden_layers=8)


@pytest.fixture(scope="module")
def wanted(model: Path) -> list[int]:
    return reference(model, PROMPT, TOKENS)


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where two layer workers look for one cluster after the other; each is a process of its own,
    on one GPU."""
    at = f"tcp://127.0.0.1:{free_port()}"
    home = tmp_path_factory.mktemp("home")
    words = ["worker", "--join", at, "--device", GPU, "--threads", "1", "--name"]
    with ExitStack() as stack:
        for name in ("attic", "cellar"):
            process = start_zrt(*words, name, home=home)
            stack.callback(process.communicate)
            stack.callback(process.kill)
        yield at


@asynccontextmanager
async def lending_to(places: str, folder: Path, endpoint: str, **settings: object) -> AsyncIterator[Local]:
    """A cluster whose workers are those at the endpoint, or of its own on the CPU."""
    device, worker_device = PLACES[places]
    settings |= {"kv_bytes": "16MiB", "device": device}
    if worker_device == GPU:
        settings |= {"cluster_listen": endpoint, "waits": False}
    elif settings.get("helped"):
        settings["workers"] = {"attic": 0}
    async with local_cluster(folder, [None], **settings) as cluster:  # type: ignore[arg-type]
        await cluster.until(_lends)
        yield cluster


def _lends(seen: Cluster) -> bool:
    stage = next((actor for actor in seen.actors if actor.name == "stage0"), None)
    lend = None if stage is None else stage.lend
    return seen.ready and lend is not None and any(worker.state == "ready" for worker in lend.workers)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("lend", LENT)
@pytest.mark.parametrize("places", PLACES)
async def test_layers_are_lent_from_and_to_a_gpu(
    model: Path, wanted: list[int], endpoint: str, places: str, lend: str
) -> None:
    async with lending_to(places, model, endpoint, lend=LENT[lend]) as cluster:
        assert await asyncio.gather(*(cluster.greedy(PROMPT, TOKENS) for _ in range(3))) == [wanted] * 3


@pytest.mark.timeout(120)
@pytest.mark.parametrize("places", PLACES)
async def test_a_stage_takes_help_from_and_on_a_gpu(model: Path, wanted: list[int], endpoint: str, places: str) -> None:
    async with lending_to(places, model, endpoint, helped=True) as cluster:
        assert await cluster.greedy(PROMPT, TOKENS) == wanted


@pytest.mark.timeout(180)
@pytest.mark.parametrize("fault", ["SIGKILL", "LOST_DEVICE"])
async def test_a_worker_or_its_gpu_is_lost_and_no_token(model: Path, wanted: list[int], fault: str) -> None:
    async with local_cluster(model, [None], waits=False, lend={"attic": ["2-5"]}, kv_bytes="16MiB") as cluster:
        words = [cluster.coordinator.endpoint, "attic", str(cluster.cache), "decode", fault, GPU]
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(TESTS / "support" / "failing_worker.py"), *words, stdin=subprocess.DEVNULL
        )
        try:
            asked = asyncio.create_task(cluster.greedy(PROMPT, TOKENS))
            assert await process.wait() == (-signal.SIGKILL if fault == "SIGKILL" else LOST_DEVICE_STATUS)
            await cluster.join_worker("attic", device=GPU)
            assert await asked == wanted
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


LOST_STAGE = f"""
import asyncio, sys
from functools import partial
import torch
sys.path.insert(0, {str(TESTS)!r})
from support.failing_worker import lose_device
from zrt.actors.block_server.backend import LocalBackend
from zrt.runtime.compute.devices import device_lives
from zrt.runtime.compute.loading import EngineOptions, read_engine
from zrt.runtime.models.architecture.spec import read_spec
from zrt.runtime.compute.turn import Work
from zrt.runtime.compute.weight_sources import RandomCheckpoint
from zrt.runtime.actor.executor import ComputeExecutor

async def run(folder):
    spec, executor = read_spec(folder), ComputeExecutor("executor", partial(device_lives, torch.device("{GPU}")))
    options = EngineOptions(dtype=torch.float32, kv_bytes=1 << 24, context=256, sessions=1, device="{GPU}")
    engine = await executor.run(lambda: read_engine(spec, RandomCheckpoint(spec), (1, 2), options))
    backend = LocalBackend(executor, engine)
    step = [Work("a", 0, 1, torch.ones(1, spec.hidden_size), opens=1)]
    assert (await backend.turn(step, 1)).outcomes[0].fault is None
    await executor.run(lose_device, engine.shard.device)
    try:
        await backend.turn([Work("a", 1, 1, torch.ones(1, spec.hidden_size))], 1)
    finally:
        print("it goes on")

from pathlib import Path
asyncio.run(run(Path(sys.argv[1])))
"""


@pytest.mark.timeout(120)
def test_a_block_server_whose_gpu_is_lost_gives_its_process_up(model: Path) -> None:
    """Nothing but a new process helps; whoever started it starts another."""
    words = [sys.executable, "-c", LOST_STAGE, str(model)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == LOST_DEVICE_STATUS, ended.stderr
    assert "does nothing any more" in ended.stderr
    assert not ended.stdout


def test_a_worker_says_what_is_free_without_the_layers_it_holds(model: Path, tmp_path: Path) -> None:
    """The whole KV pool of a GPU is taken at once, and given back with the layers."""
    assigned = AssignedLayers(tmp_path, GPU, 0, lambda state: None)
    prepare = PrepareLayers((model / "config.json").read_text(), "bfloat16", 4 << 30, 256, 4, random=True)

    def free() -> int:
        said = assigned.prepare(prepare)
        assert isinstance(said, LayersPrepared)
        return said.free_bytes

    free()  # CUDA's own memory is taken by now
    before = free()
    assigned.assign(LayerAssignment(["model.layers.1", "model.layers.2"], ""))
    assert isinstance(assigned.load(), WorkerReady)
    assert device_memory(GPU)[0] < before - (4 << 30)
    assert abs(free() - before) < 1 << 28


def test_a_worker_holds_all_that_plans_may_give_it(model: Path) -> None:
    """Plans leave 5 % of a GPU alone; a block server's own budget is another."""
    spec = read_spec(model)
    torch.cuda.empty_cache()
    room = usable(*device_memory(GPU), GPU) - (64 << 20)
    held = LayerEngine.load(
        spec,
        RandomCheckpoint(spec),
        [(1, 2)],
        options_of(PrepareLayers("", "bfloat16", room, 256, 4), GPU),
    )
    (engine,) = held.engines
    assert engine.stats().total * engine.stats().page_bytes > room - (16 << 20)
