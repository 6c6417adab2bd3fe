"""The options of an answer as a user types them: each has its effect, or is refused by its name
before anything is asked."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.clusters import cluster_file
from support.running import Running, run_zrt, running
from support.speaking import speaking

ASK = ["generate", "w9 w10", "--raw", "--max-tokens", "8", "--temperature", "0"]
EOS = 2


@pytest.fixture(scope="module")
def model(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Knows the words w0 to w159; w2 ends an answer. Its makers want beams."""
    model = speaking(make_model("llama", eos_token_id=EOS), tmp_path_factory.mktemp("model") / "speaking")
    (model / "generation_config.json").write_text('{"eos_token_id": 2, "num_beams": 3}')
    return model


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    home = tmp_path_factory.mktemp("home")
    (home / "cluster.toml").write_text(cluster_file(model, [None, None]))
    with running(str(home / "cluster.toml"), home=home) as up:
        yield up


def asked(cluster: Running, *words: str) -> dict[str, object]:
    done = cluster.zrt(*ASK, *words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_bias_forces_a_token_and_is_repeatable(cluster: Running) -> None:
    assert set(asked(cluster, "--logit-bias", "40:100")["token_ids"]) == {40}
    both = asked(cluster, "--logit-bias", "40:100", "--logit-bias", "41:100", "--frequency-penalty", "2")
    assert set(both["token_ids"]) == {40, 41}


@pytest.fixture(scope="module")
def favoured(cluster: Running) -> int:
    """The bias with which one token comes always: just more than any logit differs by, less than
    what all penalties take."""
    assert len(set(asked(cluster)["token_ids"])) > 1
    return next(
        bias for bias in range(1, 60) if len(set(asked(cluster, "--logit-bias", f"40:{bias}")["token_ids"])) == 1
    )


@pytest.mark.parametrize("penalty", ["--repetition-penalty", "--presence-penalty", "--frequency-penalty"])
def test_a_penalty_keeps_a_favoured_token_from_coming_again_and_again(
    cluster: Running, favoured: int, penalty: str
) -> None:
    got = asked(cluster, "--logit-bias", f"40:{favoured}", penalty, "2")["token_ids"]
    assert got[0] == 40
    assert len(set(got)) > 1


def test_end_tokens_and_minimum(cluster: Running) -> None:
    force = ["--logit-bias", f"{EOS}:100", "--logit-bias", "40:90"]
    assert asked(cluster, *force)["token_ids"] == [EOS]
    assert asked(cluster, *force, "--min-tokens", "3")["token_ids"] == [40, 40, 40, EOS]
    went_on = asked(cluster, *force, "--ignore-eos")
    assert (went_on["token_ids"], went_on["finish_reason"]) == ([EOS] * 8, "length")
    stopped = asked(cluster, "--logit-bias", "40:100", "--stop-token-id", "7", "--stop-token-id", "40")
    assert (stopped["token_ids"], stopped["finish_reason"]) == ([40], "stop")


def test_min_p_1_is_greedy(cluster: Running) -> None:
    assert asked(cluster, "--temperature", "1", "--min-p", "1")["token_ids"] == asked(cluster)["token_ids"]


def test_logprobs_stand_beside_the_ids(cluster: Running) -> None:
    got = asked(cluster, "--logprobs", "2")
    assert [entry["token"] for entry in got["logprobs"]] == got["token_ids"]
    for entry in got["logprobs"]:
        assert entry["top"][0] == {"token": entry["token"], "logprob": entry["logprob"]}  # greedy
        assert entry["top"][1]["logprob"] <= entry["logprob"] <= 0
    assert "logprobs" not in asked(cluster)


def test_several_answers_have_seeds_of_their_own(cluster: Running) -> None:
    words = ["--temperature", "1", "--seed", "70"]
    choices = asked(cluster, *words, "--n", "3")["choices"]
    assert [choice["seed"] for choice in choices] == [70, 71, 72]
    alone = asked(cluster, "--temperature", "1", "--seed", "71")
    assert (alone["text"], alone["token_ids"]) == (choices[1]["text"], choices[1]["token_ids"])
    done = cluster.zrt(*ASK, *words, "--n", "3")
    assert done.stdout == "".join(f"{choice['text']}\n\n" for choice in choices)
    assert [f"answer {n} of 3:" in done.stderr for n in (1, 2, 3)] == [True] * 3


def test_what_the_makers_want_and_do_not_get_is_said(cluster: Running) -> None:
    done = cluster.zrt(*ASK)
    assert done.stderr.count("zrt: the model's generation_config asks for num_beams 3, which zrt does not do") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--min-p", "1.5"], "--min-p"),
        (["--repetition-penalty", "0"], "--repetition-penalty"),
        (["--presence-penalty", "3"], "--presence-penalty"),
        (["--frequency-penalty", "-2.5"], "--frequency-penalty"),
        (["--frequency-penalty", "nan"], "--frequency-penalty"),
        (["--logit-bias", "5"], "ID:BIAS"),
        (["--logit-bias", "x:1"], "ID:BIAS"),
        (["--logit-bias", "5:101"], "--logit-bias"),
        (["--logit-bias", "5:1", "--logit-bias", "5:2"], "--logit-bias"),
        (["--min-tokens", "-1"], "--min-tokens"),
        (["--stop-token-id", "x"], "--stop-token-id"),
        (["--logprobs", "21", "--json"], "--logprobs"),
        (["--logprobs", "2"], "--logprobs needs --json"),
        (["--n", "17"], "--n"),
        (["--n", "0"], "--n"),
    ],
    ids=" ".join,
)
def test_a_value_out_of_range_is_refused(tmp_path: Path, words: list[str], said: str) -> None:
    """Nothing is asked: there is no cluster."""
    done = run_zrt("generate", "w9", *words, home=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["--logit-bias", "160:1"], "logit_bias"),
        (["--stop-token-id", "160"], "stop_token_ids"),
        (["--min-tokens", "9"], "min_tokens"),
    ],
    ids=" ".join,
)
def test_what_only_the_cluster_knows_is_refused_by_it(cluster: Running, words: list[str], field: str) -> None:
    done = cluster.zrt(*ASK, *words)
    assert done.returncode == 1
    assert done.stderr.startswith(f"zrt: bad_request: {field}")


def test_a_prompt_asked_at_the_start_takes_the_same_words(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "cluster.toml").write_text(cluster_file(tmp_path / "model", [None]))
    words = ["--prompt", "w9", "--raw", "--max-tokens", "3", "--logit-bias", "40:100", "--n", "2", "--json"]
    done = run_zrt("up", str(tmp_path / "cluster.toml"), *words, home=tmp_path, timeout=90)
    assert done.returncode == 0, done.stderr
    assert [choice["token_ids"] for choice in json.loads(done.stdout)["choices"]] == [[40] * 3] * 2
