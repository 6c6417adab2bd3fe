"""What the monitor costs: 500 sessions and 64 block servers, a snapshot every 0.25 s in which every session's figures move.

Prints one JSON object: the share of a core that decoding, rows and drawing take in each view, the same with no snapshots (idle), what a
snapshot costs the coordinator's side to encode, and the time from a key to its effect.
"""

import asyncio
import json
import sys
import time
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from snapshots import cluster

from zrt.runtime.messages.client import Cluster
from zrt.tui.app import VIEWS, Top
from zrt.tui.lines import Lines

SECONDS = 4.0
EVERY_S = 0.25


async def share(top: Top, frames: list[bytes]) -> float:
    """CPU seconds a second while these snapshots come in turn."""
    began, cpu, number = time.monotonic(), time.process_time(), 0
    while (passed := time.monotonic() - began) < SECONDS:
        if frames:
            top._take(msgspec.msgpack.decode(frames[number % len(frames)], type=Cluster))
        number += 1
        await asyncio.sleep(max(0.0, number * EVERY_S - passed))
    return (time.process_time() - cpu) / (time.monotonic() - began)


async def main() -> None:
    snapshots = [cluster(actors=64, sessions=500, up_ms=250 * number, tokens=9000 * number) for number in range(8)]
    for number, one in enumerate(snapshots):
        for session in one.sessions:
            session.completion_tokens += number
            session.gaps_ms = [1.0 + (number + place) % 7 for place in range(24)]
    frames = [msgspec.msgpack.encode(one) for one in snapshots]
    began = time.perf_counter()
    for one in snapshots:
        msgspec.msgpack.encode(one)
    encode_ms = (time.perf_counter() - began) / len(snapshots) * 1e3
    told: dict[str, object] = {"sessions": 500, "actors": 64, "bytes": len(frames[0]), "encode_ms": round(encode_ms, 3)}
    top = Top("tcp://127.0.0.1:9", Path())
    async with top.run_test(size=(80, 24)) as pilot:
        await pilot.pause(1.0)
        cores = {"idle": round(await share(top, []), 4)}
        told["cores"] = cores
        for place, view in enumerate(VIEWS):
            await pilot.press(str(place + 1))
            cores[view] = round(await share(top, frames), 4)
        await pilot.press("2")
        lines = top.query_one("#sessions", Lines)
        began, before = time.perf_counter(), lines.drawn
        await pilot.press("down")
        while lines.drawn == before:
            await pilot.pause()
        told["key_ms"] = round((time.perf_counter() - began) * 1e3, 2)
    print(json.dumps(told))


asyncio.run(main())
