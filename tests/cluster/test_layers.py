"""Layers lent to workers under `zrt up`: one that it starts, and one that joins from elsewhere with
a cache of its own."""

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.clusters import memory_for
from support.running import free_port, run_zrt, running, start_zrt
from support.tiny_models import reference

from zrt.runtime.cluster import file_loader

MACHINES = Path(__file__).parents[2] / "docs" / "machines.md"
CONF = Path(__file__).parents[2] / "conf" / "layers.toml"
PROMPT = [5, 17, 99, 3, 42, 42, 7, 120]
TOKENS = 24
FILE = """
[cluster]
listen = "tcp://127.0.0.1:0"
[model]
ref = "{folder}"
context = 128
[kv]
bytes = "16MiB"
[[stage]]
threads = 1
[[stage.lend]]
worker = "attic"
blocks = "1-2"
[[stage.lend]]
worker = "cellar"
blocks = "4"
[[worker]]
name = "attic"
threads = 1
[[worker]]
name = "cellar"
join = true
"""


@contextmanager
def joining(name: str, endpoint: str, home: Path) -> Iterator["subprocess.Popen[str]"]:
    process = start_zrt("worker", "--join", endpoint, "--name", name, "--threads", "1", home=home)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_cluster_lends_to_a_worker_of_its_own_and_to_one_elsewhere_and_outlives_both(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    port = free_port()
    folder = make_model("llama", num_hidden_layers=6)
    wanted = reference(folder, PROMPT, TOKENS)
    file = tmp_path / "layers.toml"
    file.write_text(FILE.format(folder=folder).replace("127.0.0.1:0", f"127.0.0.1:{port}"))
    words = ["--token-ids", ",".join(map(str, PROMPT)), "--max-tokens", str(TOKENS), "--temperature", "0", "--json"]
    here, there = tmp_path / "here", tmp_path / "there"
    with joining("cellar", f"tcp://127.0.0.1:{port}", there) as cellar, running(str(file), home=here) as cluster:

        def ask() -> list[int]:
            answer = cluster.zrt("generate", *words)
            assert answer.returncode == 0, answer.stderr
            token_ids: list[int] = json.loads(answer.stdout)["token_ids"]
            return token_ids

        assert ask() == wanted
        assert [path.name for path in there.rglob("*.safetensors")] == ["layer-00004.safetensors"]
        assert len(list(here.rglob("*.safetensors"))) == 2
        cluster.children()["attic"].kill()
        assert ask() == wanted
        cellar.kill()
        assert cellar.stderr is not None
        joins, reached, joined, *_ = cellar.stderr.read().splitlines()
        stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} info cellar: "
        assert re.fullmatch(f"{stamp}a layer worker, is joining the coordinator at {cluster.endpoint}", joins)
        assert re.fullmatch(f"{stamp}is reached at tcp://127.0.0.1:[0-9]+", reached)
        assert re.fullmatch(f"{stamp}joined the coordinator at {cluster.endpoint}", joined)
        with joining("cellar", cluster.endpoint, there) as again:
            assert ask() == wanted
            assert cluster.end() == 0
            assert again.poll() is None  # it outlives the cluster, for the next one
            again.kill()
            assert again.stderr is not None
            said = again.stderr.read()
            assert f"info cellar: the cluster went down; waiting until it is back at {cluster.endpoint}\n" in said
            assert "lost the coordinator" not in said


def test_the_docs_two_commands_lend_a_second_machines_memory(make_model: Callable[..., Path], tmp_path: Path) -> None:
    """As they stand, but for the two machines' addresses, which are both this one's, and the model,
    of which two blocks fit on the first one."""
    folder = make_model("llama", num_hidden_layers=6)
    text = MACHINES.read_text().partition("## Lending layers")[2]
    conf, commands = text.split("```toml\n")[1].partition("```")[0], text.partition("```sh\n")[2].partition("```")[0]
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    file = tmp_path / "two-machines.toml"
    conf = conf.replace("tcp://10.0.0.1:7411", endpoint).replace("smollm2-135m", str(folder))
    file.write_text(conf + f"memory = {memory_for(folder, 2, kv_bytes=1 << 30)}\n")
    lend, up = (line.split()[1:] for line in commands.strip().splitlines())
    there = {"tcp://10.0.0.1:7411": endpoint, "tcp://10.0.0.2:0": "tcp://127.0.0.1:0", "two-machines.toml": str(file)}
    lend, up = ([there.get(word, word) for word in words] for words in (lend, up))
    assert (lend[0], up[0]) == ("worker", "up")
    words = ["--token-ids", ",".join(map(str, PROMPT)), "--max-tokens", str(TOKENS), "--temperature", "0", "--json"]
    second = start_zrt(*lend, home=tmp_path / "second")
    try:
        with running(*up[1:], home=tmp_path / "first") as cluster:
            answer = cluster.zrt("generate", *words)
            assert json.loads(answer.stdout)["token_ids"] == reference(folder, PROMPT, TOKENS), answer.stderr
            seen = json.loads(cluster.zrt("status", "--json").stdout)["actors"]
            stage = next(actor for actor in seen if actor["name"] == "stage0")
            (worker,) = stage["lend"]["workers"]
            assert worker["state"] == "ready"
            assert worker["pushed_bytes"] == worker["total_bytes"] > 0
            assert (stage["lend"]["own"], worker["layers"]) == ("0-1", "2-5")
    finally:
        second.kill()
        second.communicate()


@pytest.mark.demo
@pytest.mark.chaos
def test_the_packaged_file_lends_ten_blocks_of_the_demo_model(demo_model: Path, tmp_path: Path) -> None:
    conf = file_loader.load(CONF)
    assert [(lend.worker, str(lend.blocks)) for lend in conf.stages[0].lend] == [("attic", "10-19")]
    file = tmp_path / "layers.toml"
    text = CONF.read_text().replace('name = "layers"', 'name = "layers"\nlisten = "tcp://127.0.0.1:0"', 1)
    file.write_text(text.replace('"smollm2-135m"', f'"{demo_model}"'))
    words = ["--prompt", "What is the capital of France?", "--temperature", "0", "--max-tokens", "12"]
    answer = run_zrt("up", str(file), *words, home=tmp_path, timeout=120)
    assert answer.returncode == 0, answer.stderr
    assert "Paris" in answer.stdout


@pytest.mark.chaos
def test_sessions_end_with_worker_failed_when_a_pinned_worker_is_not_started_again(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_model("llama", num_hidden_layers=6)
    file = tmp_path / "layers.toml"
    text = FILE.format(folder=folder).replace("join = true", "threads = 1")
    file.write_text(text + "[limits]\nrestarts = 0\n")
    words = ["--token-ids", "5,17,99", "--max-tokens", "4", "--temperature", "0"]
    with running(str(file), home=tmp_path) as cluster:
        assert cluster.zrt("generate", *words).returncode == 0
        cluster.children()["attic"].kill()
        answer = cluster.zrt("generate", *words)
        assert answer.returncode == 1
        assert "zrt: worker_failed: stage 0 (blocks 0-5) is lost" in answer.stderr
        assert "attic is not started again, and blocks are pinned to it" in answer.stderr
        assert "waits for" not in cluster.zrt("status").stdout
        assert cluster.end() == 0
        assert cluster.process.stderr is not None
        said = cluster.process.stderr.read()
    assert re.search(
        r"^zrt: worker_failed: attic \(process \d+\) was ended by signal 9; the cluster stays$", said, re.M
    )
    assert "are given out again" not in said


@pytest.mark.demo
@pytest.mark.chaos
def test_the_demo_model_with_blocks_10_to_19_on_two_workers(demo_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "layers.toml"
    text = FILE.format(folder=demo_model).replace("join = true", "threads = 1")
    file.write_text(text.replace('"1-2"', '"10-14"').replace('"4"', '"15-19"').replace('"16MiB"', '"256MiB"'))
    prompt = [504, 3575, 282, 4649, 314, 260]
    words = [
        "--token-ids",
        ",".join(map(str, prompt)),
        "--max-tokens",
        "32",
        "--temperature",
        "0",
        "--ignore-eos",
        "--json",
    ]
    with running(str(file), home=tmp_path) as cluster:
        answer = cluster.zrt("generate", *words)
        assert answer.returncode == 0, answer.stderr
        assert json.loads(answer.stdout)["token_ids"] == reference(demo_model, prompt, 32)
