"""What the monitor costs: 500 sessions and 64 block servers, changes every 0.25 s in which every
session's figures move.

    python bench/monitor.py [--rounds N]
    python bench/monitor.py hot [--rounds N] [--sessions N]

Prints one JSON object. Without words: the share of a core that decoding, applying the changes, rows
and drawing take in each view, and with no changes (idle); what a change costs the coordinator to
work out and encode, and its bytes beside a whole snapshot's; and the time from a key to its effect
while changes come. Of each the least and the most of the rounds.

`hot`: tokens a second of a real cluster in this process while nobody and while three subscribers
hear of it every 0.25 s, in turn, and the ratio of each round.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.clusters import local_cluster
from support.snapshots import cluster
from support.tiny_models import TINY, save_model

from zrt.runtime import Client
from zrt.runtime.messages.client import Changes, Cluster
from zrt.runtime.wire.clients import decode_event, encode_event
from zrt.runtime.wire.cluster_changes import Snapshots, between
from zrt.tui.app import Top
from zrt.tui.keys import VIEWS
from zrt.tui.lines import Lines

SECONDS = 4.0
EVERY_S = 0.25
HOT_S = 5.0
FRAMES = 8
KEYS = 20


def story() -> list[Cluster]:
    """Snapshots in a circle: in each, five more tokens of every session."""
    made = [cluster(actors=64, sessions=500, up_ms=250 * number, tokens=2500 * number) for number in range(FRAMES)]
    for number, one in enumerate(made):
        for session in one.sessions:
            session.completion_tokens = 1000 + 5 * number
            session.gaps_ms = [1.0 + (5 * number + place) % 40 for place in range(24)]
            session.tokens_s = 20.0 + number
    return made


class Told:
    """Changes as they arrive, over and over."""

    def __init__(self, snapshots: list[Cluster]) -> None:
        self.first = encode_event(snapshots[0])
        began = time.perf_counter()
        self.frames = []
        for number in range(len(snapshots)):
            changes = between(snapshots[number], snapshots[(number + 1) % len(snapshots)])
            changes.id = "1"
            self.frames.append(encode_event(changes))
        self.told_ms = (time.perf_counter() - began) / len(snapshots) * 1e3
        self._seen = Snapshots()
        self._seen.take(snapshots[0])
        self._number = 0

    def next(self) -> Cluster:
        event = decode_event(self.frames[self._number % len(self.frames)])
        assert isinstance(event, Changes)
        self._number += 1
        event.serial = self._number
        taken = self._seen.take(event)
        assert taken is not None
        return taken


async def share(top: Top, told: Told | None) -> float:
    """CPU seconds a second while such changes come."""
    began, cpu, number = time.monotonic(), time.process_time(), 0
    while (passed := time.monotonic() - began) < SECONDS:
        if told is not None:
            top._take(told.next())
        number += 1
        await asyncio.sleep(max(0.0, number * EVERY_S - passed))
    return (time.process_time() - cpu) / (time.monotonic() - began)


async def key_ms(top: Top, told: Told) -> float:
    """The longest of some keys, from being pressed to its line being drawn, each just after changes
    came."""
    lines = top.query_one("#sessions", Lines)
    longest = 0.0
    for _ in range(KEYS):
        top._take(told.next())
        began, place = time.perf_counter(), lines._cursor
        top.simulate_key("down")
        drawn = lines.drawn
        while lines._cursor == place or lines.drawn == drawn:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        longest = max(longest, time.perf_counter() - began)
        await asyncio.sleep(0.05)
    return longest * 1e3


async def monitor(rounds: int) -> dict[str, object]:
    told = Told(story())
    top = Top("tcp://127.0.0.1:9", Path())
    top.feed.run = asyncio.Event().wait  # type: ignore[assignment,method-assign]
    cores: dict[str, list[float]] = {}
    keys = []
    async with top.run_test(size=(80, 24)) as pilot:
        await pilot.pause(1.0)
        for _ in range(rounds):
            cores.setdefault("idle", []).append(await share(top, None))
            for place, view in enumerate(VIEWS):
                await pilot.press(str(place + 1))
                cores.setdefault(view, []).append(await share(top, told))
            await pilot.press("2", "home")
            keys.append(await key_ms(top, told))
    return {
        "sessions": 500,
        "actors": 64,
        "whole_bytes": len(told.first),
        "changes_bytes": len(told.frames[0]),
        "told_ms": round(told.told_ms, 2),
        "cores": {view: [round(min(each), 4), round(max(each), 4)] for view, each in cores.items()},
        "key_ms": [round(min(keys), 1), round(max(keys), 1)],
    }


async def hot(rounds: int, sessions: int) -> dict[str, object]:
    pace: dict[int, list[float]] = {0: [], 3: []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder, "llama", TINY | {"eos_token_id": None, "max_position_embeddings": 32768}, 0, "float32", 1)
        async with (
            local_cluster(folder, ["0-1", "2-3"], model_context=32768, kv_bytes="1GiB") as made,
            AsyncExitStack() as stack,
        ):
            asking = [asyncio.create_task(ask(made.client, number)) for number in range(sessions)]
            stack.callback(lambda: [task.cancel() for task in asking])
            await asyncio.sleep(3.0)
            for number in range(rounds * 2):
                count = (0, 3)[(number + number // 2) % 2]
                pace[count].append(await tokens_s(made.coordinator.endpoint, made.coordinator.reports, count))
    ratios = [three / none for none, three in zip(pace[0], pace[3], strict=True)]
    return {
        "sessions": sessions,
        "tokens_s": {f"{count} subscribers": [round(each) for each in paces] for count, paces in pace.items()},
        "ratio": round(statistics.median(ratios), 3),
        "range": [round(min(ratios), 3), round(max(ratios), 3)],
    }


async def ask(client: Client, number: int) -> None:
    async for _ in client.generate(token_ids=[1, 2, 3 + number], max_tokens=30_000, temperature=0.0, ignore_eos=True):
        pass


async def tokens_s(endpoint: str, reports: object, subscribers: int) -> float:
    async with AsyncExitStack() as stack:
        tasks = []
        for _ in range(subscribers):
            client = await stack.enter_async_context(Client(endpoint))
            tasks.append(asyncio.create_task(listen(client)))
        await asyncio.sleep(0.5)
        before, began = reports.tokens, time.monotonic()  # type: ignore[attr-defined]
        await asyncio.sleep(HOT_S)
        pace = (reports.tokens - before) / (time.monotonic() - began)  # type: ignore[attr-defined]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return pace


async def listen(client: Client) -> None:
    async with aclosing(client.watch(every=EVERY_S)) as watch:
        async for _ in watch:
            pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("what", nargs="?", choices=("monitor", "hot"), default="monitor")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sessions", type=int, default=16)
    words = parser.parse_args()
    print(json.dumps(asyncio.run(hot(words.rounds, words.sessions) if words.what == "hot" else monitor(words.rounds))))


if __name__ == "__main__":
    main()
