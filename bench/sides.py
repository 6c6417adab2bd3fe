"""The two sides of a comparison, each in processes of its own: a zrt cluster, and transformers
(baseline.py)."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zrt.runtime import Client


class Baseline:
    """bench/baseline.py; `about` is what it says of itself."""

    def __init__(self, folder: Path) -> None:
        script = Path(__file__).with_name("baseline.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.about = self._read()

    def ask(self, prompts: list[list[int]], tokens: int, cache: str) -> dict[str, Any]:
        """Blocks until the answer is there."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens, "cache": cache}) + "\n")
        self.process.stdin.flush()
        return self._read()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer


def floor(folder: Path) -> dict[str, float]:
    """What bench/floor.py says, run now."""
    return _said("floor.py", str(folder))


def bare_hop() -> dict[str, float]:
    """What bench/bare_hop.py says, run now."""
    return _said("bare_hop.py")


def _said(script: str, *words: str) -> dict[str, float]:
    path = Path(__file__).with_name(script)
    done = subprocess.run([sys.executable, str(path), *words], capture_output=True, text=True, check=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


@contextmanager
def cluster(folder: Path, stages: int, *, context: int = 4096, sessions: int = 64, kv: str = "1GiB") -> Iterator[str]:
    """`zrt up` with so many planned stages; its endpoint."""
    with (
        tempfile.TemporaryDirectory() as home,
        up(Path(home), text(folder, "[[stage]]\n" * stages, context, sessions, kv)) as endpoint,
    ):
        yield endpoint


def text(folder: Path, stages: str, context: int = 4096, sessions: int = 64, kv: str = "1GiB") -> str:
    """A cluster file on a free port."""
    return (
        f'[cluster]\nlisten = "tcp://127.0.0.1:0"\n[model]\nref = "{folder}"\ncontext = {context}\n'
        f'[kv]\nbytes = "{kv}"\n[limits]\nsessions = {sessions}\n{stages}'
    )


@contextmanager
def up(home: Path, text: str) -> Iterator[str]:
    """`zrt up` with a cluster file of this text, and its cache in `home`; its endpoint, once it is
    ready."""
    conf = home / "bench.toml"
    conf.write_text(text)
    reader, writer = os.pipe()
    with open(reader) as pipe:
        process = subprocess.Popen(
            [sys.executable, "-m", "zrt.runtime.cli.main", "up", str(conf)],
            env=os.environ | {"ZRT_HOME": str(home), "ZRT_READY_FD": str(writer)},
            pass_fds=[writer],
            stderr=subprocess.DEVNULL,
        )
        os.close(writer)
        try:
            yield json.loads(pipe.readline())["endpoint"]
        finally:
            process.terminate()
            process.wait(30)


async def servers(endpoint: str) -> dict[str, int]:
    """Names and pids of what registered with the coordinator, after one answer."""
    async with Client(endpoint) as client:
        async for _ in client.generate(token_ids=[1, 2, 3], max_tokens=16, temperature=0.0, ignore_eos=True):
            pass
        return {actor.name: actor.pid for actor in (await client.status()).actors if actor.pid}


def family(found: dict[str, int]) -> dict[str, int]:
    """Return the process ids by name, with that of their parent, `zrt up`."""
    return found | {"up": parent(next(iter(found.values())))}


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
