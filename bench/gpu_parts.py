"""Where a decode step on one GPU goes: kernels by kind, and what the device waits for, without a
cluster around the engine.

    python bench/gpu_parts.py [--sessions N ...] [--blocks N] [--prompts]

The model has Qwen3-8B's shape, random weights, bfloat16; sessions have 512 tokens of context.
`engine_ms` is a step as the executor sees it, without the profiler. The shares are of a step's time
on the device under the profiler: for each kind of kernel the time in which one of them runs and
none of a kind named before it (dependent launches overlap), and `gaps`, in which none does. With
`--prompts` it is turns of prompts instead, in ms, after histories of several lengths. Prints one
JSON object.
"""

import argparse
import json
import statistics
import time
from typing import Any

import torch
from shape import SHAPE
from torch.profiler import ProfilerActivity, profile

from zrt.runtime.compute.engine import Engine
from zrt.runtime.compute.loading import EngineOptions, read_engine
from zrt.runtime.compute.sampler import Sampler
from zrt.runtime.compute.turn import Work
from zrt.runtime.compute.weight_sources import RandomCheckpoint
from zrt.runtime.messages.sampling import Sampling
from zrt.runtime.models.architecture.spec import spec_from_config

CONTEXT = 512
PROMPTS = ((32, 0), (128, 0), (256, 0), (512, 0), (1024, 0), (2048, 0), (64, 15360), (512, 15360))
"""Tokens, and those of the history before them."""
ROUNDS = 5
STEPS = 40
PROFILED = 10
KINDS = {
    "products": ("one_row_product", "gemm", "gemv", "nvjet", "cutlass", "cublas", "splitK"),
    "attention": ("attend", "combine"),
    "sampling": ("best_of", "draw_"),
    "small kernels": ("",),
}


def kind_of(name: str) -> str:
    return next(kind for kind, words in KINDS.items() if any(word.lower() in name.lower() for word in words))


def decode(engine: Engine, sessions: int, steps: int) -> float:
    """Milliseconds a step of so many sessions, each going on greedily from where it is."""
    sampler = Sampler(Sampling(temperature=0.0))
    tokens = [[7] for _ in range(sessions)]
    started = time.perf_counter()
    for _ in range(steps):
        works = [Work(key, engine.have(key), 1, torch.tensor(tokens[key]), sampler) for key in range(sessions)]
        for key, outcome in enumerate(engine.turn(works).outcomes):
            assert outcome.picked is not None
            tokens[key] = [outcome.picked.token]
    return 1e3 * (time.perf_counter() - started) / steps


def busy(spans: list[tuple[float, float]]) -> float:
    """How long at least one of them lasts."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def parts(engine: Engine, sessions: int) -> dict[str, Any]:
    for key in range(sessions):
        prompt = torch.arange(CONTEXT) + 1000 * key
        engine.turn([Work(key, 0, CONTEXT, prompt % 100000, opens=CONTEXT)])
    decode(engine, sessions, 5)
    engine_ms = decode(engine, sessions, STEPS)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        decode(engine, sessions, PROFILED)
        torch.cuda.synchronize()
    spans: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset")):
            spans[kind_of(event.name)].append((event.time_range.start, event.time_range.end))
    every = [span for own in spans.values() for span in own]
    whole = max(end for _, end in every) - min(start for start, _ in every)
    shares: dict[str, float] = {}
    before: list[tuple[float, float]] = []
    for kind, own in spans.items():
        shares[kind] = round((busy(before + own) - busy(before)) / whole, 3)
        before += own
    for key in range(sessions):
        engine.close(key)
    return {"engine_ms": round(engine_ms, 3), "shares": {**shares, "gaps": round(1 - busy(every) / whole, 3)}}


def prompt_ms(engine: Engine, tokens: int, history: int) -> float:
    """A turn of so many tokens that ends with a pick: the median of a few, each of a session of its
    own."""
    sampler, times = Sampler(Sampling(temperature=0.0)), []
    for key in range(ROUNDS):
        ids = (torch.arange(history + tokens) * 31 + key) % 100000
        for start in range(0, history, 2048):
            part = ids[start : min(start + 2048, history)]
            engine.turn([Work(key, start, len(part), part, opens=0 if start else history + tokens)])
        started = time.perf_counter()
        engine.turn([Work(key, history, tokens, ids[history:], sampler, opens=0 if history else tokens)])
        times.append(1e3 * (time.perf_counter() - started))
        engine.close(key)
    return round(statistics.median(times), 2)


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--sessions", type=int, nargs="+", default=[1, 16, 64])
    words.add_argument("--blocks", type=int, default=36)
    words.add_argument("--prompts", action="store_true", help="turns of prompts instead")
    asked = words.parse_args()
    spec = spec_from_config(SHAPE | {"num_hidden_layers": asked.blocks})
    options = EngineOptions(
        dtype=torch.bfloat16,
        kv_bytes=12 << 30,
        context=16384 if asked.prompts else 4096,
        sessions=max(asked.sessions),
        device="cuda:0",
    )
    engine = read_engine(spec, RandomCheckpoint(spec), (0, asked.blocks - 1), options)
    if asked.prompts:
        figures: dict[str, Any] = {f"{n}, {history}": prompt_ms(engine, n, history) for n, history in PROMPTS}
    else:
        figures = {f"sessions_{count}": parts(engine, count) for count in asked.sessions}
    print(json.dumps({"bench": "gpu_parts", "card": torch.cuda.get_device_name(), **figures}))


if __name__ == "__main__":
    main()
