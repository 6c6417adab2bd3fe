"""`zrt check`, `zrt plan` and what `zrt up` refuses before it starts anything, as commands."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import psutil
import pytest
from support.broken import CASES, ONLY_SURVEYED, broken_copy
from support.clusters import cluster_file
from support.running import run_zrt

MakeModel = Callable[..., Path]
Zrt = Callable[..., CompletedProcess[str]]


@pytest.fixture
def zrt(tmp_path: Path) -> Zrt:
    """Run a command with a home of its own."""

    def run(*words: object) -> CompletedProcess[str]:
        return run_zrt(*map(str, words), home=tmp_path / "home")

    return run


@pytest.fixture
def conf(tmp_path: Path) -> Callable[..., Path]:
    """The path of a cluster file."""

    def write(model: Path, stages: list[str | None] | None = None, more: str = "", **settings: object) -> Path:
        file = tmp_path / "cluster.toml"
        file.write_text(cluster_file(model, stages or [None, None], **settings) + more)
        return file

    return write


# ---- zrt check -----------------------------------------------------------------------------------


def test_a_usable_model_is_described(make_model: MakeModel, zrt: Zrt) -> None:
    folder = make_model("qwen3", dtype="bfloat16", files=3)
    done = zrt("check", folder)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"{folder}: qwen3, 4 blocks, ")
    assert "context    512 tokens; vocabulary 160; head of its own" in done.stdout
    assert "BF16" in done.stdout
    assert lines[-1] == "can be run"


def test_check_as_json(make_model: MakeModel, zrt: Zrt) -> None:
    folder = make_model("llama", tied=True)
    done = zrt("check", folder, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    said = json.loads(done.stdout)
    assert said == {
        "usable": True,
        "model": str(folder),
        "family": "llama",
        "blocks": 4,
        "parameters": said["weight_bytes"] // 4,
        "vocab_size": 160,
        "context": 512,
        "tied": True,
        "weight_files": 1,
        "weight_bytes": (160 * 64 + 64 + 4 * (2 * 64 + 2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64)) * 4,
        "dtypes": {"F32": said["weight_bytes"]},
        "tokenizer": False,
        "chat_template": False,
        "eos_ids": [2],
        "problems": [],
        "notes": ["no tokenizer.json: only token ids can be sent (--token-ids)"],
    }


def test_every_problem_is_listed(make_model: MakeModel, tmp_path: Path, zrt: Zrt) -> None:
    folder = broken_copy(ONLY_SURVEYED["several problems at once"], make_model, tmp_path)
    done = zrt("check", folder)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "cannot be run: 3 problems"
    up = "model.layers.{0-1,3}.mlp.up_proj.weight"
    assert done.stderr.splitlines() == [
        f"zrt: bad_model: tensor model.norm.weight is missing from the checkpoint in {folder}",
        f"zrt: bad_model: tensor {up} is missing from the checkpoint in {folder}",
        f"zrt: bad_model: tensor lm_head.weight in {folder}/model.safetensors is [160, 32], not [160, 64]",
    ]
    said = json.loads(zrt("check", folder, "--json").stdout)
    assert not said["usable"]
    assert [f"zrt: {each['kind']}: {each['message']}" for each in said["problems"]] == done.stderr.splitlines()


def test_what_is_no_model_is_said(tmp_path: Path, zrt: Zrt) -> None:
    done = zrt("check", tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"zrt: bad_model: the folder {tmp_path} has no config.json" in done.stderr


# ---- zrt plan ------------------------------------------------------------------------------------


def test_a_plan_is_a_table(make_model: MakeModel, conf: Callable[..., Path], zrt: Zrt) -> None:
    done = zrt("plan", conf(make_model("llama"), ["0-0", None]))
    assert (done.returncode, done.stderr) == (0, "")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if "│" in line]
    assert [row[:4] for row in rows] == [["stage0", "0-0", "1", "cpu"], ["stage1", "1-3", "1", "cpu"]]
    assert [row[5] for row in rows] == ["64.0 MiB", "64.0 MiB"]
    assert "of this machine's memory are available" in done.stdout


def test_plan_as_json(make_model: MakeModel, conf: Callable[..., Path], zrt: Zrt) -> None:
    file = conf(make_model("llama"), ["0-0", None])
    said = json.loads(zrt("plan", file, "--json").stdout)
    first, second = said["stages"]
    assert (first["blocks"], second["blocks"]) == ("0-0", "1-3")
    block, matrix = 2 * 64 + 2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64, 160 * 64
    assert first["weight_bytes"] == 4 * (matrix + block)
    assert second["weight_bytes"] == 4 * (matrix + 64 + 3 * block)
    page = 16 * 3 * 2 * 32 * 4
    assert (second["kv_bytes"], second["kv_tokens"]) == (64 << 20, (64 << 20) // page * 16)
    assert said["kv_tokens"] == second["kv_tokens"]
    for stage in said["stages"]:
        assert stage["total_bytes"] == stage["weight_bytes"] + stage["kv_bytes"] + stage["process_bytes"]
    assert said["needed_bytes"] == said["coordinator_bytes"] + first["total_bytes"] + second["total_bytes"]
    assert 0 < said["available_bytes"] < psutil.virtual_memory().total
    assert (said["fits"], said["error"]) == (True, None)


def test_the_command_line_overrides_the_file(make_model: MakeModel, conf: Callable[..., Path], zrt: Zrt) -> None:
    file = conf(make_model("llama"))
    said = json.loads(zrt("plan", file, "--model", make_model("qwen3", tied=True), "--stages", 4, "--json").stdout)
    assert (said["family"], [stage["blocks"] for stage in said["stages"]]) == ("qwen3", ["0-0", "1-1", "2-2", "3-3"])


def test_a_plan_needs_no_weights(make_model: MakeModel, tmp_path: Path, conf: Callable[..., Path], zrt: Zrt) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(make_model("llama") / "config.json", folder)
    assert zrt("plan", conf(folder)).returncode == 0


def test_a_head_that_the_files_hold_beside_a_tied_embedding_counts(
    make_model: MakeModel, tmp_path: Path, conf: Callable[..., Path], zrt: Zrt
) -> None:
    folder = shutil.copytree(make_model("llama"), tmp_path / "model")
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(text | {"tie_word_embeddings": True}))
    shipped, tied = (
        json.loads(zrt("plan", conf(model, [None]), "--json").stdout)["stages"][0]["weight_bytes"]
        for model in (folder, make_model("llama", tied=True))
    )
    assert shipped - tied == 160 * 64 * 4


def test_a_session_of_the_whole_context_that_does_not_fit_is_noted(
    make_model: MakeModel, conf: Callable[..., Path], zrt: Zrt
) -> None:
    done = zrt("plan", conf(make_model("llama"), kv_bytes="64KiB"))
    assert done.returncode == 0
    assert "note: KV memory holds 128 tokens, less than the context: longer sessions are refused" in done.stdout


def test_a_context_above_the_models_is_said(make_model: MakeModel, conf: Callable[..., Path], zrt: Zrt) -> None:
    file = conf(make_model("llama", max_position_embeddings=512), model_context=4096)
    said = "zrt: the model's context is 512 tokens: no session is longer, although [model] context is 4096\n"
    planned = zrt("plan", file, "--json")
    assert (planned.stderr, json.loads(planned.stdout)["context"]) == (said, 512)
    assert said in zrt("up", file, "--token-ids", "1,2", "--max-tokens", "1").stderr


def test_a_gpu_that_is_not_there_is_told_beside_the_plan(
    make_model: MakeModel, conf: Callable[..., Path], zrt: Zrt
) -> None:
    file = conf(make_model("llama"), ["0-1", None], device="cuda:99")
    done = zrt("plan", file)
    assert done.returncode == 1
    assert done.stderr.startswith("zrt: unsupported: there is no device cuda:99 here: ")
    machine, gpu = done.stdout.splitlines()[-2:]
    assert "weights and KV on GPUs are not in it" in machine
    assert gpu.startswith("cuda:99: 128.5 MiB of weights and KV; there is no device cuda:99 here")


def test_what_layer_workers_may_hold_is_told_apart(make_model: MakeModel, conf: Callable[..., Path], zrt: Zrt) -> None:
    done = zrt("plan", conf(make_model("llama"), [None], helped=True))
    assert (done.returncode, done.stderr) == (0, "")
    (said,) = [line for line in done.stdout.splitlines() if line.startswith("stage0: of its ")]
    assert "blocks 0-3 and their KV, 64.5 MiB, are shared with layer workers when they join, by their memory" in said
    assert said.endswith("; it is ready without any, too")

    total = re.match(r"stage0: of its ([\d.]+) MiB", said)
    assert total is not None
    limit = int(float(total[1]) - 32) << 20
    done = zrt("plan", conf(make_model("llama"), [None], helped=True, memory=limit))
    assert done.returncode == 0, done.stderr
    ready = r"; it is ready once workers with room for 3[23]\.\d MiB have joined$"
    assert re.search(ready, done.stdout, re.MULTILINE), done.stdout

    done = zrt("plan", conf(make_model("llama"), [None], helped=True, memory=300 << 20))
    assert done.returncode == 1
    assert "; it may take too little even for the rest\n" in done.stdout
    assert re.search(r"; it may take 300\.0 MiB: take a smaller dtype or model, or raise its memory$", done.stderr)


def test_pinned_workers_have_a_line_each_under_their_stages(
    make_model: MakeModel, conf: Callable[..., Path], zrt: Zrt
) -> None:
    workers = '[[worker]]\nname = "attic"\njoin = true\n[[worker]]\nname = "cellar"\n'
    lends = '\n[[stage.lend]]\nworker = "attic"\nblocks = "1"\n[[stage.lend]]\nworker = "cellar"\nblocks = "2"\n'
    done = zrt("plan", conf(make_model("llama"), [None], lends + workers))
    assert (done.returncode, done.stderr) == (0, "")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if "│" in line]
    assert [row[:4] for row in rows] == [
        ["stage0", "0,3", "1", "cpu"],
        ["lent to attic", "1", "", "its own"],
        ["lent to cellar", "2", "", "cpu"],
    ]
    assert [row[5] for row in rows] == ["32.0 MiB", "16.0 MiB", "16.0 MiB"]


SHORT = [
    ({"kv_bytes": "900TiB"}, "", "the cluster needs 1800.0 TiB of this machine's memory, and "),
    (
        {"kv_bytes": 1000},
        "",
        "stage0 (blocks 0-1): 1000 B of KV memory hold no page of 16 tokens, which takes 8.0 KiB",
    ),
    ({}, 'memory = "9MiB"', "stage1 (blocks 2-3) needs "),
]


@pytest.mark.parametrize(("settings", "more", "says"), SHORT, ids=["machine", "page", "stage"])
def test_too_little_memory_is_told_by_plan_and_refused_by_up_before_anything_starts(
    make_model: MakeModel, conf: Callable[..., Path], zrt: Zrt, settings: dict[str, object], more: str, says: str
) -> None:
    file = conf(make_model("llama"), ["0-1", "2-3"], "\n" + more, **settings)
    planned = zrt("plan", file)
    assert planned.returncode == 1
    assert "stage1" in planned.stdout
    assert planned.stderr.startswith(f"zrt: insufficient_memory: {says}")
    said = json.loads(zrt("plan", file, "--json").stdout)
    assert not said["fits"]
    assert said["error"]["kind"] == "insufficient_memory"
    refused = zrt("up", file)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith(f"zrt: insufficient_memory: {says}")


def test_what_cannot_be_planned_is_a_bad_config(make_model: MakeModel, conf: Callable[..., Path], zrt: Zrt) -> None:
    done = zrt("plan", conf(make_model("llama")), "--stages", "5", "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["kind"] == "bad_config"
    assert "5 stages for 4 blocks" in done.stderr


# ---- zrt up --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cut in the data", "a file missing", "fp8 with a scale"])
def test_a_broken_model_is_refused_before_anything_starts(
    make_model: MakeModel, tmp_path: Path, conf: Callable[..., Path], zrt: Zrt, name: str
) -> None:
    folder = broken_copy(CASES[name], make_model, tmp_path)
    checked, refused = zrt("check", folder), zrt("up", conf(folder))
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr == checked.stderr


def test_random_weights_need_no_files(
    make_model: MakeModel, tmp_path: Path, conf: Callable[..., Path], zrt: Zrt
) -> None:
    folder = broken_copy(CASES["nothing"], make_model, tmp_path)
    done = zrt("up", conf(folder, model_weights="random"), "--token-ids", "1,2,3", "--max-tokens", 2, "--json")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["token_ids"]) == 2
