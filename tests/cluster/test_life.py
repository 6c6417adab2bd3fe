"""The life of a cluster: interrupted at every moment of its start, its processes killed one by one.
Nothing hangs, nothing is left behind."""

import asyncio
import json
import random
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.clusters import cluster_file
from support.running import (
    END_S,
    GREEDY,
    Running,
    answering,
    begun,
    family,
    free_port,
    gone,
    running,
    slow_model,
    start_zrt,
)
from support.terminal import Terminal

from zrt.actors.node.node import STOP_S
from zrt.runtime.cli.commands import down as down_command
from zrt.runtime.client import client
from zrt.runtime.errors import ZrtError

PROMPT = "1,2,3"
TOKENS = 400
"""An answer of a second or so."""
ORPHAN_S = 5.0
"""No process outlives its parent by more."""


@pytest.fixture(scope="module")
def tiny(make_model: Callable[..., Path]) -> Path:
    """It never ends an answer by itself."""
    return make_model("llama", eos_token_id=None, max_position_embeddings=1 << 16)


@pytest.fixture
def conf(tiny: Path, tmp_path: Path) -> str:
    return write_conf(tiny, tmp_path)


def write_conf(model: Path, home: Path, *, stages: int = 2, **settings: object) -> str:
    file = home / "cluster.toml"
    file.write_text(cluster_file(model, [None] * stages, model_context=60000, **settings))
    return str(file)


# ---- start-up, interrupted -----------------------------------------------------------------------


def _children(home: Path, count: int) -> Callable[[subprocess.Popen[str]], None]:
    """Until `zrt up` has started so many processes."""

    def wait(process: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + END_S
        while len(family(home)) < 1 + count:
            assert process.poll() is None
            assert time.monotonic() < deadline

    return wait


def _loading(process: subprocess.Popen[str]) -> None:
    assert "…" in process.stderr.readline()


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return slow_model(tmp_path_factory.mktemp("slow"))


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("coordinator starts", signal.SIGINT),
        ("block servers start", signal.SIGINT),
        ("block servers start", signal.SIGTERM),
        ("stages load", signal.SIGINT),
        ("stages load", signal.SIGHUP),
    ],
)
def test_start_up_is_interrupted(moment: str, number: signal.Signals, slow: Path, tmp_path: Path) -> None:
    """A little (seeded) while after the moment, so that the runs of this table differ."""
    until = {
        "coordinator starts": _children(tmp_path, 1),
        "block servers start": _children(tmp_path, 3),
        "stages load": _loading,
    }
    process = start_zrt("up", write_conf(slow, tmp_path, model_weights="random"), home=tmp_path)
    until[moment](process)
    left = family(tmp_path)
    time.sleep(random.Random(f"{moment} {number}").uniform(0, 0.2))
    process.send_signal(number)
    _, words = process.communicate(timeout=END_S)
    assert process.returncode == 1, words
    assert words.splitlines()[-1] == "zrt: cancelled: test was told to end before it was ready"
    assert "Traceback" not in words
    assert gone(left, 0)
    assert family(tmp_path) == []


def test_fetching_is_interrupted(tmp_path: Path) -> None:
    """While a hub is asked that takes the call and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as hub:
        hub.settimeout(END_S)
        there = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}", "HF_HUB_OFFLINE": "0"}
        process = start_zrt("up", "--model", "some/model", home=tmp_path, HF_HOME=str(tmp_path), **there)
        with hub.accept()[0]:
            process.send_signal(signal.SIGINT)
            _, words = process.communicate(timeout=END_S)
    assert process.returncode == 1
    assert words.splitlines()[-1] == "zrt: interrupted"
    assert "Traceback" not in words


def test_the_first_instant_is_interrupted(conf: str, tmp_path: Path) -> None:
    """Python may not have got to our first line: all we ask is that it ends, and leaves nothing."""
    for seed in range(3):
        process = start_zrt("up", conf, home=tmp_path)
        time.sleep(random.Random(seed).uniform(0, 0.3))
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=END_S)
        assert process.returncode != 0
        assert family(tmp_path) == []


def test_an_interrupted_detach_takes_its_cluster_with_it(conf: str, tmp_path: Path) -> None:
    process = start_zrt("up", conf, "--detach", home=tmp_path)
    _children(tmp_path, 4)(process)
    process.send_signal(signal.SIGINT)
    _, words = process.communicate(timeout=END_S)
    assert process.returncode == 1
    assert words.endswith("zrt: interrupted\n")
    assert family(tmp_path) == []


def test_an_answer_is_interrupted(tiny: Path, tmp_path: Path) -> None:
    conf = write_conf(tiny, tmp_path, stages=1)
    words = ["--token-ids", PROMPT, "--max-tokens", "50000", "--temperature", "0"]
    process = start_zrt("up", conf, *words, home=tmp_path)
    begun(process)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=END_S)
    assert process.returncode == 1
    assert said.splitlines()[-1] == "zrt: cancelled: test was told to end before the question was answered"
    assert family(tmp_path) == []


def test_a_second_ctrl_c_does_not_wait_for_a_process_that_hangs(conf: str, tmp_path: Path) -> None:
    with running(conf, home=tmp_path) as cluster:
        stage = cluster.children()["stage1"]
        stage.suspend()
        cluster.process.send_signal(signal.SIGINT)
        gone([cluster.children()["stage0"]], END_S)
        cluster.process.send_signal(signal.SIGINT)
        assert cluster.process.wait(STOP_S - 1) == 0, cluster.process.stderr.read()
        assert family(tmp_path) == []


@pytest.mark.parametrize("harm", ["kill", "suspend"])
def test_a_coordinator_that_dies_or_hangs_while_the_cluster_goes_down_keeps_nothing_up(
    harm: str, conf: str, tmp_path: Path
) -> None:
    with running(conf, home=tmp_path) as cluster, answering(cluster, 50000):
        down = start_zrt("down", "--timeout", "60", home=tmp_path)
        until_status(cluster, lambda status: any(event["kind"] == "down" for event in status["happened"]))
        processes = cluster.children()
        getattr(processes["coordinator"], harm)()
        assert cluster.process.wait(END_S) == 0, cluster.process.stderr.read()
        _, said = down.communicate(timeout=END_S)
        assert (down.returncode, said) == (0, "zrt: test is down\n")
        assert gone(list(processes.values()), 0)


def test_a_zrt_up_that_did_not_hear_that_its_cluster_went_down_ends_as_well(conf: str, tmp_path: Path) -> None:
    with running(conf, home=tmp_path) as cluster:
        coordinator = cluster.children()["coordinator"]
        cluster.process.send_signal(signal.SIGSTOP)
        until_status(cluster, lambda status: any(event["where"] == "up" for event in status["happened"]))
        down = start_zrt("down", "--timeout", "0", home=tmp_path)
        deadline = time.monotonic() + END_S
        while coordinator.status() != psutil.STATUS_ZOMBIE:  # its parent cannot wait for it
            assert time.monotonic() < deadline
        cluster.process.send_signal(signal.SIGCONT)
        assert cluster.process.wait(END_S) == 0, cluster.process.stderr.read()
        _, said = down.communicate(timeout=END_S)
        assert (down.returncode, said) == (0, "zrt: test is down\n")
        assert family(tmp_path) == []


def test_a_block_server_started_by_hand_serves_the_next_cluster_there(tiny: Path, tmp_path: Path) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    conf = write_conf(tiny, tmp_path, stages=1, cluster_listen=endpoint)
    words = ("--join", endpoint, "--name", "mine", "--listen", "tcp://127.0.0.1:0", "--threads", "1")
    mine = start_zrt("actor", "block-server", *words, home=tmp_path / "mine")
    try:
        for _ in range(2):
            with running(conf, home=tmp_path) as cluster:

                def waits(status: dict[str, Any]) -> bool:
                    return any((one["name"], one["state"]) == ("mine", "blank") for one in status["actors"])

                until_status(cluster, waits)
                down = cluster.zrt("down")
                assert down.returncode == 0, down.stderr
                assert cluster.process.wait(END_S) == 0
    finally:
        mine.kill()
        said = mine.communicate()[1]
    assert said.count(f"mine: the cluster went down; waiting until it is back at {endpoint}") == 2
    assert "loads blocks" not in said


def words_of(process: psutil.Process) -> list[str]:
    """Its command line; none if it is just ending, as what a process starts for a moment is."""
    with suppress(psutil.Error):
        return process.cmdline()
    return []


def test_a_replica_that_loads_longer_than_another_is_shown_to_its_end(slow: Path, tmp_path: Path) -> None:
    """It is stopped until the cluster is ready without it."""
    process = start_zrt("up", write_conf(slow, tmp_path, stages=1, replicas=2, model_weights="random"), home=tmp_path)
    try:
        said = iter(process.stderr.readline, "")
        what = next(line for line in said if line.startswith("stage0.")).partition(" ")[0]
        late = next(one for one in family(tmp_path) if what in words_of(one))
        late.suspend()
        assert any("is ready at" in line for line in said)
        late.resume()
        assert any(line.startswith(f"{what} (blocks 0-15): done") for line in said)
        process.send_signal(signal.SIGTERM)
        assert list(said)[-1] == "zrt: test is down (SIGTERM)\n"
        assert process.wait(END_S) == 0
    finally:
        process.kill()
        process.communicate()


# ---- ends ----------------------------------------------------------------------------------------


def test_a_closed_terminal_ends_the_cluster(tiny: Path, tmp_path: Path) -> None:
    with Terminal("up", write_conf(tiny, tmp_path, stages=1), home=tmp_path) as terminal:
        terminal.until("is ready at")
        processes = family(tmp_path)
        assert len(processes) == 3
        terminal.hang_up()
        assert terminal.wait() == 0
        assert gone(processes, 0)


def test_a_zrt_up_that_hangs_is_named_and_nothing_outlives_its_kill(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZRT_HOME", str(tmp_path))
    monkeypatch.setattr(client, "DOWN_S", 1.0)
    monkeypatch.setattr(down_command, "DOWN_S", 1.0)
    with running(write_conf(tiny, tmp_path, stages=1), home=tmp_path) as cluster:
        processes = family(tmp_path)
        assert len(processes) == 3
        cluster.process.send_signal(signal.SIGSTOP)
        with pytest.raises(ZrtError) as raised:
            asyncio.run(down_command.bring_down(None, 0.0))
        assert raised.value.kind == "deadline"
        assert f"kill -9 {cluster.process.pid}" in raised.value.message
        cluster.process.kill()
        cluster.process.wait()
        assert gone([process for process in processes if process.pid != cluster.process.pid], ORPHAN_S)
        host, port = cluster.endpoint.removeprefix("tcp://").split(":")
        with closing(socket.socket()) as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind((host, int(port)))
        status = cluster.zrt("status")
        assert (status.returncode, "no cluster runs here" in status.stderr) == (1, True)


# ---- deaths --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    home = tmp_path_factory.mktemp("home")
    with running(write_conf(tiny, home), home=home) as up:
        yield up


def until_status(cluster: Running, wanted: Callable[[dict[str, object]], bool]) -> dict[str, object]:
    deadline = time.monotonic() + 60
    while not wanted(status := json.loads(cluster.zrt("status", "--json").stdout)):
        assert time.monotonic() < deadline, status
    return status


@pytest.fixture(scope="module")
def wanted(cluster: Running) -> str:
    """The whole answer, undisturbed."""
    return cluster.zrt(*GREEDY, "--max-tokens", str(TOKENS)).stdout


@pytest.mark.parametrize("name", ["stage0", "stage1"])
def test_a_killed_stage_comes_back_and_the_answer_goes_on(name: str, cluster: Running, wanted: str) -> None:
    with answering(cluster, TOKENS) as (process, first):
        killed = cluster.children()[name]
        killed.kill()
        rest, words = process.communicate(timeout=60)
    assert process.returncode == 0, words
    assert first + rest == wanted
    status = until_status(cluster, lambda status: bool(status["ready"]))
    (stage,) = [actor for actor in status["actors"] if actor["name"] == name]
    assert stage["restarts"] == 1
    assert cluster.children()[name].pid == stage["pid"] != killed.pid
    assert cluster.process.stderr is not None
    lines = iter(cluster.process.stderr.readline, "")
    assert any(re.fullmatch(rf"zrt: {name} is ready again, \d+\.\d s after it was lost\n", line) for line in lines)


def test_the_waiting_is_shown_on_a_terminal(cluster: Running, wanted: str) -> None:
    with Terminal(*GREEDY, "--max-tokens", str(TOKENS), home=cluster.home) as terminal:
        terminal.until(wanted[:4])
        cluster.children()["stage1"].kill()
        terminal.until("[waiting (stage1 is gone)]\r\n")
        assert terminal.wait() == 0


def test_a_killed_coordinator_comes_back_where_it_was(cluster: Running) -> None:
    """The sessions it knew are lost, and their clients told. The stages keep what they hold:
    nothing is assigned or read again."""
    stages = {name: process for name, process in cluster.children().items() if name != "coordinator"}
    before = until_status(cluster, lambda status: bool(status["ready"]))
    restarts = {actor["name"]: actor["restarts"] for actor in before["actors"]} | {"coordinator": 1}
    with answering(cluster, 50000) as (process, _):
        killed = cluster.children()["coordinator"]
        killed.kill()
        _, words = process.communicate(timeout=30)
        assert process.returncode == 1
        assert words.splitlines()[-1].startswith("zrt: coordinator_lost: ")
    assert gone([killed])
    deadline = time.monotonic() + 60
    while cluster.zrt("status", "--json", "--connect", cluster.endpoint).returncode:
        assert time.monotonic() < deadline
    status = until_status(cluster, lambda status: bool(status["ready"]) and len(status["actors"]) == 4)
    for actor in status["actors"]:
        if actor["kind"] == "block_server":
            assert (actor["pid"], actor["done_bytes"]) == (stages[actor["name"]].pid, 0)
    assert {actor["name"]: actor["restarts"] for actor in status["actors"]} == restarts
    assert {actor["kind"] for actor in status["actors"]} == {"block_server", "coordinator", "supervisor"}
    assert cluster.zrt(*GREEDY, "--max-tokens", "3").returncode == 0


def test_a_coordinator_that_dies_too_often_ends_the_cluster(tiny: Path, tmp_path: Path) -> None:
    with running(write_conf(tiny, tmp_path, stages=1, limits_restarts=1), home=tmp_path) as cluster:
        pids: list[int] = []
        deadline = time.monotonic() + 60
        while len(pids) <= 1:
            assert time.monotonic() < deadline
            found = cluster.children().get("coordinator")
            if found is not None and found.pid not in pids:
                pids.append(found.pid)
                found.kill()
        _, words = cluster.process.communicate(timeout=60)
        assert cluster.process.returncode == 1
        last = f"zrt: coordinator_lost: coordinator (process {pids[-1]}) was ended by signal 9, after 1 restart"
        assert words.splitlines()[-1] == last
        assert family(tmp_path) == []


def test_sigterm_ends_a_cluster_in_good_order(cluster: Running) -> None:
    """The last test with this cluster, after all it has been through."""
    assert cluster.end(signal.SIGTERM) == 0
    assert family(cluster.home) == []
