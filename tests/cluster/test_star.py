"""A peer that knows KwaaiNet's documented messages and ZeroMQ, and nothing of zrt, drives two block
servers as the hub of a star."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq
from support.clusters import cluster_file
from support.running import running
from transformers import AutoModelForCausalLM

PROMPT = [5, 17, 99, 3, 42]
TOKENS = 16


class Peer:
    """One DEALER; requests and replies are single frames."""

    def __init__(self, context: zmq.Context[Any], endpoint: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, 20_000)
        self.socket.connect(endpoint)

    def raw(self, frame: bytes) -> dict[str, Any]:
        self.socket.send(frame)
        return msgspec.msgpack.decode(self.socket.recv())

    def ask(self, session: int, seq_pos: int, kind: str, shape: list[int], data: Any) -> dict[str, Any]:
        request = {"session_id": session, "seq_pos": seq_pos, "payload_type": kind, "shape": shape, "data": data}
        return self.raw(msgspec.msgpack.encode(request))


def tokens(ids: list[int]) -> bytes:
    return struct.pack(f"<{len(ids)}I", *ids)


@pytest.fixture(scope="module")
def star(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two block servers (2 blocks each) of a running cluster, as peers; and the model's folder."""
    folder = make_model("llama")
    home = tmp_path_factory.mktemp("home")
    conf = home / "cluster.toml"
    conf.write_text(cluster_file(folder, ["0-1", "2-3"]))
    with running(str(conf), home=home) as cluster, zmq.Context() as context:
        status = msgspec.json.decode(cluster.zrt("status", "--json", "--connect", cluster.endpoint).stdout)
        servers = {actor["name"]: actor["endpoint"] for actor in status["actors"]}
        peers = [Peer(context, servers["stage0"]), Peer(context, servers["stage1"])]
        yield peers, folder
        for peer in peers:
            peer.socket.close()


def step(peers: list[Peer], session: int, seq_pos: int, ids: list[int]) -> torch.Tensor:
    """Prefill or decode through both servers: the last position's logits."""
    hidden = peers[0].ask(session, seq_pos, "token_ids", [len(ids)], tokens(ids))
    assert (hidden["session_id"], hidden["response_type"], hidden["error"]) == (session, "hidden_states", None)
    assert hidden["shape"] == [1, len(ids), 64]
    logits = peers[1].ask(session, seq_pos, "hidden_states", hidden["shape"], hidden["data"])
    assert (logits["response_type"], logits["shape"], logits["error"]) == ("logits", [1, 1, 160], None)
    return torch.frombuffer(bytearray(logits["data"]), dtype=torch.float16).float()


def test_prefill_decode_repeat_and_refusals(star: Any) -> None:
    peers, folder = star
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = list(PROMPT)
    logits = step(peers, 9, 0, ids)
    for _ in range(TOKENS):
        with torch.inference_mode():
            wanted = model(torch.tensor([ids])).logits[0, -1]
        torch.testing.assert_close(logits, wanted, atol=2e-2, rtol=0)  # two f16 hops
        ids.append(int(wanted.argmax()))
        logits = step(peers, 9, len(ids) - 1, ids[-1:])

    # The documented integer-array form is read, and going back and repeating a step changes
    # nothing.
    again = peers[0].ask(9, 0, "token_ids", [len(PROMPT)], list(tokens(PROMPT)))
    fresh = peers[0].ask(10, 0, "token_ids", [len(PROMPT)], tokens(PROMPT))
    assert again["data"] == fresh["data"]

    # A gap, a session that is not there, and nonsense are errors in the documented form.
    for seq_pos, session in ((50, 10), (3, 77)):
        refused = peers[0].ask(session, seq_pos, "token_ids", [1], tokens([1]))
        assert refused["error"].startswith("kv_gap: ")
        assert (refused["session_id"], refused["response_type"], refused["shape"], refused["data"]) == (
            0,
            "hidden_states",
            [],
            b"",
        )
    for peer, kind, shape, data, text in (
        (0, "token_ids", [2], b"\1\0\0", "decode token IDs"),
        (1, "hidden_states", [1, 2, 64], b"\0" * 7, "decode hidden states"),
        (1, "hidden_states", [1, 1, 63], b"\0" * 126, "decode hidden states"),
        (0, "hidden_states", [1, 1, 64], b"\0" * 128, "takes token_ids"),
        (1, "token_ids", [1], tokens([1]), "takes hidden_states"),
        (0, "token_ids", [1], tokens([160]), "outside the vocabulary"),
        (0, "token_ids", [0], b"", "at least one"),
    ):
        error = peers[peer].ask(11, 0, kind, shape, data)["error"]
        assert error.startswith("bad_request: ")
        assert text in error
    assert "deserialise InferenceRequest" in peers[0].raw(b"\xc1")["error"]


def test_a_req_socket_is_answered_too(star: Any) -> None:
    peers, _ = star
    endpoint = peers[0].socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 20_000)
        socket.connect(endpoint)
        socket.send(
            msgspec.msgpack.encode(
                {"session_id": 1, "seq_pos": 0, "payload_type": "token_ids", "shape": [2], "data": tokens([3, 4])}
            )
        )
        assert msgspec.msgpack.decode(socket.recv())["shape"] == [1, 2, 64]
