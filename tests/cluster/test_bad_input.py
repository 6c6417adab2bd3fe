"""What is wrong is named, with the way out; nothing is left running."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from support.clusters import cluster_file
from support.running import Running, family, run_zrt, running
from support.speaking import speaking

CONTEXT = 256


@pytest.fixture(scope="module")
def tiny(make_model: Callable[..., Path]) -> Path:
    return make_model("llama")


def conf(
    folder: Path, *, model: Path | str, stages: list[str | None] | None = None, device: str = "cpu", more: str = ""
) -> str:
    """The path of a cluster file of two planned stages."""
    file = folder / "cluster.toml"
    file.write_text(cluster_file(Path(model), stages or [None, None], device=device) + more)
    return str(file)


# ---- words ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("generate hi --top-p 2", "--top-p: 2 is not above 0 and at most 1"),
        ("generate hi --top-p nan", "--top-p: nan"),
        ("generate hi --temperature -1", "--temperature: -1 is not between 0 and 1000"),
        ("generate hi --temperature inf", "--temperature: inf"),
        ("generate hi --top-k -1", "--top-k: -1 is not 0 or more"),
        ("generate hi --top-k many", "--top-k: 'many' is not a whole number"),
        ("generate hi --seed 99999999999999999999", "--seed: 99999999999999999999 is too large"),
        ("generate hi --n 17", "--n: 17 is not 16 or less"),
        ("generate hi --logprobs 21", "--logprobs: 21 is not 20 or less"),
        ("generate hi --max-tokens 0", "--max-tokens: 0 is not 1 or more"),
        ("generate hi --stop=", "--stop: the text is empty"),
        (
            "worker --join tcp://127.0.0.1:1 --name at/tic",
            "--name: 'at/tic' is not a valid name: it has to match ^[A-Za-z0-9]",
        ),
        ("generate --token-ids 1,x", "--token-ids: '1,x' is not a list of token ids such as 1,2,3"),
        ("generate --token-ids -1", "--token-ids"),
        ("generate", "give either a prompt or --token-ids"),
        ("generate hi --token-ids 1", "give either a prompt or --token-ids"),
        ("generate --token-ids 1 --raw", "--raw goes with a prompt, not with --token-ids"),
        ("generate hi --connect nonsense", "nonsense"),
        ("cancel xyz", "'xyz' is not a session id: `zrt status` shows them"),
        ("cancel 1234567890123456789", "is not a session id: `zrt status` shows them"),
        ("up --stages 0", "--stages: 0 is not 1 or more"),
        ("up --prompt hi --detach", "it does not go with --detach"),
        ("up --max-tokens 3", "go with --prompt or --token-ids"),
        ("up --system brief", "go with --prompt or --token-ids"),
        ("up none.toml", "there is no such cluster file (none.toml)"),
        ("actor block-server --join tcp://127.0.0.1:1 --listen tcp://0.0.0.0:0 --advertise tcp://me", "--insecure"),
        ("actor block-server --join tcp://127.0.0.1:1 --listen 7411", "tcp://HOST:PORT"),
        ("frobnicate", "frobnicate"),
        ("drain stage1 --tiemout 3", "usage: zrt drain "),
        ("up --stage 3", "zrt up: error: unrecognized arguments: --stage"),
        ("actor tp-rank --rank 1 --world 2 --memory 3", "usage: zrt actor tp-rank "),
        ("worker --join tcp://127.0.0.1:1 --device foo", "'foo' is no device; valid: cpu, cuda:0"),
        ("actor block-server --join tcp://127.0.0.1:1 --device cpu:1", "'cpu:1' is no device"),
        ("check smollm2-135m --device cuda:-1", "'cuda:-1' is no device"),
    ],
)
def test_a_wrong_command_line_is_told_what_is_wrong(words: str, named: str, tmp_path: Path) -> None:
    done = run_zrt(*words.split(), home=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert named in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("kind", ["worker", "actor block-server"])
def test_a_process_does_not_join_with_a_device_that_is_not_there(kind: str, tmp_path: Path) -> None:
    done = run_zrt(*kind.split(), "--join", "tcp://127.0.0.1:1", "--device", "cuda:31", home=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("zrt: unsupported: there is no device cuda:31 here: ")


def test_a_prompt_that_is_no_text_is_refused(tmp_path: Path) -> None:
    done = run_zrt("generate", "\udcff", home=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "the text is not UTF-8" in done.stderr
    piped = run_zrt("generate", "-", home=tmp_path, stdin="a\udcff")
    assert (piped.returncode, piped.stdout) == (2, "")
    assert piped.stderr == "zrt: bad_config: standard input is not UTF-8 at byte 1\n"


@pytest.mark.parametrize("words", [["generate", "hi"], ["status"], ["down"], ["chat"], ["cancel", "0000000000000031"]])
def test_no_cluster(words: list[str], tmp_path: Path) -> None:
    done = run_zrt(*words, home=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "zrt: coordinator_lost: no cluster runs here: `zrt up` starts one, which is found a moment later; --connect ENDPOINT names another\n"
    )


def test_nobody_answers_there(tmp_path: Path) -> None:
    done = run_zrt("status", "--json", "--connect", "tcp://127.0.0.1:1", home=tmp_path)
    assert done.returncode == 1
    assert json.loads(done.stdout)["error"]["kind"] == "coordinator_lost"
    assert "no cluster answers at tcp://127.0.0.1:1: is it up?" in done.stderr


# ---- cluster files and models --------------------------------------------------------------------


def refused(done: object, status: int, *named: str, home: Path) -> None:
    assert (done.returncode, done.stdout) == (status, ""), done.stderr
    for text in named:
        assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert family(home) == []


def test_unknown_keys(tiny: Path, tmp_path: Path) -> None:
    file = conf(tmp_path, model=tiny, more="\nreplica = 2\n[extra]\n")
    named = "replica is not a key here; did you mean replicas? valid: blocks, replicas, device, threads"
    refused(run_zrt("up", file, home=tmp_path), 2, named, "extra is not a table here", home=tmp_path)


@pytest.mark.parametrize(
    ("stages", "named"),
    [
        ([None] * 5, "4 blocks"),
        (["0-1", "3-3"], "[[stage]] 2 blocks: blocks 2-2 before 3-3 belong to no stage"),
        (["0-1", "2-4"], "[[stage]] 2 blocks: 2-4, but the model has 0-3"),
        (["0-1", "1-3"], "overlap"),
    ],
)
def test_stages_that_do_not_fit_the_model(stages: list[str | None], named: str, tiny: Path, tmp_path: Path) -> None:
    done = run_zrt("up", conf(tmp_path, model=tiny, stages=stages), home=tmp_path)
    refused(done, 2, "bad_config", named, "cluster.toml)", home=tmp_path)


@pytest.mark.parametrize("ref", ["/nowhere/model", "somebody/unheard-of"])
def test_a_model_that_is_not_there(ref: str, tmp_path: Path) -> None:
    """Also without a network, soon: the hub is not waited for."""
    done = run_zrt("up", conf(tmp_path, model="/tmp"), "--model", ref, home=tmp_path, timeout=10)
    refused(done, 1, "bad_model", ref, home=tmp_path)


def test_a_model_whose_weights_are_broken(tiny: Path, tmp_path: Path) -> None:
    broken = tmp_path / "model"
    shutil.copytree(tiny, broken)
    with (broken / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    refused(
        run_zrt("up", conf(tmp_path, model=broken), home=tmp_path), 1, "bad_model", "model.safetensors", home=tmp_path
    )


def test_a_stage_that_cannot_load(tiny: Path, tmp_path: Path) -> None:
    """Its block server says why."""
    file = conf(tmp_path, model=tiny, stages=[None], device="cuda:99")
    refused(run_zrt("up", file, home=tmp_path), 1, "unsupported", "cuda:99", "(stage0)", home=tmp_path)


@pytest.mark.parametrize("detach", [[], ["--detach"]])
def test_a_taken_port(detach: list[str], tiny: Path, tmp_path: Path) -> None:
    """Whoever holds the port hears nothing of our block servers."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as holder:
        endpoint = f"tcp://127.0.0.1:{holder.bind_to_random_port('tcp://127.0.0.1')}"
        file = tmp_path / "cluster.toml"
        file.write_text(cluster_file(tiny, [None, None], cluster_listen=endpoint))
        done = run_zrt("up", str(file), *detach, home=tmp_path)
        refused(done, 2, f"bad_config: {endpoint} is taken by another process", "port 0", home=tmp_path)
        assert done.stderr.count(endpoint) == 1
        assert "(coordinator)" not in done.stderr
        assert holder.poll(0) == 0


def test_a_home_that_cannot_be_written(tiny: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.touch()
    refused(run_zrt("up", conf(tmp_path, model=tiny), "--detach", home=home), 2, "ZRT_HOME", home=home)


# ---- requests ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    home = tmp_path_factory.mktemp("home")
    model = speaking(tiny, home / "model")
    (home / "cluster.toml").write_text(cluster_file(model, [None], model_context=CONTEXT))
    with running(str(home / "cluster.toml"), home=home) as up:
        yield up


@pytest.mark.parametrize(
    ("words", "kind", "named"),
    [
        (["generate", "-"], "bad_request", "the prompt is empty"),
        (["generate", "-", "--raw"], "bad_request", "the prompt is empty"),
        (["generate", "w9 " * 300], "context_exceeded", f"the context holds {CONTEXT}"),
        (["generate", "--token-ids", "1,160"], "bad_request", "token id 160 is outside the vocabulary of 160"),
        (["cancel", "0000000000000abc"], "unknown_session", "0000000000000abc"),
    ],
)
def test_a_request_that_cannot_be_served(words: list[str], kind: str, named: str, cluster: Running) -> None:
    done = cluster.zrt(*words)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"zrt: {kind}: ")
    assert named in done.stderr


@pytest.mark.parametrize("words", ["status", "generate hi", "generate w9 --json"])
def test_a_full_standard_output_is_named(words: str, cluster: Running) -> None:
    full = ["sh", "-c", 'exec "$@" >/dev/full', "sh"]
    done = run_zrt(*words.split(), home=cluster.home, on=full)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("zrt: standard output cannot be written: No space left")
    assert "Traceback" not in done.stderr


def test_a_failure_is_one_json_object_too(cluster: Running) -> None:
    done = cluster.zrt("generate", "w9 " * 300, "--json")
    assert done.returncode == 1
    got = json.loads(done.stdout)
    assert (got["text"], got["token_ids"], got["finish_reason"]) == ("", [], "error")
    assert got["error"]["kind"] == "context_exceeded"


def test_a_chat_whose_context_is_full_goes_on_and_takes_commands(cluster: Running, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    lines = [
        "/system w1 w2",
        *(f"w{turn} " * (CONTEXT * 2 // 5) for turn in (9, 8, 7)),
        "//w9",
        f"/save {file}",
        "/undo",
        "/exit",
        "w3",
    ]
    talk = run_zrt("chat", "--max-tokens", "2", home=cluster.home, stdin="\n".join(lines))
    assert talk.returncode == 0, talk.stderr
    assert len(talk.stdout.splitlines()) == 4
    assert talk.stderr.count("the context is full: the oldest 1 turn left out") == 1
    assert f"saved: {file}" in talk.stderr
    assert "taken back: /w9" in talk.stderr
    saved = json.loads(file.read_text())["messages"]
    assert saved[0] == {"role": "system", "content": "w1 w2"}
    assert [one["content"][:2] for one in saved if one["role"] == "user"] == ["w8", "w7", "/w"]


def test_a_prompt_larger_than_a_frame(cluster: Running) -> None:
    """It comes by stdin: no command line holds so much."""
    done = run_zrt("generate", "-", "--raw", home=cluster.home, stdin="w9 " * (6 << 20))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("zrt: too_large: ")
