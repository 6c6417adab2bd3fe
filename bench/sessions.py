"""Many sessions of the demo model at once, beside transformers' own static batch in a process of
its own.

    python bench/sessions.py batch    [--stages N] [--sessions N] [--rounds N]   tokens/s of all sessions together, both sides
    python bench/sessions.py cut      [--stages N] [--sessions N] [--rounds N]   tokens/s through N stages and through one, in turn
    python bench/sessions.py arrival  [--stages N]                               a 2,000-token prompt arrives while 4 sessions decode
    python bench/sessions.py fairness [--stages N] [--seconds S]                 64 equal sessions: tokens served to each
    python bench/sessions.py memory   [--stages N] [--steps N]                   resident memory over many steps

Prints one JSON object. Tokens are timed where they arrive, at the client.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sides import Baseline, cluster, family, servers

from zrt.runtime import Client
from zrt.runtime.messages.client import Cluster
from zrt.runtime.models.fetch.resolve import resolve

VOCABULARY = 49152
SMALL_KV = "128MiB"
WARM_UP = 5000


def prompts(count: int, length: int) -> list[list[int]]:
    chosen = random.Random(count)
    return [[chosen.randrange(100, VOCABULARY) for _ in range(length)] for _ in range(count)]


class Session:
    """One greedy generation that never ends early; `times` are when each token came."""

    def __init__(self, client: Client, prompt: Sequence[int], tokens: int) -> None:
        self.times: list[float] = []
        self._awaited: tuple[int, asyncio.Event] | None = None
        self._stream = client.generate(token_ids=prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True)

    async def run(self) -> "Session":
        loop = asyncio.get_running_loop()
        self.started = loop.time()
        async for piece in self._stream:
            self.times += [loop.time()] * len(piece.token_ids)
            if self._awaited is not None and len(self.times) >= self._awaited[0]:
                self._awaited[1].set()
        return self

    async def reached(self, tokens: int) -> None:
        """Wait until so many tokens have come."""
        self._awaited = tokens, asyncio.Event()
        if len(self.times) < tokens:
            await self._awaited[1].wait()

    def between(self, start: float, end: float) -> int:
        return sum(start <= time <= end for time in self.times)

    def gaps(self, start: float, end: float) -> list[float]:
        times = [time for time in self.times if start <= time <= end]
        return [b - a for a, b in itertools.pairwise(times)]

    async def stop(self) -> None:
        await self._stream.aclose()


def busy(before: Cluster, after: Cluster) -> list[dict[str, float]]:
    """What the block servers did between two looks."""
    figures = []
    old = {actor.name: actor for actor in before.actors}
    for actor in after.actors:
        if actor.kind == "block_server":
            turns = actor.turns - old[actor.name].turns
            steps = actor.steps - old[actor.name].steps
            figures.append({"turns": turns, "steps_a_turn": round(steps / max(1, turns), 2)})
    return figures


async def batch(asked: argparse.Namespace, baseline: Baseline, endpoint: str) -> dict[str, Any]:
    given = prompts(asked.sessions, 24)
    tokens = asked.tokens
    theirs, ours = [], []
    shares: list[dict[str, float]] = []
    caches = {}
    for cache in ("dynamic", "static"):
        baseline.ask(given, 3, cache)
        caches[cache] = baseline.ask(given, 12, cache)["decode_s"]
    cache = min(caches, key=lambda name: caches[name])
    async with Client(endpoint) as client:
        await asyncio.gather(*(Session(client, ids, 4).run() for ids in given))
        for _ in range(asked.rounds):
            answer = await asyncio.to_thread(baseline.ask, given, tokens, cache)
            theirs.append(asked.sessions * (tokens - 1) / answer["decode_s"])
            before = await client.status()
            ours.append(await served(client, given, tokens))
            shares = busy(before, await client.status())
    return {
        "sessions": asked.sessions,
        "cache": cache,
        "zrt_tok_s": round(statistics.median(ours), 1),
        "transformers_tok_s": round(statistics.median(theirs), 1),
        "ratio": round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 3),
        "ratios": [round(a / b, 3) for a, b in zip(ours, theirs, strict=True)],
        "stages_did": shares,
    }


async def served(client: Client, given: list[list[int]], tokens: int) -> float:
    """Tokens/s of sessions with these prompts, while all of them decode."""
    done = await asyncio.gather(*(Session(client, ids, tokens).run() for ids in given))
    start, end = max(one.times[0] for one in done), min(one.times[-1] for one in done)
    return sum(one.between(start, end) for one in done) / (end - start)


async def cut(asked: argparse.Namespace, whole: str, parts: str) -> dict[str, Any]:
    """Both clusters are up; the one that is not asked costs next to nothing."""
    given = prompts(asked.sessions, 24)
    figures: dict[str, list[float]] = {whole: [], parts: []}
    shares: list[dict[str, float]] = []
    async with Client(whole) as one, Client(parts) as many:
        for client in (one, many):
            await served(client, given, 8)
        for _ in range(asked.rounds):
            for client in (one, many):
                before = await client.status()
                figures[client.endpoint].append(await served(client, given, asked.tokens))
                shares = busy(before, await client.status())
    pairs = list(zip(figures[whole], figures[parts], strict=True))
    return {
        "sessions": asked.sessions,
        "one_stage_tok_s": round(statistics.median(figures[whole]), 1),
        "stages_tok_s": round(statistics.median(figures[parts]), 1),
        "share": round(statistics.median(b / a for a, b in pairs), 3),
        "shares": [round(b / a, 3) for a, b in pairs],
        "stages_did": shares,
    }


async def arrival(asked: argparse.Namespace, endpoint: str) -> dict[str, Any]:
    long, alone = prompts(2, 2000)
    async with Client(endpoint) as client:
        first = await Session(client, alone, 2).run()
        prefill_alone = first.times[0] - first.started
        running = [Session(client, ids, 4000) for ids in prompts(4, 24)]
        tasks = [asyncio.create_task(one.run()) for one in running]
        await asyncio.gather(*(one.reached(60) for one in running))
        loop = asyncio.get_running_loop()
        arrived = loop.time()
        late = await Session(client, long, 2).run()
        ended = late.times[0]
        for one in running:
            await one.stop()
        for task in tasks:
            task.cancel()
    start = max(one.times[5] for one in running)
    median = statistics.median(gap for one in running for gap in one.gaps(start, arrived))
    longest = max(gap for one in running for gap in one.gaps(arrived, ended))
    return {
        "median_gap_before_ms": round(1e3 * median, 1),
        "longest_gap_meanwhile_ms": round(1e3 * longest, 1),
        "gap_ratio": round(longest / median, 2),
        "prefill_alone_s": round(prefill_alone, 2),
        "prefill_meanwhile_s": round(ended - late.started, 2),
        "prefill_ratio": round((ended - late.started) / prefill_alone, 2),
    }


async def fairness(asked: argparse.Namespace, endpoint: str) -> dict[str, Any]:
    async def counted(count: int) -> list[int]:
        running = [Session(client, ids, 4000) for ids in prompts(count, 24)]
        tasks = [asyncio.create_task(one.run()) for one in running]
        await asyncio.gather(*(one.reached(2) for one in running))
        start = asyncio.get_running_loop().time()
        await asyncio.sleep(asked.seconds)
        counts = [one.between(start, start + asked.seconds) for one in running]
        for one in running:
            await one.stop()
        for task in tasks:
            task.cancel()
        return counts

    async with Client(endpoint) as client:
        sixteen, many = await counted(16), await counted(64)
    return {
        "seconds": asked.seconds,
        "most_over_least": round(max(many) / min(many), 3),
        "tok_s_64": round(sum(many) / asked.seconds, 1),
        "tok_s_16": round(sum(sixteen) / asked.seconds, 1),
    }


async def memory(asked: argparse.Namespace, endpoint: str) -> dict[str, Any]:
    """Sessions come and go until so many steps have run, after a warm-up that fills the KV pool:
    what is over stays in it as cache."""

    pids = family(await servers(endpoint))

    async def load(steps: int) -> dict[str, int]:
        chosen = random.Random(1)
        done = 0
        while done < steps:
            given = prompts(16, 24)
            runs = [Session(client, ids, chosen.randint(20, 60)).run() for ids in given]
            done += sum(len(one.times) for one in await asyncio.gather(*runs))
        return {name: resident(pid) for name, pid in pids.items()}

    async with Client(endpoint) as client:
        before = await load(WARM_UP)
        after = await load(asked.steps)
    return {
        "steps": asked.steps,
        "rss_mib": {name: round(size / 2**20) for name, size in after.items()},
        "growth": {name: round(size / before[name] - 1, 4) for name, size in after.items()},
    }


def resident(pid: int) -> int:
    """Bytes of memory a process holds."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("what", choices=["batch", "cut", "arrival", "fairness", "memory"])
    words.add_argument("--stages", type=int, default=1)
    words.add_argument("--sessions", type=int, default=16)
    words.add_argument("--rounds", type=int, default=5)
    words.add_argument("--tokens", type=int, default=48)
    words.add_argument("--seconds", type=float, default=30.0)
    words.add_argument("--steps", type=int, default=10_000)
    asked = words.parse_args()
    folder = resolve("smollm2-135m")
    if asked.what == "cut":
        with cluster(folder, 1) as whole, cluster(folder, asked.stages) as parts:
            figures = asyncio.run(cut(asked, whole, parts))
        print(json.dumps({"bench": "sessions cut", "stages": asked.stages, **figures}))
        return
    with cluster(folder, asked.stages, kv=SMALL_KV if asked.what == "memory" else "1GiB") as endpoint:
        if asked.what == "batch":
            baseline = Baseline(folder)
            try:
                figures = {**baseline.about, **asyncio.run(batch(asked, baseline, endpoint))}
            finally:
                baseline.close()
        else:
            run = {"arrival": arrival, "fairness": fairness, "memory": memory}[asked.what]
            figures = asyncio.run(run(asked, endpoint))
    print(json.dumps({"bench": f"sessions {asked.what}", "stages": asked.stages, **figures}))


if __name__ == "__main__":
    main()
