"""helexa's JSON: what its reference encoder wrote, and what its reference decoder took and refused
(vectors/helexa.json).

The seed's decoder knows fewer ops than the head's; zrt reads the head's. What the two have in
common is alike in every byte.
"""

import json
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from zrt.runtime.messages import ranks
from zrt.runtime.messages.header import PROTOCOL, Header
from zrt.runtime.wire.codecs import Undecodable, helexa
from zrt.runtime.wire.decode_errors import WireError
from zrt.runtime.wire.envelopes import decode, encode
from zrt.runtime.wire.limits import INLINE

VECTORS = json.loads((Path(__file__).parent / "vectors" / "helexa.json").read_text())
KINDS = {"encode", "decode_accept", "decode_reject", "truncation_table"}
OWN = [
    ranks.AssignStage(0, 3, "float32", 1 << 24, 256, 8),
    ranks.OpenSession(2**64 - 1, 7, 5, [1, 2**64 - 1]),
    ranks.StepBatch([ranks.RankStep(1, 0, 2, True), ranks.RankStep(2, 9, 1, opens=4)], [1, 2, 3]),
    ranks.StepBatch([ranks.RankStep(1, 0, 1)], shape=[1, 2], data=memoryview(b"\x00\x01\xfe\xff")),
    ranks.TruncateSession(1, 0),
    ranks.CloseSession(1, [3]),
    ranks.CloseSession(1),
    ranks.StageAssigned(),
    ranks.SessionOpened(16),
    ranks.StepBatchOk([1, 2], ["", "kv_full"], 900),
    ranks.SessionTruncated(3),
    ranks.SessionClosed(),
]


def of_kind(kind):
    return [pytest.param(vector, id=vector["name"]) for vector in VECTORS if vector["kind"] == kind]


def wire_of(vector):
    if "wire_hex" in vector:
        return bytes.fromhex(vector["wire_hex"])
    return vector["wire_text"].encode("utf-8", "surrogatepass")


def read(vector, wire):
    reader = helexa.read_response if vector["direction"] == "worker->leader" else helexa.read_request
    return reader(memoryview(wire))


def plain(message):
    """A message as its vector has it: the op, and fields as JSON values."""
    return msgspec.to_builtins(message)


def reads_back(message):
    response = isinstance(message, get_args(ranks.WorkerResponse))
    return (helexa.read_response if response else helexa.read_request)(helexa.write(message))


# ---- the vectors ---------------------------------------------------------------------------------


def test_every_vector_of_the_file_is_exercised_by_exactly_one_test_below():
    exercised = [param.id for kind in KINDS for param in of_kind(kind)]
    assert sorted(exercised) == sorted(vector["name"] for vector in VECTORS)
    assert len(exercised) == len(set(exercised)) == 102


@pytest.mark.parametrize("vector", of_kind("encode"))
def test_messages_are_written_byte_for_byte_and_read_back(vector):
    message = read(vector, wire_of(vector))
    assert json.loads(json.dumps(plain(message))) == vector["message"]
    assert helexa.write(message) == wire_of(vector)


@pytest.mark.parametrize("vector", of_kind("decode_accept"))
def test_what_the_reference_accepts_is_read_alike(vector):
    read_as = {key: value for key, value in plain(read(vector, wire_of(vector))).items() if value is not None}
    wanted = {key: value for key, value in vector["message"].items() if value is not None}
    assert json.loads(json.dumps(read_as)) == wanted


@pytest.mark.parametrize("vector", of_kind("decode_reject"))
def test_what_the_reference_refuses_is_refused(vector):
    with pytest.raises(Undecodable):
        read(vector, wire_of(vector))


@pytest.mark.parametrize("vector", of_kind("truncation_table"))
def test_every_prefix_is_refused(vector):
    wire = wire_of(vector)
    kept = [n for first, last, _ in vector["truncation"] for n in range(first, last + 1)]
    assert kept == list(range(len(wire)))
    for n in kept:
        with pytest.raises(Undecodable):
            read(vector, wire[:n])
    read(vector, wire)


# ---- the rules beside the vectors ----------------------------------------------------------------


@pytest.mark.parametrize("message", OWN, ids=lambda message: type(message).__name__)
def test_the_ops_that_zrt_adds_are_written_and_read_alike(message):
    assert plain(reads_back(message)) == plain(message)


def test_every_op_is_known_to_one_of_the_two_readers():
    ops = [struct.__struct_config__.tag for struct in get_args(ranks.WorkerRequest) + get_args(ranks.WorkerResponse)]
    assert len(ops) == len(set(ops)) == 16 + 15 + 5 + 5


@pytest.mark.parametrize(
    ("wire", "message"),
    [
        (b'{"op":"explode"}', helexa.UnknownOp),
        (b'["explode"]', helexa.UnknownOp),
        (b'{"op":"pong","rank":0,"world_size":1,"cuda_device":0}', helexa.UnknownOp),
        (b"[]", "op: missing"),
        (b'{"op":"clear_kv_cache","model_id":"a","model_id":"a"}', "model_id: given twice"),
        (b'{"op":"clear_kv_cache","model_id":"a","x":"\\udc00"}', "half a surrogate pair"),
        (b'{"op":"generate_step","model_id":"m","tokens":[true],"offset":0}', "Expected `int`"),
        (b'{"op":"ping","x":' + b'{"y":' * 127 + b"1" + b"}" * 128, "nested deeper than 127"),
        (b'{"op":"ping","x":\xff}', "utf-8"),
        (b'{"op":"ping","x":Infinity}', "no JSON"),
        (b'{"op":"step_batch","steps":[[1,0,1]],"data":"%%"}', "base64"),
    ],
)
def test_refused(wire, message):
    expected, text = (message, "^op: ") if isinstance(message, type) else (Undecodable, message)
    with pytest.raises(expected, match=text):
        helexa.read_request(wire)


@pytest.mark.parametrize(
    "wire",
    [
        b'{"op":"ping","x":1,"x":2}',
        b'{"op":"ping","x":-0}',
        b'{"op":"ping","x":18446744073709551616}',
        b'{"op":"ping","x":' + b"9" * 5000 + b"}",
        b'{"op":"ping","x":"\\\\ud800"}',
        b'{"op":"ping","x":"' + b"[" * 200 + b'"}',
        b' \t\r\n{ "op" : "ping" } ',
    ],
    ids=["an unknown key twice", "-0", "2^64", "a long number", "no escape", "brackets in a string", "white space"],
)
def test_an_unknown_field_may_hold_anything(wire):
    assert helexa.read_request(wire) == ranks.Ping()


# ---- between zrt actors --------------------------------------------------------------------------


def step(rows, width=8):
    data = memoryview(bytes(4 * rows * width))
    return ranks.StepBatch([ranks.RankStep(1, 0, rows)], shape=[rows, width], data=data)


@pytest.mark.parametrize(("rows", "frames"), [(1, 2), (INLINE // 32 - 1, 2), (INLINE // 32, 3)])
def test_a_step_carries_large_hidden_states_as_a_frame_of_their_own(rows, frames):
    sent = encode(Header(PROTOCOL, "leader", 5), step(rows))
    assert len(sent) == frames
    header, body = decode(sent)
    assert header.body == "ranks"
    assert plain(body) == plain(step(rows))


def test_a_reply_is_read_as_a_response_and_a_question_as_a_request():
    pong = ranks.Pong(1, 2, 0)
    assert decode(encode(Header(PROTOCOL, "rank", 5, reply=True), pong))[1] == pong
    with pytest.raises(WireError) as caught:
        decode(encode(Header(PROTOCOL, "rank", 5), pong))
    assert caught.value.kind == "unknown_op"


@pytest.mark.parametrize(
    ("body", "data", "message"),
    [
        (ranks.Ping(), b"x", "a data frame goes with a step_batch alone"),
        (ranks.StepBatch([], data=memoryview(b"x")), b"x", "expected none in the body beside a data frame"),
    ],
)
def test_a_data_frame_that_belongs_to_nothing_is_refused(body, data, message):
    with pytest.raises(WireError, match=message):
        decode([*encode(Header(PROTOCOL, "leader", 5), body), data])
