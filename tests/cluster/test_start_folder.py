"""The folder where `zrt up` is started: what lies there is not run, and it may go."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from support.clusters import cluster_file
from support.running import ACTOR, GREEDY, environment, family, run_zrt

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
