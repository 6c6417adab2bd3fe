"""TP ranks as a stranger and a user meet them: driven by hand-made JSON, formed by `zrt check`, and
under `zrt up`."""

import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from support.running import Running, run_zrt, running, start_zrt
from torch.distributed import TCPStore

PATIENCE_MS = 30_000
ANYWHERE = ("--listen", "tcp://127.0.0.1:0")


class Hand:
    """A plain pyzmq socket that says JSON to a rank."""

    def __init__(self, context: "zmq.Context[Any]", endpoint: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
        self.socket.connect(endpoint)

    def tell(self, text: str) -> None:
        self.socket.send(text.encode())

    def hear(self) -> dict[str, Any]:
        heard: dict[str, Any] = json.loads(self.socket.recv())
        return heard


@contextmanager
def two_ranks(home: Path) -> Iterator[tuple[list[Hand], list["subprocess.Popen[str]"]]]:
    context = zmq.Context()
    hands, processes = [], []
    try:
        pipes = []
        for rank in (0, 1):
            reader, writer = os.pipe()
            words = ["actor", "tp-rank", "--rank", str(rank), "--world", "2", "--threads", "1"]
            processes.append(start_zrt(*words, home=home, ZRT_READY_FD=str(writer)))
            os.close(writer)
            pipes.append(reader)
        for reader in pipes:
            with open(reader) as pipe:
                hands.append(Hand(context, json.loads(pipe.readline())["endpoint"]))
        yield hands, processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()
        for hand in hands:
            hand.socket.close()
        context.term()


def comm_id(port: int) -> str:
    """As documented: a nonce of 16 bytes, port, length and name of the host, zeros to 128 bytes."""
    return (os.urandom(16) + port.to_bytes(2, "big") + b"\x09127.0.0.1").ljust(128, b"\0").hex()


def test_a_rank_goes_through_its_whole_life_by_hand_made_json(make_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_model("llama", vocab_size=157)
    with two_ranks(tmp_path) as (hands, processes), socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        store = TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=20),
            master_listen_fd=server.detach(),
        )

        def both(text: str) -> list[dict[str, Any]]:
            for hand in hands:
                hand.tell(text)
            return [hand.hear() for hand in hands]

        def all_say(text: str, answer: dict[str, Any]) -> None:
            assert both(text) == [answer, answer]

        def kinds(text: str) -> set[str]:
            answers = both(text)
            assert {answer["op"] for answer in answers} == {"error"}
            return {answer["kind"] for answer in answers}

        assert both('{"op":"ping"}') == [
            {"op": "pong", "rank": rank, "world_size": 2, "cuda_device": 0} for rank in (0, 1)
        ]
        step = '{"op":"generate_step","model_id":"m","tokens":%s,"offset":%d}'
        assert kinds('{"op":"nccl_sanity_check"}') == {"nccl_not_initialised"}
        assert kinds('{"op":"explode"}') == {"unknown_op"}
        assert kinds("not json") == {"bad_request"}
        assert kinds('{"op":"init","comm_id":"zz"}') == {"bad_request"}
        assert kinds(step % ([1], 0)) == {"model_not_loaded"}
        all_say(json.dumps({"op": "init", "comm_id": comm_id(port)}), {"op": "init_ok"})
        all_say('["nccl_sanity_check"]', {"op": "nccl_sanity_result", "observed_sum": 2})
        load: dict[str, Any] = {
            "op": "load_dense_shard",
            "model_id": "m",
            "config_json": (folder / "config.json").read_text(),
        }
        load["safetensors_paths"] = [str(folder / "model.safetensors")]
        stage = {"op": "assign_stage", "first": 0, "last": 3, "dtype": "float32", "kv_bytes": 1 << 22}
        all_say(json.dumps(stage | {"context": 64, "sessions": 4}), {"op": "stage_assigned"})
        assert kinds(json.dumps(load | {"quant": "q5k"})) == {"unsupported"}
        all_say(json.dumps(load), {"op": "load_dense_shard_ok"})
        all_say(step % ([1, 17, 93], 0), {"op": "generate_step_ok"})
        all_say(step % ([4], 3), {"op": "generate_step_ok"})
        assert kinds(step % ([4], 9)) == {"kv_gap"}
        assert kinds(step % ([157], 4)) == {"bad_request"}
        all_say('{"op":"open_session","session":7,"length":3}', {"op": "session_opened", "have": 0})
        for answer in both('{"op":"step_batch","steps":[[7,0,2],[8,0,1]],"tokens":[5,6,7]}'):
            assert answer["have"] == [2, 0]
            assert answer["faults"] == ["", "kv_gap"]
        all_say('{"op":"truncate_session","session":7,"length":1}', {"op": "session_truncated", "have": 1})
        all_say('{"op":"close_session","session":7}', {"op": "session_closed"})
        all_say('{"op":"clear_kv_cache","model_id":"m"}', {"op": "kv_cache_cleared"})
        assert kinds('{"op":"snapshot_kv_cache","model_id":"m","snapshot_id":1}') == {"unsupported"}
        assert all(0 < answer["free_mb"] <= answer["total_mb"] for answer in both('{"op":"query_vram"}'))
        all_say('{"op":"unload_model","model_id":"m"}', {"op": "unloaded"})
        assert kinds(step % ([1], 0)) == {"model_not_loaded"}
        all_say('{"op":"shutdown"}', {"op": "bye"})
        assert [process.wait(20) for process in processes] == [0, 0]
        del store


@pytest.mark.chaos
def test_check_forms_a_group_or_names_the_sizes_that_work(make_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_model("llama")
    formed = run_zrt("check", str(folder), "--tp", "2", "--json", home=tmp_path)
    assert formed.returncode == 0, formed.stderr
    assert "2 ranks were started, joined each other, and their sum was right" in formed.stdout
    refused = run_zrt("check", str(folder), "--tp", "3", home=tmp_path)
    assert refused.returncode == 1
    assert "sizes that work: 1, 2, 4" in refused.stderr
    refused = run_zrt("check", str(folder), "--tp", "2", "--device", "cuda:31", home=tmp_path)
    assert refused.returncode == 1
    assert "2 ranks did not start: 2 ranks need the devices cuda:31 to cuda:32" in refused.stderr


def test_up_refuses_a_size_that_does_not_work(make_model: Callable[..., Path], tmp_path: Path) -> None:
    refused = run_zrt(
        "up", *ANYWHERE, "--model", str(make_model("llama")), "--tp", "3", "--token-ids", "1", home=tmp_path
    )
    assert refused.returncode == 2
    assert "sizes that work: 1, 2, 4" in refused.stderr


GENERATE = ("generate", "--token-ids", "1,17,93", "--max-tokens", "8", "--temperature", "0", "--json")


def ranks_of(leader: psutil.Process) -> list[psutil.Process]:
    return [child for child in leader.children() if "tp-rank" in child.cmdline()]


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.chaos)])
def test_a_rank_costs_its_leader_nothing_and_no_rank_outlives_its_leader(
    number: int, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_model("llama")
    conf = tmp_path / "cluster.toml"
    conf.write_text(
        f'[cluster]\nlisten = "tcp://127.0.0.1:0"\n[model]\nref = "{folder}"\ncontext = 128\n[kv]\nbytes = "8MiB"\n[[stage]]\ntp = 2\n'
    )
    with running(str(conf), home=tmp_path) as cluster:
        before = json.loads(cluster.zrt(*GENERATE).stdout)["token_ids"]
        leader = cluster.children()["stage0"]
        (first,) = ranks_of(leader)
        first.kill()
        first.wait(5)
        assert json.loads(cluster.zrt(*GENERATE).stdout)["token_ids"] == before
        assert cluster.children()["stage0"] == leader
        (second,) = ranks_of(leader)
        shown = until_shown(cluster, rf"rank 1 +ready +\d+M .*:{second.pid}\b")
        assert re.search(rf"rank 0 +ready .*:{leader.pid}\b", shown)
        assert "rank_failed" not in shown  # what ended the first rank is not told of the second
        (group,) = [
            actor["group"]
            for actor in json.loads(cluster.zrt("status", "--json").stdout)["actors"]
            if actor.get("group")
        ]
        assert group["ranks"][1]["errors"] == group["rebuilds"] == 1
        assert "signal 9" in group["fault"]
        os.kill(leader.pid, number)
        second.wait(15)
        assert json.loads(cluster.zrt(*GENERATE).stdout)["token_ids"] == before
        family = psutil.Process(cluster.process.pid).children(recursive=True)
        assert cluster.end() == 0
    assert not [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def until_shown(cluster: Running, pattern: str) -> str:
    """What `zrt status` says, once it says this too: a beat later at the latest."""
    for _ in range(40):
        shown = cluster.zrt("status").stdout
        if re.search(pattern, shown):
            return shown
    raise AssertionError(shown)


@pytest.mark.chaos
@pytest.mark.demo
def test_the_demo_model_says_over_three_ranks_what_it_says_in_one_process(demo_model: Path, tmp_path: Path) -> None:
    question = (
        "--prompt",
        "What is the capital of France?",
        "--temperature",
        "0",
        "--max-tokens",
        "8",
        "--json",
        "--stages",
        "1",
    )
    answers = []
    for tp in ("1", "3"):
        done = run_zrt("up", *ANYWHERE, "--model", str(demo_model), "--tp", tp, *question, home=tmp_path, timeout=110)
        assert done.returncode == 0, done.stderr
        answers.append(json.loads(done.stdout)["token_ids"])
    assert answers[0] == answers[1]
    refused = run_zrt("up", *ANYWHERE, "--model", str(demo_model), "--tp", "2", *question, home=tmp_path)
    assert refused.returncode == 2
    assert "sizes that work: 1, 3" in refused.stderr
