"""Makes the pictures of the monitor that the README shows: docs/pictures/*.svg, of a cluster that
really runs.

    python docs/pictures.py [--seconds N]

It starts the demo model in three stages (three ranks, two replicas, one that lends blocks to a
layer worker), has some sessions generate, opens the monitor beside it, drains a replica, and
exports each view. This machine's name is taken out.
"""

import argparse
import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from textual.pilot import Pilot

from zrt.runtime import Client
from zrt.runtime.process.lifeline import READY_FD
from zrt.tui.app import Top

FOLDER = Path(__file__).parent / "pictures"
SIZE = (100, 26)
WAIT_S = 60.0
CLUSTER = """
[cluster]
name = "pictures"
listen = "tcp://127.0.0.1:0"
[model]
ref = "smollm2-135m"
context = 2048
[kv]
bytes = "64MiB"
[[stage]]
blocks = "0-9"
tp = 3
threads = 1
[[stage]]
blocks = "10-19"
replicas = 2
threads = 1
[[stage]]
blocks = "20-29"
threads = 1
[[stage.lend]]
worker = "attic"
blocks = "22-25"
[[worker]]
name = "attic"
"""
QUESTIONS = (
    "Tell me a long story about a lighthouse keeper.",
    "How does a tide come about? Explain it at length.",
    "Write a long letter to a friend about the sea.",
    "List and describe thirty birds of the coast.",
    "What should one know before sailing alone?",
)


@contextmanager
def cluster() -> Iterator[str]:
    """Its endpoint, once it is ready."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pictures.toml"
        path.write_text(CLUSTER)
        reader, writer = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-m", "zrt.runtime.cli.main", "up", str(path)],
            env={**os.environ, READY_FD: str(writer)},
            pass_fds=(writer,),
        )
        os.close(writer)
        try:
            with open(reader) as pipe:
                line = pipe.readline()
            if not line:
                sys.exit("the cluster did not start")
            yield json.loads(line)["endpoint"]
        finally:
            process.terminate()
            process.wait()


async def ask(client: Client, question: str) -> None:
    while True:
        async for _ in client.generate(question, max_tokens=400, ignore_eos=True, temperature=0.8):
            pass


async def until(pilot: Pilot[None], seen: Callable[[], bool], patience: float) -> None:
    async with asyncio.timeout(patience):
        while not seen():
            await pilot.pause(0.1)


def export(top: Top, name: str) -> None:
    picture = top.export_screenshot(title=f"zrt top: {name}").replace(socket.gethostname(), "here")
    picture = re.sub(r"@font-face {.*?}", "", picture, flags=re.DOTALL)  # whoever shows it has a font of its own
    (FOLDER / f"{name}.svg").write_text(picture)


async def take(endpoint: str, seconds: float) -> None:
    async with Client(endpoint) as client:
        asking = [asyncio.create_task(ask(client, question)) for question in QUESTIONS]
        top = Top(endpoint, FOLDER)
        async with top.run_test(size=SIZE) as pilot:
            await until(
                pilot, lambda: top.state.cluster is not None and len(top.state.pace) >= seconds, WAIT_S + 2 * seconds
            )
            await pilot.press("down", "down", "down")
            await pilot.pause(0.6)
            export(top, "cluster")
            await pilot.press("2")
            await pilot.pause(0.6)
            export(top, "sessions")
            await pilot.press("enter")
            await pilot.pause(8.0)
            export(top, "session")
            await pilot.press("escape")
            await client.drain("stage1.1", timeout=2)
            await pilot.press("3")
            await pilot.pause(1.5)
            export(top, "drains")
            await client.undrain("stage1.1")
            await pilot.press("4")
            await pilot.pause(0.6)
            export(top, "events")
            await pilot.press("5")
            await pilot.pause(0.6)
            export(top, "throughput")
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--seconds", type=float, default=60.0, help="of load before the first picture")
    seconds = parser.parse_args().seconds
    FOLDER.mkdir(exist_ok=True)
    with cluster() as endpoint:
        asyncio.run(take(endpoint, seconds))


if __name__ == "__main__":
    main()
