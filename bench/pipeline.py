"""Decode speed of the demo model through block servers, beside transformers' own `generate` in a
process of its own.

    python bench/pipeline.py [--stages N] [--rounds N] [--tokens N]

Both sides are asked in turn, round by round, with the same prompt; figures are medians over the
rounds. Prints one JSON object: milliseconds a token of each side, the ratio (above 1: zrt is
faster), each stage's compute, queue and encode time a token, and what is left for the network
(sockets and wake-ups, of all hops together).
"""

import argparse
import asyncio
import json
import statistics
from typing import Any

from sides import Baseline, cluster, floor

from zrt.runtime import Client
from zrt.runtime.models.fetch.resolve import resolve
from zrt.runtime.text.tokenizer import Tokenizer

PROMPT = "Tell me a long story about a lighthouse keeper."


async def ask(client: Client, prompt: list[int], tokens: int) -> dict[str, Any]:
    """One greedy generation, timed at the client: from the first token to the last."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    stream = client.generate(token_ids=prompt, max_tokens=tokens, temperature=0.0)
    times, ids = [], []
    async for piece in stream:
        times.append(loop.time())
        ids += piece.token_ids
    finished = stream.finished
    return {
        "ids": ids,
        "ttft_s": times[0] - started,
        "decode_s": times[-1] - times[0],
        "compute_ms": [stage.compute_ms for stage in finished.stages],
        "queue_ms": [stage.queue_ms for stage in finished.stages],
        "encode_ms": [stage.encode_ms for stage in finished.stages],
        "network_ms": finished.timings.network_ms,
    }


def faster_cache(baseline: Baseline, prompt: list[int]) -> str:
    """Which of transformers' two caches decodes faster here."""
    seconds = {}
    for cache in ("dynamic", "static"):
        baseline.ask([prompt], 4, cache)
        seconds[cache] = baseline.ask([prompt], 24, cache)["decode_s"]
    return min(seconds, key=lambda cache: seconds[cache])


async def measure(endpoint: str, baseline: Baseline, prompt: list[int], tokens: int, rounds: int) -> dict[str, Any]:
    ours, theirs = [], []
    async with Client(endpoint) as client:
        await ask(client, prompt, 8)
        cache = faster_cache(baseline, prompt)
        for _ in range(rounds):
            theirs.append(await asyncio.to_thread(baseline.ask, [prompt], tokens, cache))
            ours.append(await ask(client, prompt, tokens))
            if ours[-1]["ids"] != theirs[-1]["ids"][0]:
                raise SystemExit("the two sides do not generate the same tokens")
    steps = len(ours[0]["ids"]) - 1
    zrt_ms = [1e3 * one["decode_s"] / steps for one in ours]
    base_ms = [1e3 * one["decode_s"] / steps for one in theirs]

    def stages(figure: str) -> list[float]:
        """Return the milliseconds a token of each stage."""
        count = len(ours[0][figure])
        return [round(statistics.median(one[figure][stage] / (steps + 1) for one in ours), 2) for stage in range(count)]

    return {
        "cache": cache,
        "tokens": steps + 1,
        "rounds": rounds,
        "zrt_ms_token": round(statistics.median(zrt_ms), 2),
        "transformers_ms_token": round(statistics.median(base_ms), 2),
        "ratio": round(statistics.median(b / z for z, b in zip(zrt_ms, base_ms, strict=True)), 3),
        "ratios": [round(b / z, 3) for z, b in zip(zrt_ms, base_ms, strict=True)],
        "zrt_ttft_ms": round(1e3 * statistics.median(one["ttft_s"] for one in ours), 1),
        "transformers_ttft_ms": round(1e3 * statistics.median(one["ttft_s"] for one in theirs), 1),
        "compute_ms_token": stages("compute_ms"),
        "queue_ms_token": stages("queue_ms"),
        "encode_ms_token": stages("encode_ms"),
        "network_ms_token": round(statistics.median(one["network_ms"] / steps for one in ours), 2),
    }


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--stages", type=int, default=2)
    words.add_argument("--rounds", type=int, default=5)
    words.add_argument("--tokens", type=int, default=64)
    asked = words.parse_args()
    folder = resolve("smollm2-135m")
    tokenizer = Tokenizer.open(folder)
    assert tokenizer is not None
    prompt = tokenizer.encode_chat([{"role": "user", "content": PROMPT}])
    least = floor(folder)
    baseline = Baseline(folder)
    try:
        with cluster(folder, asked.stages) as endpoint:
            figures = asyncio.run(measure(endpoint, baseline, prompt, asked.tokens, asked.rounds))
    finally:
        baseline.close()
    least |= {"floor_share": round(least["floor_ms"] / figures["zrt_ms_token"], 3)}
    print(json.dumps({"bench": "pipeline", "stages": asked.stages, **baseline.about, **figures, **least}))


if __name__ == "__main__":
    main()
