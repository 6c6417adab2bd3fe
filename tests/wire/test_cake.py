"""Cake's bytes: what its reference encoder wrote, and what its reference decoder took and refused
(vectors/cake.json).

One difference is deliberate: the reference ignores bytes of a payload after the message, zrt
refuses them.
"""

import json
from pathlib import Path
from typing import get_args

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zrt.runtime.compute.tensors import RAW, dtype_name, from_raw, to_raw
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages import layers
from zrt.runtime.messages.header import PROTOCOL, Header, Step
from zrt.runtime.wire.codecs import Undecodable, cake
from zrt.runtime.wire.decode_errors import WireError
from zrt.runtime.wire.envelopes import decode, encode
from zrt.runtime.wire.layers import decode_layers, encode_layers, raw_tensor
from zrt.runtime.wire.limits import INLINE

VECTORS = json.loads((Path(__file__).parent / "vectors" / "cake.json").read_text())
KINDS = {"encode", "decode_accept", "decode_reject", "truncation_table", "tensor_conversion", "auth"}
TRAILING = {"hello_trailing_in_payload", "ack_trailing_in_payload", "cross_seed_worker_error_by_head"}
TABLES = {"seed": (cake.SEED,), "head": (cake.HEAD,), "both": (cake.SEED, cake.HEAD)}

X = layers.RawTensor(memoryview(bytes(8)), 4, [1, 2, 2])
OWN = [
    layers.PrepareLayers("{}", "float32", 1 << 20, 64, 8, True),
    layers.LayersPrepared(),
    layers.ModelDataTaken(2**64 - 1),
    layers.OpenLayers(1, 9, 5, [1, 2**64 - 1]),
    layers.LayersOpened(4),
    layers.CloseLayers(1),
    layers.CloseLayers(1, [3]),
    layers.LayersClosed(),
    layers.StepFaults([3, 0], ["kv_full", ""]),
]


def of_kind(kind, but=frozenset()):
    return [pytest.param(v, id=v["name"]) for v in VECTORS if v["kind"] == kind and v["name"] not in but]


def wire_of(vector):
    return bytes.fromhex(vector["wire_hex"])


def described(message):
    """A message as its vector has it."""
    name = {"PackedChunk": "ModelDataChunk"}.get(type(message).__name__, type(message).__name__)
    fields = {key: plain(getattr(message, key)) for key in message.__struct_fields__}
    if isinstance(message, layers.WorkerInfo):
        fields["latency"] = str(fields["latency"])
        return {name: fields}
    if isinstance(message, layers.Tensor):
        return {name: plain(layers.RawTensor(message.data, message.dtype, message.shape))}
    if "data" in fields:
        fields["data_hex"] = fields.pop("data")
    return {name: fields or None}


def plain(value):
    if isinstance(value, layers.RawTensor):
        name = layers.RAW_DTYPES[value.dtype] if value.dtype < len(layers.RAW_DTYPES) else "?"
        return {
            "dtype": value.dtype,
            "dtype_name": name,
            "shape": value.shape,
            "data_hex": bytes(value.data).hex(),
        }
    if isinstance(value, memoryview):
        return bytes(value).hex()
    return [list(item) if isinstance(item, tuple) else item for item in value] if isinstance(value, list) else value


# ---- the vectors ---------------------------------------------------------------------------------


def test_every_vector_of_the_file_is_exercised_by_exactly_one_test_below():
    exercised = [param.id for kind in KINDS for param in of_kind(kind)]
    assert sorted(exercised) == sorted(vector["name"] for vector in VECTORS)
    assert len(exercised) == len(set(exercised)) == 92
    assert set(exercised) >= TRAILING


@pytest.mark.parametrize("vector", of_kind("encode"))
def test_messages_are_written_byte_for_byte_and_read_back(vector):
    for table in TABLES[vector["version"]]:
        message, size = cake.read(wire_of(vector), table)
        assert size == len(wire_of(vector))
        assert described(message) == vector["message"]
        assert cake.write(message, table) == wire_of(vector)


@pytest.mark.parametrize("vector", of_kind("decode_accept", TRAILING))
def test_what_the_reference_accepts_is_read_alike(vector):
    for table in TABLES[vector["version"]]:
        message, size = cake.read(wire_of(vector), table)
        assert described(message) == vector["message"]
        assert len(wire_of(vector)) - size == vector.get("unread_after_frame", 0)


@pytest.mark.parametrize("vector", [param for param in of_kind("decode_accept") if param.id in TRAILING])
def test_bytes_of_a_payload_after_the_message_are_refused(vector):
    for table in TABLES[vector["version"]]:
        with pytest.raises(Undecodable, match="bytes follow the message"):
            cake.read(wire_of(vector), table)


@pytest.mark.parametrize("vector", of_kind("decode_reject"))
def test_what_the_reference_refuses_is_refused(vector):
    for table in TABLES[vector["version"]]:
        with pytest.raises(Undecodable):
            cake.read(wire_of(vector), table)


@pytest.mark.parametrize("vector", of_kind("truncation_table"))
def test_every_prefix_is_refused(vector):
    wire = wire_of(vector)
    whole_frames = "stream" in vector["name"]
    body = wire if whole_frames else wire[8:]
    kept = [n for row in vector["truncation"] for n in range(row["from"], row["to"] + 1)]
    assert kept == list(range(len(body)))
    for table in TABLES[vector["version"]]:
        for n in kept:
            cut = wire[:n] if whole_frames else wire[:4] + n.to_bytes(4, "big") + wire[8 : 8 + n]
            with pytest.raises(Undecodable):
                cake.read(cut, table)


@pytest.mark.parametrize("vector", of_kind("tensor_conversion"))
def test_tensors_are_made_where_dtype_shape_and_data_agree(vector):
    message, _ = cake.read(wire_of(vector), cake.SEED)
    verdict = vector["result"]["head"]  # the seed drops a remainder of bytes
    if verdict.startswith("ok"):
        tensor = from_raw(message)
        assert f"ok {layers.RAW_DTYPES[RAW.index(tensor.dtype)]} {list(tensor.shape)}" == verdict
    else:
        with pytest.raises(ZrtError) as caught:
            from_raw(message)
        assert caught.value.kind == "bad_request"


@pytest.mark.parametrize("vector", of_kind("auth"))
def test_both_sides_prove_that_they_hold_the_key(vector):
    key = vector["message"]["key_utf8"].encode()
    master, worker = (bytes.fromhex(vector["message"][f"{side}_nonce"]) for side in ("master", "worker"))
    said = [master, cake.proof(key, master) + worker, cake.proof(key, worker)]
    assert [words.hex() for words in said] == [step["hex"] for step in vector["steps"]]


# ---- the codec beside the vectors ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "table"),
    [
        (cake.ModelDataResume("f", 0), cake.SEED),
        (layers.ModelDataChunk("f", 0, 1, memoryview(b"x")), cake.HEAD),
        (OWN[0], cake.SEED),
        (layers.SingleOp("x", X, 2**64, 0), cake.SEED),
    ],
)
def test_what_a_table_cannot_say_is_not_written(message, table):
    with pytest.raises(ValueError, match=r"not a message of|does not fit"):
        cake.write(message, table)


def test_data_is_a_slice_of_the_frame():
    frame = cake.write(layers.SingleOp("x", X, 0, 0), cake.SEED)
    assert cake.read(frame, cake.SEED)[0].x.data.obj is frame


@settings(deadline=None, derandomize=True)
@given(st.binary(max_size=200), st.integers(0, 13), st.sampled_from([cake.SEED, cake.HEAD]))
def test_any_payload_is_read_or_refused(tail, tag, table):
    payload = tag.to_bytes(4, "big") + tail
    frame = cake.MAGIC.to_bytes(4, "big") + len(payload).to_bytes(4, "big") + payload
    try:
        message, _ = cake.read(frame, table)
    except Undecodable:
        return
    assert cake.read(cake.write(message, table), table)[0] == message


@pytest.mark.parametrize("dtype", RAW, ids=dtype_name)
def test_every_dtype_tag_passes_unchanged(dtype):
    values = torch.arange(6).view(1, 2, 3).to(dtype)
    back = from_raw(to_raw(values))
    assert back.dtype == dtype
    assert bytes(to_raw(back).data) == bytes(to_raw(values).data)


def test_a_dtype_without_a_tag_is_refused():
    with pytest.raises(ZrtError, match="bool is not one of U8"):
        to_raw(torch.tensor([True]))


# ---- between zrt actors, and bare ----------------------------------------------------------------


def test_the_union_has_the_documented_messages_and_those_that_zrt_adds():
    names = {struct.__struct_config__.tag for struct in get_args(layers.LayerTraffic)}
    assert names == {kind.__name__ for kind in cake.SEED.messages} | {type(message).__name__ for message in OWN}


@pytest.mark.parametrize("message", OWN, ids=lambda message: type(message).__name__)
def test_messages_that_zrt_adds_are_read_as_they_were_written(message):
    assert decode(encode(Header(PROTOCOL, "m", 5), message))[1] == message


@pytest.mark.parametrize(
    ("message", "written"),
    [
        (layers.Hello(), {"type": "Hello"}),
        (
            layers.SingleOp("model.layers.5", X, 42, 5),
            {
                "type": "SingleOp",
                "layer_name": "model.layers.5",
                "x": {"data": bytes(8), "dtype": 4, "shape": [1, 2, 2]},
                "index_pos": 42,
                "block_idx": 5,
            },
        ),
        (
            layers.Batch(X, [("model.layers.1", 0, 1)]),
            {
                "type": "Batch",
                "x": {"data": bytes(8), "dtype": 4, "shape": [1, 2, 2]},
                "batch": [["model.layers.1", 0, 1]],
            },
        ),
        (layers.Tensor(X.data, 4, [4]), {"type": "Tensor", "data": bytes(8), "dtype": 4, "shape": [4]}),
        (
            layers.WorkerInfo("0.1.0", "F16", "linux", "x86_64", "cpu", 0, 2**128 - 1),
            {
                "type": "WorkerInfo",
                "version": "0.1.0",
                "dtype": "F16",
                "os": "linux",
                "arch": "x86_64",
                "device": "cpu",
                "device_idx": 0,
                "latency": 2**64 - 1,
            },
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_documented_names_travel_as_a_map(message, written):
    frame = encode_layers(message)
    assert msgspec.msgpack.decode(frame) == written
    assert msgspec.msgpack.decode(encode_layers(decode_layers(frame))) == written


@pytest.mark.parametrize("rows", [1, 4096])
@pytest.mark.parametrize("kind", ["SingleOp", "Batch", "Tensor", "ModelDataChunk"])
def test_large_data_travels_in_a_frame_of_its_own(kind, rows):
    data = memoryview(bytes(8 * rows))
    x = layers.RawTensor(data, 5, [1, rows, 2])
    message = {
        "SingleOp": layers.SingleOp("model.layers.0", x, 0, 0),
        "Batch": layers.Batch(x, [("model.layers.0", 0, 0)]),
        "Tensor": layers.Tensor(data, 5, [1, rows, 2]),
        "ModelDataChunk": layers.ModelDataChunk("a", 0, 9, data),
    }[kind]
    steps = [Step(1, 0, 0, rows)] if kind == "Batch" else []
    frames = encode(Header(PROTOCOL, "m", 5, steps=[Step(1, 0, 0, rows)] if steps else []), message)
    assert len(frames) == (3 if len(data) >= INLINE else 2)
    header, body = decode(frames)
    assert header.body == "layers"
    assert body == message


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"type": "Explode"}, "expected one of Batch"),
        ({"type": "Tensor", "data": b"", "dtype": 8, "shape": [0]}, "unknown dtype tag: 8"),
        ({"type": "Tensor", "data": b"abc", "dtype": 4, "shape": [1]}, "expected 2 bytes for F16 of shape"),
        ({"type": "Tensor", "data": b"ab", "dtype": 4, "shape": [2**63, 4]}, "expected"),
        ({"type": "SingleOp", "layer_name": "x", "index_pos": 0, "block_idx": 0}, "x"),
        ({"type": "WorkerError", "message": 5}, "message"),
        ([1], "Expected"),
    ],
)
def test_what_is_no_message_is_refused_in_words(message, text):
    with pytest.raises(WireError, match=text):
        decode_layers(msgspec.msgpack.encode(message))


@pytest.mark.parametrize(
    ("steps", "body", "data", "text"),
    [
        ([], layers.Hello(), b"x", "goes with a tensor or a chunk alone"),
        ([], layers.SingleOp("l", X, 0, 0), b"x", "none in the body beside a data frame"),
        ([Step(1, 0, 0, 3)], layers.SingleOp("l", X, 0, 0), None, r"expected \[1, 3, hidden\]"),
    ],
)
def test_frames_that_do_not_belong_together_are_refused(steps, body, data, text):
    frames = encode(Header(PROTOCOL, "m", 5, steps=steps), body)
    with pytest.raises(WireError, match=text):
        decode([*frames, data] if data is not None else frames)


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("model.layers.0", 0),
        ("model.layers.12", 12),
        ("model.layers.012", None),
        ("model.layers.", None),
        ("model.layers.-1", None),
        ("model.layers.١", None),
        ("layers.1", None),
        ("lm_head", None),
        ("model.layers.99999999999999999999", None),
    ],
)
def test_a_layer_is_named_by_its_index(name, index):
    assert layers.layer_index(name) == index
    if index is not None:
        assert layers.layer_name(index) == name


def test_only_messages_with_a_tensor_have_one():
    assert raw_tensor(layers.Hello()) is None
    assert raw_tensor(layers.Batch(X, [])) is X
