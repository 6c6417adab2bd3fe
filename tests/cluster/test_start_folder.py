"""The folder where `zrt up` is started, and the cluster file: what lies there is not run, and both
may go."""

import asyncio
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import aclosing, suppress
from pathlib import Path

from support.clusters import cluster_file
from support.running import ACTOR, GREEDY, environment, family, run_zrt, running
from support.tiny_models import reference

from zrt.runtime.client.client import Client
from zrt.runtime.errors import ZrtError
from zrt.runtime.process.python_command import FOLDER, python_command

STRANGERS = ("queue.py", "random.py", "numpy.py", "torch.py", "zrt/actors/main.py", "zrt/runtime/errors.py")


def test_a_cluster_neither_runs_nor_needs_what_lies_where_it_was_started(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Its paths are relative to the folder of its start: cluster file, model, and $ZRT_HOME."""
    start, home = tmp_path / "start", tmp_path / "home"
    for name in STRANGERS:
        (start / name).parent.mkdir(parents=True, exist_ok=True)
        (start / name).write_text("raise SystemExit('a stranger was imported')\n")
    os.symlink(make_model("llama", eos_token_id=None), tmp_path / "model")
    (tmp_path / "my.toml").write_text(cluster_file(Path("../model"), [None]))
    up = subprocess.run(
        python_command("zrt.runtime.cli.main", "up", "../my.toml", "--detach"),
        cwd=start,
        env=environment(home) | {"ZRT_HOME": "../home"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    try:
        assert up.returncode == 0, up.stderr
        shutil.rmtree(start)
        actors = [process for process in family(home) if process.cmdline()[: len(ACTOR)] == ACTOR]
        (server,) = (process for process in actors if "stage0" in process.cmdline())
        server.kill()
        server.wait(10)
        deadline = time.monotonic() + 60
        while (done := run_zrt(*GREEDY, "--max-tokens", "5", home=home)).returncode:
            assert time.monotonic() < deadline, done.stderr
        again = family(home)
        assert len(again) == len(actors) + 1  # zrt up itself
        assert {process.cwd() for process in again} == {FOLDER}
    finally:
        for process in family(home):
            process.kill()


def test_a_coordinator_that_starts_again_serves_the_cluster_file_that_was_read_at_the_start(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    model, conf = make_model("llama", eos_token_id=None), tmp_path / "my.toml"
    text = cluster_file(model, [None])
    edited = cluster_file(tmp_path / "another", ["0-1", "2-3"], cluster_name="edited", model_context=8)
    conf.write_text(text)
    with running(str(conf), home=tmp_path) as cluster:

        async def served() -> tuple[str, int, list[int]]:
            """The cluster's name, the number of its stages, and what it answers."""
            async with Client(cluster.endpoint) as client:
                async with aclosing(client.watch()) as watch:
                    seen = await anext(seen async for seen in watch if seen.ready)
                answer = client.generate(token_ids=[1, 2, 3], max_tokens=12, temperature=0.0)
                ids = [token async for piece in answer for token in piece.token_ids]
            return seen.name, len({actor.stage for actor in seen.actors} - {-1}), ids

        async def served_again() -> tuple[str, int, list[int]]:
            async with asyncio.timeout(60):
                while True:
                    with suppress(ZrtError):
                        return await served()
                    assert cluster.process.poll() is None
                    await asyncio.sleep(0.05)

        before = asyncio.run(served())
        assert before == ("test", 1, reference(model, [1, 2, 3], 12))
        for now in (edited, "this is no TOML", None):
            conf.unlink() if now is None else conf.write_text(now)
            killed = cluster.children()["coordinator"]
            killed.kill()
            killed.wait(10)
            assert asyncio.run(served_again()) == before
