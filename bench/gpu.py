"""Decode and prefill of a model of Qwen3-8B's shape on one GPU, client to client through `zrt up`,
beside what the card's memory allows.

    python bench/gpu.py [--sessions N ...] [--tokens N] [--blocks N] [--stages N] [--cards N]
                        [--tp N] [--chunk N] [--temperature T] [--no-parts]

Weights are random, bfloat16. The floor of a token is the bytes a step must read (weights once, each
session's keys and values) over the rate at which this card reads a large matrix for one row,
measured in the same run before the cluster starts. Where the rest goes is measured by
bench/gpu_parts.py, also before (one stage alone): what a step takes longer than the engine's own is
the runtime's. `cpu_ms` is what the stages' processes compute for a step on the CPU, all threads
together: waiting for the device is in it. Prints one JSON object.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from shape import SHAPE

from zrt.runtime import Client

CARD = """
import json, torch
def rate(work, times):
    best = 1e9
    for _ in range(5):
        begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
        begin.record()
        for _ in range(times): work()
        end.record(); end.synchronize()
        best = min(best, begin.elapsed_time(end) / times / 1e3)
    return best
bf16 = dict(dtype=torch.bfloat16, device="cuda")
w, x = torch.randn(24576, 16384, **bf16), torch.randn(1, 16384, **bf16)
a, b = torch.randn(8192, 8192, **bf16), torch.randn(8192, 8192, **bf16)
read = w.nbytes / rate(lambda: torch.nn.functional.linear(x, w), 20)
flops = 2 * 8192**3 / rate(lambda: a @ b, 5)
print(json.dumps({"card": torch.cuda.get_device_name(), "read_gb_s": read / 1e9, "bf16_tflops": flops / 1e12}))
"""
QUIET_S = 1.2
"""After so long nobody decodes, and a prompt has the turns to itself."""
KV_TOKEN_BYTES = 2 * 8 * 128 * 2


def step_bytes(blocks: int, sessions: int, context: int) -> int:
    hidden, width, heads, kv = 4096, 12288, 32 * 128, 8 * 128
    block = hidden * (heads + 2 * kv) + heads * hidden + 3 * hidden * width
    return 2 * (blocks * block + 151936 * hidden) + sessions * context * blocks * KV_TOKEN_BYTES


def prompt(length: int, number: int) -> list[int]:
    return [1000 + (number * 7919 + token * 31) % 100000 for token in range(length)]


async def one(client: Client, length: int, tokens: int, number: int, temperature: float) -> list[float]:
    """When the request went, and when each of its tokens came."""
    times = [time.perf_counter()]
    options = (
        {"temperature": temperature, "seed": number, "top_k": 20, "top_p": 0.95}
        if temperature
        else {"temperature": 0.0}
    )
    async for piece in client.generate(token_ids=prompt(length, number), max_tokens=tokens, ignore_eos=True, **options):
        times += [time.perf_counter()] * len(piece.token_ids)
    return times


def cpu_s(pids: list[int]) -> float:
    """What these processes have computed, all their threads together."""
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


async def measure(endpoint: str, asked: argparse.Namespace, card: dict[str, Any]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    async with Client(endpoint) as client:

        def run(length: int, tokens: int, number: int) -> Awaitable[list[float]]:
            return one(client, length, tokens, number, asked.temperature)

        await run(512, 32, 1)
        for number in range(asked.prefills):
            for length in (512, 2048):
                await asyncio.sleep(QUIET_S)
                times = await run(length, 2, 100 + 10 * number + length)
                figures.setdefault(f"ttft_ms_{length}", []).append(1e3 * (times[1] - times[0]))
        for count in asked.sessions:
            tokens = max(asked.tokens, 4 * count)
            await asyncio.gather(*[run(512, 1, 1000 * count + number) for number in range(count)])
            pids = [actor.pid for actor in (await client.status()).actors if actor.stage >= 0]
            before = cpu_s(pids)
            every = await asyncio.gather(*[run(512, tokens, 1000 * count + number) for number in range(count)])
            spent = cpu_s(pids) - before
            begin = max(times[1] for times in every)  # all of them decode
            end = min(times[-1] for times in every)
            if end <= begin:
                raise SystemExit(f"{count} sessions never decoded together; ask for more tokens")
            steps = [later - earlier for times in every for earlier, later in pairwise(times[1:])]
            inside = [sum(begin < at <= end for at in times) for times in every]
            step_ms = 1e3 * (end - begin) / statistics.mean(inside)
            context = 512 + tokens / 2
            floor_ms = 1e3 * step_bytes(asked.blocks, count, int(context)) / (card["read_gb_s"] * 1e9)
            figures[f"sessions_{count}"] = {
                "step_ms": round(step_ms, 3),
                "median_gap_ms": round(1e3 * statistics.median(steps), 3),
                "longest_gap_ms": round(1e3 * max(steps), 1),
                "tokens_s": round(1e3 * count / step_ms, 1),
                "cpu_ms": round(1e3 * spent / tokens, 2),
                "floor_ms": round(floor_ms, 3),
                "floor_share": round(floor_ms / step_ms, 3),
            }
    for length in (512, 2048) if asked.prefills else ():
        median = statistics.median(figures.pop(f"ttft_ms_{length}"))
        block_flops = 2 * (step_bytes(asked.blocks, 0, 0) // 2 - 151936 * 4096)
        share = block_flops * length / (median / 1e3) / (card["bf16_tflops"] * 1e12)
        figures[f"prompt_{length}"] = {"ttft_ms": round(median, 2), "matrix_rate_share": round(share, 3)}
    return figures


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--sessions", type=int, nargs="+", default=[1, 16, 64])
    words.add_argument("--tokens", type=int, default=128)
    words.add_argument("--blocks", type=int, default=36)
    words.add_argument("--stages", type=int, default=1)
    words.add_argument("--cards", type=int, default=1, help="the stages lie on so many cards, one after the other")
    words.add_argument("--tp", type=int, default=1, help="ranks of each stage, each on a card of its own")
    words.add_argument("--prefills", type=int, default=5)
    words.add_argument(
        "--chunk", type=int, default=0, help="tokens of a prompt run at once (default: the product's own)"
    )
    words.add_argument("--temperature", type=float, default=0.0, help="0: greedy; else with top_k 20 and top_p 0.95")
    words.add_argument("--no-parts", dest="parts", action="store_false", help="do not say where a step goes")
    asked = words.parse_args()
    card = json.loads(subprocess.run([sys.executable, "-c", CARD], check=True, capture_output=True, text=True).stdout)
    parts = {}
    if asked.stages == asked.tp == 1 and asked.parts:
        command = [sys.executable, str(Path(__file__).with_name("gpu_parts.py")), "--blocks", str(asked.blocks)]
        command += ["--sessions", *map(str, asked.sessions)]
        parts = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home) / "model"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": asked.blocks}))
        conf = Path(home) / "gpu.toml"
        conf.write_text(
            f'[cluster]\nlisten = "tcp://127.0.0.1:0"\n[model]\nref = "{folder}"\ndtype = "bfloat16"\ncontext = 4096\n'
            f'weights = "random"\n[kv]\nbytes = "{12 // asked.stages}GiB"\n'
            f"[limits]\nsessions = {max(asked.sessions)}\n"
            + (f"chunk = {asked.chunk}\n" if asked.chunk else "")
            + "".join(
                f'[[stage]]\ndevice = "cuda:{stage % asked.cards}"\ntp = {asked.tp}\n' for stage in range(asked.stages)
            )
        )
        reader, writer = os.pipe()
        started = time.perf_counter()
        with open(reader) as pipe:
            process = subprocess.Popen(
                [sys.executable, "-m", "zrt.runtime.cli.main", "up", str(conf)],
                env=os.environ | {"ZRT_HOME": home, "ZRT_READY_FD": str(writer)},
                pass_fds=[writer],
            )
            os.close(writer)
            try:
                line = pipe.readline()
                if not line:
                    raise SystemExit("the cluster did not come up")
                ready_s = time.perf_counter() - started
                figures = asyncio.run(measure(json.loads(line)["endpoint"], asked, card))
            finally:
                process.terminate()
                process.wait(60)
    for name, figure in figures.items():
        if name in parts:
            figure |= parts[name]
    print(
        json.dumps(
            {
                "bench": "gpu",
                **card,
                "stages": asked.stages,
                "cards": asked.cards,
                "tp": asked.tp,
                "chunk": asked.chunk,
                "temperature": asked.temperature,
                "ready_s": round(ready_s, 1),
                **figures,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
