"""The monitor as a person has it: `zrt top` on a terminal of its own, in tmux or not, beside a real
cluster."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from support.clusters import cluster_file
from support.running import Running, environment, running, start_zrt
from support.terminal import CTRL_C, Terminal

from zrt.runtime.cli.main import main

WAIT_S = 30.0


class Tmux:
    """A tmux server of its own with one window of 80x24, in which `zrt top` runs."""

    def __init__(self, home: Path, *words: str) -> None:
        self._socket = str(home / "tmux")
        command = [sys.executable, "-m", "zrt.runtime.cli.main", "top", *words]
        env = environment(home) | {"TERM": "xterm", "LC_ALL": "C.UTF-8"}
        env.pop("TMUX", None)
        self._do("-f", "/dev/null", "new-session", "-d", "-x", "80", "-y", "24", *command, env=env)

    def _do(self, *words: str, env: dict[str, str] | None = None) -> str:
        done = subprocess.run(
            ["tmux", "-u", "-S", self._socket, *words], capture_output=True, text=True, env=env, timeout=20, check=True
        )
        return done.stdout

    def type(self, *keys: str) -> None:
        self._do("send-keys", *keys)

    def screen(self) -> str:
        return self._do("capture-pane", "-p")

    def until(self, seen: Callable[[str], bool]) -> str:
        deadline = time.monotonic() + WAIT_S
        while not seen(screen := self.screen()):
            assert time.monotonic() < deadline, screen
            time.sleep(0.1)
        return screen

    def end(self) -> None:
        subprocess.run(["tmux", "-S", self._socket, "kill-server"], capture_output=True, timeout=20, check=False)


@contextmanager
def tmux(home: Path) -> Iterator[Tmux]:
    made = Tmux(home)
    try:
        yield made
    finally:
        made.end()


@pytest.fixture(scope="module")
def cluster(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Two stages of two replicas each."""
    home = tmp_path_factory.mktemp("home")
    model = make_model("llama", eos_token_id=None, max_position_embeddings=32768)
    text = cluster_file(model, ["0-1", "2-3"], replicas=2, model_context=32768)
    (home / "cluster.toml").write_text(text)
    with running(str(home / "cluster.toml"), home=home) as made:
        yield made


def line(screen: str, name: str) -> str:
    """The line that has this in it."""
    return next((each for each in screen.splitlines() if name in each), "")


def down_to(screen: str, name: str) -> int:
    """How many lines below the first one of the tree this name stands."""
    lines = screen.splitlines()[2:]
    return next(place for place, each in enumerate(lines) if name in each)


@pytest.mark.skipif(shutil.which("tmux") is None, reason="there is no tmux")
def test_a_stage_is_killed_its_sessions_move_another_is_drained_and_a_session_is_cancelled(cluster: Running) -> None:
    asking = start_zrt("generate", "--token-ids", "1,2,3", "--max-tokens", "30000", home=cluster.home)
    try:
        with tmux(cluster.home) as top:
            top.until(lambda screen: "stage1.1" in screen and "1 session" in screen)
            top.type("2")
            top.until(lambda screen: "decoding" in screen)
            top.type("Enter")
            screen = top.until(lambda screen: "route" in screen and "network" in screen)
            on = next(name for name in ("stage1.0", "stage1.1") if name in screen)
            other = {"stage1.0": "stage1.1", "stage1.1": "stage1.0"}[on]
            os.kill(cluster.children()[on].pid, signal.SIGKILL)
            top.until(lambda screen: f"→ {other}" in screen and "decoding" in screen)
            top.type("q", "4")
            top.until(lambda screen: "death" in screen and "reroute" in line(screen, "to take another route"))
            top.type("1")
            top.until(lambda screen: "ready" in line(screen, on))  # it was started again
            top.type("Home", *["Down"] * down_to(top.screen(), other), "d")
            top.until(lambda screen: f"Drain {other}?" in screen)
            top.type("Enter")
            top.until(lambda screen: "drained" in line(screen, other))
            top.type("3")
            top.until(lambda screen: "of 30 s" in line(screen, other))
            top.type("2", "c")
            top.until(lambda screen: "Cancel session" in screen)
            top.type("y")
            top.until(lambda screen: "no session" in screen)
            assert asking.wait(WAIT_S) is not None
            top.type("q")
    finally:
        asking.kill()
        asking.communicate()
    assert cluster.zrt("undrain", other).returncode == 0


def test_a_stage_is_restarted_by_a_key(cluster: Running) -> None:
    """And `zrt status --watch` tells a script the same."""
    before = cluster.children()["stage0.0"].pid
    with Terminal("top", home=cluster.home) as top:
        top.until("stage0.0")
        top.type("jj")
        top.type("r")
        top.until("Kill stage0.0 and start it again?")
        top.type("y")
        top.until("starts again")
        deadline = time.monotonic() + WAIT_S
        while (now := cluster.children().get("stage0.0")) is None or now.pid == before:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert top.wait("q") == 0
    with Terminal("top", home=cluster.home) as top:
        top.until("stage0.0")
        assert top.wait(CTRL_C) == 0
    with Terminal("status", "--watch", "--json", home=cluster.home) as status:
        seen = status.until("\n")
        assert json.loads(seen)["name"] == "test"
        status.until("\n")
        assert status.wait(typing=CTRL_C) == 0
        assert "interrupted" not in status.screen


def test_a_monitor_whose_terminal_is_closed_ends(cluster: Running) -> None:
    with Terminal("top", home=cluster.home) as top:
        top.until("stage0.0")
        process = psutil.Process(top.pid)
        top.hang_up()
        top.wait()
        assert not process.is_running()


def test_the_monitor_refuses_what_is_no_terminal() -> None:
    assert main(["top", "--connect", "tcp://127.0.0.1:9"]) == 2
