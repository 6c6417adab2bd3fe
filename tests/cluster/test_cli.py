"""The commands as a user types them, against clusters that `zrt up` brought up."""

import asyncio
import json
import re
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.clusters import cluster_file
from support.running import SHELLS_DESCRIPTORS, Running, begun, family, run_zrt, running, start_zrt
from support.speaking import speaking
from support.terminal import CTRL_C, CTRL_D, Terminal

from zrt.runtime.cli.log_lines import as_said
from zrt.runtime.client.client import Client

LONG = ["--max-tokens", "50000", "--temperature", "0"]
"""An answer that would take minutes."""


@pytest.fixture(scope="module")
def model(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Knows the words w0 to w159, and never ends by itself."""
    tiny = make_model("llama", eos_token_id=None, max_position_embeddings=1 << 16)
    return speaking(tiny, tmp_path_factory.mktemp("model") / "speaking")


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    home = tmp_path_factory.mktemp("home")
    (home / "cluster.toml").write_text(cluster_file(model, [None, None], model_context=60000))
    with running(str(home / "cluster.toml"), home=home) as up:
        yield up


def sessions(cluster: Running) -> list[dict[str, object]]:
    return json.loads(cluster.zrt("status", "--json").stdout)["sessions"]


def until_no_session(cluster: Running) -> None:
    """Until the cluster has forgotten all sessions. It says so itself at every change."""

    async def watch() -> None:
        async with asyncio.timeout(20), Client(cluster.endpoint) as client:
            async for state in client.watch():
                if not state.sessions:
                    return

    asyncio.run(watch())


# ---- generate ------------------------------------------------------------------------------------


def test_an_answer_goes_to_stdout_and_its_figures_to_stderr(cluster: Running) -> None:
    done = cluster.zrt("generate", "w9 w10", "--max-tokens", "5", "--seed", "7")
    assert done.returncode == 0
    assert re.fullmatch(r"w\d+( w\d+){4}\n", done.stdout)
    assert re.match(
        r"5 prompt tokens, 5 generated \(length\), .* tokens/s, seed 7\n  stage0 \(blocks 0-1\): ", done.stderr
    )


def test_the_prompt_is_read_from_standard_input(cluster: Running) -> None:
    words = ["--max-tokens", "5", "--temperature", "0"]
    piped = run_zrt("generate", "-", *words, home=cluster.home, stdin="w9 w10\n")
    assert piped.returncode == 0
    assert piped.stdout == cluster.zrt("generate", "w9 w10", *words).stdout


def test_json_is_one_object(cluster: Running) -> None:
    done = cluster.zrt("generate", "w9", "--raw", "--max-tokens", "3", "--temperature", "0", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    got = json.loads(done.stdout)
    assert (got["prompt_tokens"], got["completion_tokens"], got["finish_reason"]) == (1, 3, "length")
    assert got["text"] == " ".join(f"w{token}" for token in got["token_ids"])
    assert set(got["timings"]) == {"queue_ms", "ttft_ms", "decode_tok_s", "network_ms"}
    assert isinstance(got["seed"], int)


def test_a_drawn_seed_is_reported_and_draws_the_same_again(cluster: Running) -> None:
    words = ["generate", "w9", "--max-tokens", "12", "--temperature", "1", "--json"]
    first = json.loads(cluster.zrt(*words).stdout)
    again = json.loads(cluster.zrt(*words, "--seed", str(first["seed"])).stdout)
    assert again["token_ids"] == first["token_ids"]


def test_a_reader_that_leaves_ends_the_session(cluster: Running) -> None:
    process = start_zrt("generate", "w9", *LONG, home=cluster.home)
    begun(process)
    process.stdout.close()
    assert process.wait(20) == 1
    assert process.stderr.read() == ""
    until_no_session(cluster)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_session(number: signal.Signals, cluster: Running) -> None:
    process = start_zrt("generate", "w9", *LONG, home=cluster.home)
    begun(process)
    process.send_signal(number)
    rest, words = process.communicate(timeout=20)
    assert rest.endswith("\n")
    assert (process.returncode, words) == (1, "zrt: interrupted\n")
    until_no_session(cluster)


def test_a_session_is_cancelled_by_another_command(cluster: Running) -> None:
    process = start_zrt("generate", "w9", *LONG, "--json", home=cluster.home)
    while not (live := sessions(cluster)):
        assert process.poll() is None
    session = live[0]["session"]
    assert session in cluster.zrt("status").stdout
    assert cluster.zrt("cancel", session).returncode == 0
    out, words = process.communicate(timeout=20)
    assert process.returncode == 1
    assert words.startswith("zrt: cancelled: ")
    assert json.loads(out)["error"]["kind"] == "cancelled"


# ---- chat ----------------------------------------------------------------------------------------


def test_each_turn_of_a_chat_knows_the_turns_before(cluster: Running) -> None:
    words = ["--max-tokens", "6", "--temperature", "0"]
    talk = run_zrt("chat", *words, home=cluster.home, stdin="w9 w10\n\nw11\n")
    assert (talk.returncode, talk.stderr) == (0, "")
    first, second = talk.stdout.splitlines()

    async def ask() -> str:
        messages = [{"role": "user", "content": "w9 w10"}, {"role": "assistant", "content": first}]
        async with Client(cluster.endpoint) as client:
            stream = client.generate(
                messages=[*messages, {"role": "user", "content": "w11"}], max_tokens=6, temperature=0.0
            )
            return "".join([piece.text async for piece in stream])

    assert first == cluster.zrt("generate", "w9 w10", *words).stdout.rstrip("\n")
    assert second == asyncio.run(ask())


def test_a_turn_that_fails_does_not_end_the_chat(cluster: Running) -> None:
    talk = run_zrt("chat", "--max-tokens", "2", home=cluster.home, stdin="w9 " * 60_000 + "\nw11\n")
    assert talk.returncode == 1
    assert talk.stderr.startswith("zrt: context_exceeded: ")
    assert len(talk.stdout.split()) == 2


def test_ctrl_c_in_a_chat_ends_the_answer_alone_and_ctrl_d_leaves(cluster: Running) -> None:
    with Terminal("chat", *LONG, home=cluster.home) as terminal:
        for turn in ("w9", "w10"):
            terminal.until("> ")
            terminal.type(f"{turn}\n")
            terminal.until(" w")
            terminal.type(CTRL_C)
        terminal.until("> ")
        assert sessions(cluster) == []
        terminal.type(CTRL_D)
        assert terminal.wait() == 0
        assert "Traceback" not in terminal.screen


def test_a_connection_that_breaks_is_said_on_a_terminal_until_it_is_back(cluster: Running) -> None:
    """The coordinator's death costs the answer, not the chat."""
    with Terminal("chat", *LONG, home=cluster.home) as terminal:
        terminal.until("> ")
        terminal.type("w9\n")
        terminal.until(" w")
        cluster.children()["coordinator"].kill()
        terminal.until(f"\n[the connection to {cluster.endpoint} broke; reconnecting for 15 s at most]")
        terminal.until("\r\x1b[K")
        terminal.until("zrt: coordinator_lost: ")
        terminal.until("> ")
        while not json.loads(cluster.zrt("status", "--json").stdout)["ready"]:
            pass
        terminal.type("w10\n")
        terminal.until(" w")
        terminal.type(CTRL_C)
        terminal.until("> ")
        assert terminal.wait(typing=CTRL_D) == 1


def test_ctrl_c_instead_of_a_line_leaves_a_chat(cluster: Running) -> None:
    with Terminal("chat", home=cluster.home) as terminal:
        terminal.until("> ")
        assert terminal.wait(typing=CTRL_C) == 0, terminal.screen
        assert "Traceback" not in terminal.screen


# ---- status, down --------------------------------------------------------------------------------


def test_status_shows_every_process_and_session(cluster: Running) -> None:
    process = start_zrt("generate", "w9", *LONG, home=cluster.home)
    begun(process)
    shown = cluster.zrt("status")
    assert shown.returncode == 0
    for text in (
        "test: ",
        "4 blocks",
        "ready",
        "stage0",
        "0-1",
        "stage1",
        "2-3",
        "coordinator",
        "up",
        "decoding",
        "stage0 → stage1",
    ):
        assert text in shown.stdout
    state = json.loads(cluster.zrt("status", "--json").stdout)
    assert state["ready"]
    assert state["sessions"][0]["session"] in shown.stdout
    process.terminate()
    process.communicate(timeout=20)


def test_processes_take_as_many_descriptors_as_they_may_have(cluster: Running) -> None:
    """A shell gives fewer, which strangers' connections would soon use up."""
    limits = {resource.prlimit(child.pid, resource.RLIMIT_NOFILE) for child in cluster.children().values()}
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert hard > SHELLS_DESCRIPTORS
    assert limits == {(hard, hard)}


def test_progress_is_shown_where_stderr_is_a_terminal(cluster: Running) -> None:
    with Terminal("generate", "w9", "--max-tokens", "3", home=cluster.home) as terminal:
        terminal.until("prefill 0/4")
        terminal.until("\x1b[K")
        assert terminal.wait() == 0


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_detached_cluster_outlives_its_command(cluster: Running, model: Path, form: str) -> None:
    """It is the last one started here, so it is meant; when it has ended, the one before it is.
    Each line of its log has one form, and one time."""
    file = cluster.home / "second.toml"
    file.write_text(cluster_file(model, [None], cluster_name="second", log_level="info", log_format=form))
    done = cluster.zrt("up", str(file), "--detach")
    assert (done.returncode, done.stdout) == (0, "")
    log = cluster.home / "run" / "second.log"
    said = done.stderr.splitlines()
    ready = re.fullmatch("zrt: second is ready at (tcp://127.0.0.1:[0-9]+); `zrt down` ends it", said[-2])
    assert ready
    assert said[-1] == f"zrt: second runs on at {ready[1]}; its log is {log}"
    written = log.open()
    lines = written.read().splitlines()
    also = cluster.zrt("up", str(file), "--detach", "--listen", "tcp://127.0.0.1:0")
    assert also.stderr.endswith(f"its log is {cluster.home / 'run' / 'second-2.log'}\n")
    assert cluster.zrt("down").returncode == 0
    log.unlink()  # the next one's has lines of its own
    if form == "json":
        assert {json.loads(line)["actor"] for line in lines} == {"up", "coordinator", "stage0"}
    else:
        assert any(" info stage0: is ready" in line for line in lines)
        assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} ", line) for line in lines)
        assert all(len(re.findall(r"\d\d:\d\d:\d\d", line)) == 1 for line in lines)
    state = json.loads(cluster.zrt("status", "--json").stdout)
    assert (state["name"], state["ready"]) == ("second", True)
    assert cluster.zrt("down").returncode == 0
    with written:
        assert "zrt: second is down (zrt down)" in [as_said(line.rstrip()) for line in written]
    assert json.loads(cluster.zrt("status", "--json").stdout)["name"] == "test"


def test_a_second_cluster_at_the_same_place_is_told_whose_it_is(cluster: Running) -> None:
    done = cluster.zrt("up", str(cluster.home / "cluster.toml"), "--listen", cluster.endpoint)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"zrt: bad_config: the cluster test already runs at {cluster.endpoint} (`zrt status`): `zrt down` ends it, "
        "or --listen on another port (port 0 picks a free one)\n"
    )


def test_down_returns_when_everything_is_gone(cluster: Running) -> None:
    """The last test with this cluster."""
    done = cluster.zrt("down")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "zrt: test is down\n")
    assert family(cluster.home) == []
    assert cluster.process.wait(1) == 0
    assert cluster.process.stderr.read().endswith("zrt: test is down (zrt down)\n")
    assert cluster.zrt("status").returncode == 1


def test_a_model_without_a_tokenizer_answers_in_token_ids(make_model: Callable[..., Path], tmp_path: Path) -> None:
    """A one-shot `zrt up` whose standard input is closed asks."""
    (tmp_path / "cluster.toml").write_text(cluster_file(make_model("llama", eos_token_id=None), [None, None]))
    words = ["up", str(tmp_path / "cluster.toml"), "--token-ids", "1,2,3", "--max-tokens", "4", "--temperature", "0"]
    done = run_zrt(*words, home=tmp_path, stdin=None)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"(\d+ ){4}\n", done.stdout)
    assert "3 prompt tokens, 4 generated (length)" in done.stderr
    assert family(tmp_path) == []
