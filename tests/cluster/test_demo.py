"""The demo model through real processes: the same answers as transformers, and what a stage costs
in memory."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
import torch
from support.clusters import cluster_file
from support.running import Running, run_zrt, running
from transformers import AutoModelForCausalLM, AutoTokenizer

from zrt.runtime.cluster.file_loader import parse
from zrt.runtime.cluster.seats import stage_ranges
from zrt.runtime.models.architecture.spec import read_spec
from zrt.runtime.models.checkpoint.formats.dense import FLOAT32
from zrt.runtime.models.checkpoint.layout import shard_bytes

PROMPTS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain in one sentence why the sky is blue.",
    "List three prime numbers above 100.",
    "Übersetze ins Deutsche: good morning, 世界 🌍",
]
TOKENS = 20

pytestmark = pytest.mark.demo


@pytest.fixture(scope="module")
def answers(demo_model: Path) -> dict[str, list[int]]:
    """transformers' greedy ids of each prompt, its end token included."""
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    torch.set_num_threads(1)
    found = {}
    for prompt in PROMPTS:
        chat = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        with torch.inference_mode():
            out = model.generate(**ids, do_sample=False, max_new_tokens=TOKENS)
        found[prompt] = out[0, ids["input_ids"].shape[1] :].tolist()
    return found


@pytest.fixture(
    scope="module", params=[pytest.param(1, marks=pytest.mark.chaos), 2, pytest.param(3, marks=pytest.mark.chaos)]
)
def cluster(
    request: pytest.FixtureRequest, demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    home = tmp_path_factory.mktemp("home")
    conf = home / "cluster.toml"
    conf.write_text(_conf(demo_model, request.param))
    with running(str(conf), home=home) as up:
        yield up


def _conf(folder: Path, stages: int) -> str:
    return cluster_file(folder, [None] * stages, threads=1, model_context=512)


def test_greedy_answers_equal_transformers(cluster: Running, answers: dict[str, list[int]], demo_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    for number, (prompt, wanted) in enumerate(answers.items()):
        asked = "-" if number == 1 else prompt  # once from standard input, which is not read otherwise
        words = ["generate", asked, "--max-tokens", str(TOKENS), "--temperature", "0", "--json"]
        done = run_zrt(*words, home=cluster.home, stdin=prompt + "\n")
        assert done.returncode == 0, done.stderr
        got = msgspec.json.decode(done.stdout)
        assert got["token_ids"] == wanted
        assert got["text"] == tokenizer.decode(wanted, skip_special_tokens=True)
        assert got["completion_tokens"] == len(wanted)
        assert got["finish_reason"] == ("stop" if len(wanted) < TOKENS else "length")


def test_a_seeded_sample_is_the_same_through_every_cut(cluster: Running, seen: dict[str, str]) -> None:
    words = ["generate", PROMPTS[1], "--max-tokens", "30", "--temperature", "0.9", "--seed", "11"]
    text = cluster.zrt(*words).stdout
    assert text.strip()
    assert text == seen.setdefault("text", text)


@pytest.fixture(scope="module")
def seen() -> dict[str, str]:
    return {}


def test_the_coordinator_never_loads_torch(cluster: Running) -> None:
    """Looked at in the running process, after it has served requests."""
    assert cluster.zrt("generate", "hi", "--max-tokens", "2").returncode == 0
    mapped = Path(f"/proc/{cluster.children()['coordinator'].pid}/maps").read_text()
    assert "tokenizers" in mapped
    assert "libtorch" not in mapped


def test_a_stage_costs_its_own_shard(cluster: Running, demo_model: Path, bare: int) -> None:
    """The peak of resident memory, loading included, over that of a blank block server; KV pages
    come only with sessions."""
    spec = read_spec(demo_model)
    children = cluster.children()
    stages = [name for name in sorted(children) if name.startswith("stage")]
    ranges = stage_ranges(parse(_conf(demo_model, len(stages)), "test"), spec)
    for name, blocks in zip(stages, ranges, strict=True):
        shard = shard_bytes(spec, blocks.first, blocks.last, FLOAT32)
        assert _peak(children[name].pid) - bare <= 1.3 * shard


@pytest.fixture(scope="module")
def bare(cluster: Running) -> int:
    """Peak resident bytes of a block server that was given nothing."""
    words = ["actor", "block-server", "--join", cluster.endpoint, "--name", "bystander", "--threads", "1"]
    process = subprocess.Popen([sys.executable, "-m", "zrt.runtime.cli.main", *words])
    try:
        for _ in range(600):
            status = msgspec.json.decode(cluster.zrt("status", "--json").stdout)
            if any(actor["name"] == "bystander" and actor["rss_bytes"] for actor in status["actors"]):
                return _peak(process.pid)
        raise AssertionError("the bystander never joined")
    finally:
        process.terminate()
        process.wait(20)


def _peak(pid: int) -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) * 1024


def test_nothing_is_left_behind(cluster: Running) -> None:
    """Last in this module: `zrt down` ends everything, and `zrt up` with status 0."""
    children = list(cluster.children().values())
    assert cluster.zrt("down").returncode == 0
    assert cluster.process.wait(20) == 0
    assert not psutil.wait_procs(children, 5)[1]
