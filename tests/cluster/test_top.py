"""The monitor as a person has it: `zrt top` on a terminal of its own, beside a real cluster."""

import json
import time
from collections.abc import Callable
from pathlib import Path

from clusters import cluster_file
from running import running
from terminal import Terminal

from zrt.runtime.cli import main

RESTART_S = 30.0


def test_a_stage_is_restarted_by_a_key(make_model: Callable[..., Path], tmp_path: Path) -> None:
    """And `zrt status --watch` tells a script the same."""
    (tmp_path / "cluster.toml").write_text(cluster_file(make_model("llama"), [None, None]))
    with running(str(tmp_path / "cluster.toml"), home=tmp_path) as cluster:
        before = cluster.children()["stage1"].pid
        with Terminal("top", home=tmp_path) as top:
            top.until("stage1")
            top.type("jjjj")
            top.type("r")
            top.until("Kill stage1 and start it again?")
            top.type("y")
            top.until("starts again")
            deadline = time.monotonic() + RESTART_S
            while (now := cluster.children().get("stage1")) is None or now.pid == before:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            assert top.wait("q") == 0
        with Terminal("status", "--watch", "--json", home=tmp_path) as status:
            seen = status.until("\n")
            assert json.loads(seen)["name"] == "test"
            status.until("\n")


def test_the_monitor_refuses_what_is_no_terminal() -> None:
    assert main(["top", "--connect", "tcp://127.0.0.1:9"]) == 2
