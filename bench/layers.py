"""What lending layers costs: the hop of a token to a worker, and the push of the layers. The worker
is a process of its own, on loopback.

    python bench/layers.py hop [--rounds N] [--tokens N]        one session decodes through the demo
                                        model, of which a worker holds ten blocks
    python bench/layers.py push [--rounds N] [--megabytes N]    a model made for this, all but its
                                        ends lent to a worker that holds nothing

Prints one JSON object. `hop`: of each round the median over its last 512 hops, in microseconds; a
hop is clocked by the master from the rows it has to the rows it gets, and `overhead` is that less
what the worker's layers took, by the worker's own clock. `bare_us`: what it is between two
processes without zrt (bare_hop.py), run before. `push`: megabytes (10^6) a second. `transfer` is by
the master's clock, from the first question to the worker to its last answer, when all is checked
and written; `start` is by the clock of whoever waits: how much longer a start takes with the push
than without it. `peak_mb` is the most memory that the master and the worker ever had resident, in a
start with the push and in one without.
"""

import argparse
import asyncio
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from sides import bare_hop, text, up

from zrt.runtime import Client
from zrt.runtime.messages.cluster import ActorInfo
from zrt.runtime.messages.stats import WorkerLoad
from zrt.runtime.models.fetch.resolve import resolve

LEAST_HOPS = 512
WARM_UP = 32
BEAT_S = 10.0
HIDDEN, WIDE, HEADS, VOCABULARY = 2048, 8192, 16, 256
LAYER_BYTES = 2 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * WIDE + 2 * HIDDEN)


def lending(blocks: str) -> str:
    """One stage that lends these blocks to a worker that `zrt up` starts."""
    return f'[[stage]]\n[[stage.lend]]\nworker = "attic"\nblocks = "{blocks}"\n[[worker]]\nname = "attic"\n'


async def told(client: Client, hops: int) -> tuple[WorkerLoad, dict[str, ActorInfo]]:
    """What the master says of its worker, once it has counted so many hops, and all processes: it
    is told in beats."""
    async with asyncio.timeout(BEAT_S):
        while True:
            actors = {actor.name: actor for actor in (await client.status()).actors}
            for lend in (actor.lend for actor in actors.values() if actor.lend is not None):
                if lend.workers and lend.workers[0].hops >= hops:
                    return lend.workers[0], actors
            await asyncio.sleep(0.1)


async def hop(endpoint: str, rounds: int, tokens: int) -> dict[str, Any]:
    seen: list[WorkerLoad] = []
    async with Client(endpoint) as client:
        for count in (WARM_UP, *[tokens] * rounds):
            hops = (await told(client, 0))[0].hops
            async for _ in client.generate(token_ids=[1, 2, 3], max_tokens=count, temperature=0.0, ignore_eos=True):
                pass
            seen.append((await told(client, hops + count))[0])
    measured = seen[1:]
    overheads = [worker.overhead_us for worker in measured]
    return {
        "hops": tokens * rounds,
        "overhead_us": statistics.median(overheads),
        "range": [min(overheads), max(overheads)],
        "hop_us": statistics.median(worker.hop_us for worker in measured),
    }


def make_model(folder: Path, layers: int) -> None:
    """A llama of `layers` layers in bfloat16; what is in its weights is nobody's concern here."""
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": WIDE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    square, wide = (HIDDEN, HIDDEN), (WIDE, HIDDEN)
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{name}_proj.weight": square for name in "qkvo"}
        shapes |= {f"{at}.mlp.{name}_proj.weight": wide for name in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (HIDDEN, WIDE)
        shapes |= {f"{at}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    drawn = torch.randn(WIDE * HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    tensors = {name: drawn[: torch.Size(shape).numel()].view(shape).clone() for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


async def pushed(endpoint: str) -> tuple[WorkerLoad, dict[str, ActorInfo]]:
    async with Client(endpoint) as client:
        return await told(client, 0)


def push(rounds: int, megabytes: int) -> dict[str, Any]:
    layers = max(1, round(megabytes * 1e6 / LAYER_BYTES))
    moved = layers * LAYER_BYTES / 1e6
    transfers: list[float] = []
    starts: list[float] = []
    peaks: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as place:
        folder, home = Path(place) / "model", Path(place) / "home"
        for made in (folder, home):
            made.mkdir()
        make_model(folder, layers + 2)
        file = text(folder, lending(f"1-{layers}"), context=256, sessions=4, kv="64MiB").replace(
            "[model]", '[model]\ndtype = "bfloat16"'
        )
        start(home, file)  # kernels are compiled, once
        for _ in range(rounds):
            shutil.rmtree(home / "layers")
            first, worker, pushing = start(home, file)
            second, _, idle = start(home, file)
            transfers.append(worker.push_bytes_s / 1e6)
            starts.append(moved / (first - second))
            peaks = {name: [round(pushing[name]), round(idle[name])] for name in pushing}
    return {
        "megabytes": round(moved),
        "transfer_mb_s": round(statistics.median(transfers)),
        "transfer_range": [round(min(transfers)), round(max(transfers))],
        "start_mb_s": round(statistics.median(starts)),
        "start_range": [round(min(starts)), round(max(starts))],
        "peak_mb": peaks,
    }


def start(home: Path, file: str) -> tuple[float, WorkerLoad, dict[str, float]]:
    """Seconds until the cluster is ready, what its master says of the worker, and the most memory
    that either ever had."""
    started = time.perf_counter()
    with up(home, file) as endpoint:
        seconds = time.perf_counter() - started
        worker, actors = asyncio.run(pushed(endpoint))
        return seconds, worker, {name: peak(actors[name].pid) for name in ("stage0", "attic")}


def peak(pid: int) -> float:
    """The most memory a process ever had resident."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e6


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("what", choices=["hop", "push"])
    words.add_argument("--rounds", type=int, default=3)
    words.add_argument("--tokens", type=int, default=600)
    words.add_argument("--megabytes", type=int, default=1000)
    asked = words.parse_args()
    if asked.what == "push":
        figures = push(asked.rounds, asked.megabytes)
    else:
        if asked.tokens < LEAST_HOPS:
            words.error(f"--tokens: at least {LEAST_HOPS}, the hops of a median")
        bare = bare_hop()
        with (
            tempfile.TemporaryDirectory() as home,
            up(Path(home), text(resolve("smollm2-135m"), lending("10-19"))) as endpoint,
        ):
            figures = asyncio.run(hop(endpoint, asked.rounds, asked.tokens)) | {"bare_us": bare}
    print(json.dumps({"bench": f"layers {asked.what}", "rounds": asked.rounds, **figures}))


if __name__ == "__main__":
    main()
