"""A cluster that loses processes for good, is drained, and goes down, as its users see it: real
processes, real signals."""

import json
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.clusters import cluster_file
from support.running import GREEDY, Running, answering, family, run_zrt, running, start_zrt

TOKENS = 1600
"""An answer of a second or so."""
ENDLESS = 50000


@pytest.fixture(scope="module")
def tiny(make_model: Callable[..., Path]) -> Path:
    """It never ends an answer by itself."""
    return make_model("llama", eos_token_id=None, max_position_embeddings=1 << 16)


def conf(folder: Path, home: Path, stages: int, **settings: object) -> str:
    file = home / "cluster.toml"
    file.write_text(cluster_file(folder, [None] * stages, **settings))
    return str(file)


def test_what_is_lost_for_good(tiny: Path, tmp_path: Path) -> None:
    """No process is started again. A spare takes one stage, and nobody notices; the other is lost:
    sessions are told, and the cluster stays."""
    words = conf(tiny, tmp_path, 2, model_context=60000, limits_restarts=0, spares_count=1)
    with running(words, home=tmp_path) as cluster:
        wanted = cluster.zrt(*GREEDY, "--max-tokens", str(TOKENS)).stdout
        with answering(cluster, TOKENS) as (process, first):
            cluster.children()["stage0"].kill()
            rest, said = process.communicate(timeout=60)
        assert process.returncode == 0, said
        assert first + rest == wanted
        with answering(cluster, ENDLESS) as (process, _):
            cluster.children()["stage1"].kill()
            _, said = process.communicate(timeout=60)
        assert process.returncode == 1
        lost = "stage 1 (blocks 2-3) is lost: stage1 was ended by signal 9 and is not started again"
        lost += ": another may join in its place, or `zrt down` and `zrt up`"
        assert said.splitlines()[-1] == f"zrt: stage_lost: {lost}"
        assert f"zrt: stage_lost: {lost}" in cluster.zrt(*GREEDY).stderr
        assert f"stage1 {lost.partition('stage1 ')[2]}" in cluster.zrt("drain", "stage1").stderr
        assert cluster.zrt("down", "--timeout", "1").returncode == 0
        assert cluster.process.wait(20) == 0
        assert "was ended by signal 9; the cluster stays" in cluster.process.stderr.read()
        assert family(tmp_path) == []


def test_a_coordinator_hears_of_those_who_were_lost_before_it_came(tiny: Path, tmp_path: Path) -> None:
    with running(conf(tiny, tmp_path, 2, limits_restarts=1), home=tmp_path) as cluster:
        stage1 = cluster.children()["stage1"]
        stage1.kill()
        deadline = time.monotonic() + 60
        while (again := cluster.children().get("stage1", stage1)) == stage1:
            assert time.monotonic() < deadline
        coordinator = cluster.children()["coordinator"]
        coordinator.kill()
        again.kill()
        lost = "zrt: stage_lost: stage 1 (blocks 2-3) is lost: stage1 was ended by signal 9 and is not started again"
        while lost not in (said := cluster.zrt(*GREEDY, "--max-tokens", "3", "--connect", cluster.endpoint).stderr):
            assert time.monotonic() < deadline, said
        assert cluster.end() == 0
        told = cluster.process.stderr.read()
        assert re.search(r"\nstage0: [0-9:.]{12} warning: lost the coordinator: the connection broke\n", told)


def test_a_spare_takes_the_place_of_one_that_died_with_the_coordinator(tiny: Path, tmp_path: Path) -> None:
    """The next coordinator knows nobody; it does not wait for who is only being started again."""
    with running(conf(tiny, tmp_path, 2, spares_count=1), home=tmp_path) as cluster:
        wanted = cluster.zrt(*GREEDY, "--max-tokens", "20").stdout
        both = [cluster.children()[name] for name in ("stage0", "coordinator")]
        for process in both:
            process.kill()
        deadline = time.monotonic() + 60
        while (again := cluster.children().get("stage0", both[0])) == both[0]:
            assert time.monotonic() < deadline
        again.suspend()  # it is started again, and does not come
        try:
            while '"spare0"' not in (said := stages(cluster)):
                assert time.monotonic() < deadline, said
            assert again.status() == "stopped"
        finally:
            again.resume()
        assert cluster.zrt(*GREEDY, "--max-tokens", "20").stdout == wanted
        assert cluster.end() == 0


def stages(cluster: Running) -> str:
    """The names of those that have blocks and are ready, as JSON."""
    status = cluster.zrt("status", "--json", "--connect", cluster.endpoint).stdout
    actors = json.loads(status).get("actors", [])  # an error, while there is no coordinator
    return json.dumps([actor["name"] for actor in actors if actor["stage"] >= 0 and actor["state"] == "ready"])


def test_drain_and_undrain(tiny: Path, tmp_path: Path) -> None:
    with running(conf(tiny, tmp_path, 2, model_context=60000), home=tmp_path) as cluster:
        wanted = cluster.zrt(*GREEDY, "--max-tokens", str(TOKENS)).stdout
        with answering(cluster, TOKENS) as (process, first):
            drain = cluster.zrt("drain", "stage1", "--timeout", "0")
            assert (drain.returncode, drain.stdout) == (0, ""), drain.stderr
            assert drain.stderr.splitlines()[-1] == "zrt: stage1 is drained: 1 parked"
            assert len(set(drain.stderr.splitlines())) == len(drain.stderr.splitlines())
            status = cluster.zrt("status").stdout
            assert "drained" in status
            assert "parked" in status
            again = cluster.zrt("drain", "stage1")
            assert (again.returncode, again.stderr.split(":")[1].strip()) == (1, "draining")
            assert process.poll() is None
            assert cluster.zrt("undrain", "stage1").returncode == 0
            rest, said = process.communicate(timeout=60)
        assert process.returncode == 0, said
        assert first + rest == wanted
        with answering(cluster, ENDLESS) as (process, _):
            left = start_zrt("drain", "stage1", home=cluster.home)
            assert left.stderr.readline() == "zrt: stage1 is draining: 1 left\n"
            left.send_signal(signal.SIGINT)
            _, said = left.communicate(timeout=20)
            goes_on = (
                "zrt: the drain of stage1 goes on: `zrt status` shows how it gets on, `zrt undrain stage1` ends it"
            )
            assert (left.returncode, said.splitlines()[-2:]) == (1, [goes_on, "zrt: interrupted"])
            assert "draining" in cluster.zrt("status").stdout
            assert cluster.zrt("undrain", "stage1").returncode == 0
            cluster.process.send_signal(signal.SIGINT)
            assert "sessions may go on for 5 s" in _line(cluster, "Ctrl-C again")
            assert cluster.zrt(*GREEDY).stderr.startswith("zrt: draining: ")
            started = time.monotonic()
            assert cluster.end() == 0
            assert time.monotonic() - started < 3
            _, said = process.communicate(timeout=2)
            assert said == "zrt: cancelled: the cluster was shut down\n"
        assert cluster.process.stderr.read().endswith("zrt: test is down (Ctrl-C)\n")
        assert family(tmp_path) == []


def _line(cluster: Running, part: str) -> str:
    """The next line of `zrt up` with this in it."""
    return next(line for line in iter(cluster.process.stderr.readline, "") if part in line)


def test_sessions_finish_before_the_cluster_goes(tiny: Path, tmp_path: Path) -> None:
    """It listens on every interface, and is reached where the command line says: by its own
    processes, by clients, and after a crash."""
    words = ["--listen", "tcp://0.0.0.0:0", "--insecure", "--advertise", "tcp://127.0.0.2"]
    with running(conf(tiny, tmp_path, 1, model_context=60000), *words, home=tmp_path) as cluster:
        assert cluster.endpoint.startswith("tcp://127.0.0.2:")
        options = json.loads(cluster.children()["stage0"].cmdline()[-1])
        assert options["join"] == cluster.endpoint
        cluster.children()["coordinator"].kill()
        elsewhere = cluster.endpoint.replace("127.0.0.2", "127.0.0.1")
        deadline = time.monotonic() + 60
        while '"ready":true' not in cluster.zrt("status", "--json", "--connect", elsewhere).stdout:
            assert time.monotonic() < deadline
        few = TOKENS // 4  # they end within the seconds that sessions are left, on a slow machine too
        with answering(cluster, few) as (process, first):
            assert cluster.end() == 0
            rest, said = process.communicate(timeout=60)
        assert process.returncode == 0, said
        assert len((first + rest).split()) == few
        assert family(tmp_path) == []


def test_an_address_that_leads_elsewhere_is_called_that(tiny: Path, tmp_path: Path) -> None:
    words = ["--listen", "tcp://0.0.0.0:0", "--insecure", "--advertise", "tcp://nowhere.invalid"]
    done = run_zrt("up", conf(tiny, tmp_path, 1), *words, home=tmp_path)
    assert done.returncode == 2
    assert "zrt: bad_config: [cluster] advertise: tcp://nowhere.invalid:" in done.stderr
    assert "does not lead to this machine" in done.stderr
    assert family(tmp_path) == []
