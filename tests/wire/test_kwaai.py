"""KwaaiNet's bytes: what its reference encoder wrote, and what its reference decoder took and
refused (vectors/kwaai.json).

One difference is deliberate: the reference ignores bytes after the message, zrt refuses them, since
they mean that data was lost. No vector in the file depends on it.
"""

import hashlib
import json
import struct
import tracemalloc
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.inference import WARMING_UP, InferenceRequest, InferenceResponse
from zrt.runtime.wire.codecs import Undecodable, kwaai
from zrt.runtime.wire.codecs.msgpack_walker import MAX_DEPTH, MAX_VALUES
from zrt.runtime.wire.inference import decode_inference

VECTORS = json.loads((Path(__file__).parent / "vectors" / "kwaai.json").read_text())
BY_NAME = {vector["name"]: vector for vector in VECTORS}
KINDS = {"encode", "encode_large", "encode_other", "decode_accept", "decode_reject", "truncation_table"}

REQUEST = InferenceRequest(12345, 7, "hidden_states", [1, 1, 2], memoryview(bytes.fromhex("003c00c0")))
PAIRS = [
    ("session_id", b"\xcd\x30\x39"),
    ("seq_pos", b"\x07"),
    ("payload_type", b"\xadhidden_states"),
    ("shape", b"\x93\x01\x01\x02"),
    ("data", b"\x94\x00\x3c\x00\xcc\xc0"),
]


def of_kind(kind):
    return [pytest.param(vector, id=vector["name"]) for vector in VECTORS if vector["kind"] == kind]


def message_of(vector):
    fields = dict(vector["message"])
    del fields["dtype"]
    if "error_rule" in fields:
        assert fields.pop("error_rule") == "'e' * 65536"
        fields["error"] = "e" * 65536
    if "data_rule" in fields:
        assert fields.pop("data_rule") == "byte[i]=(i*7+3) mod 256"
        data = bytes((i * 7 + 3) % 256 for i in range(fields.pop("data_len")))
    else:
        data = bytes.fromhex(fields.pop("data_hex"))
    kind = {"InferenceRequest": InferenceRequest, "InferenceResponse": InferenceResponse}[vector["type"]]
    return kind(**fields, data=memoryview(data))


def read(vector, wire):
    reader = {"InferenceRequest": kwaai.read_request, "InferenceResponse": kwaai.read_response}[vector["type"]]
    return reader(memoryview(wire))


def request_bytes(**changes):
    """The five fields as a map, with some values replaced by other bytes, or left out (None)."""
    pairs = {**dict(PAIRS), **changes}
    return map_of([(text(name), value) for name, value in pairs.items() if value is not None])


def map_of(pairs):
    return bytes([0x80 | len(pairs)]) + b"".join(key + value for key, value in pairs)


def text(name):
    return bytes([0xA0 | len(name)]) + name.encode()


def with_unknown(value, key=b"\xa1x"):
    return map_of([(key, value), *((text(name), field) for name, field in PAIRS)])


# ---- the vectors ---------------------------------------------------------------------------------


def test_every_vector_of_the_file_is_exercised_by_exactly_one_test_below():
    exercised = [param.id for kind in KINDS for param in of_kind(kind)]
    assert sorted(exercised) == sorted(vector["name"] for vector in VECTORS)
    assert len(exercised) == len(BY_NAME) == 89


@pytest.mark.parametrize("vector", of_kind("encode"))
def test_the_documented_form_is_written_byte_for_byte_and_both_forms_read_back(vector):
    message = message_of(vector)
    assert kwaai.write(message, array=True).hex() == vector["wire_hex"]
    assert read(vector, bytes.fromhex(vector["wire_hex"])) == message
    assert read(vector, kwaai.write(message)) == message


@pytest.mark.parametrize("vector", of_kind("encode_large"))
def test_large_messages_are_written_byte_for_byte_and_read_back(vector):
    message = message_of(vector)
    wire = kwaai.write(message, array=True)
    assert len(wire) == vector["wire_len"]
    assert wire.hex().startswith(vector["wire_head_hex"])
    assert wire.hex().endswith(vector["wire_tail_hex"])
    assert hashlib.sha256(wire).hexdigest() == vector["wire_sha256"]
    assert read(vector, wire) == message
    assert read(vector, kwaai.write(message)) == message


@pytest.mark.parametrize("vector", [*of_kind("decode_accept"), *of_kind("encode_other")])
def test_what_the_reference_accepts_is_read_alike(vector):
    assert read(vector, bytes.fromhex(vector["wire_hex"])) == message_of(vector)


@pytest.mark.parametrize("vector", of_kind("decode_reject"))
def test_what_the_reference_refuses_is_refused(vector):
    with pytest.raises(Undecodable):
        read(vector, bytes.fromhex(vector["wire_hex"]))


@pytest.mark.parametrize("vector", of_kind("truncation_table"))
def test_every_prefix_is_refused(vector):
    wire = bytes.fromhex(vector["wire_hex"])
    kept = [n for first, last, _ in vector["truncation"] for n in range(first, last + 1)]
    assert kept == list(range(len(wire)))
    for n in kept:
        with pytest.raises(Undecodable):
            read(vector, wire[:n])
    read(vector, wire)


@pytest.mark.parametrize("vector", [*of_kind("encode"), *of_kind("decode_accept")])
def test_bytes_after_the_message_are_refused(vector):
    with pytest.raises(Undecodable):
        read(vector, bytes.fromhex(vector["wire_hex"]) + b"\xc0")


def test_token_ids_are_little_endian_u32_whatever_the_envelope():
    message = read(vector := BY_NAME["req_tokens_decode_one"], bytes.fromhex(vector["wire_hex"]))
    assert struct.unpack("<I", message.data) == (128009,)


def test_f16_bits_pass_unchanged():
    message = read(vector := BY_NAME["resp_hidden_ok"], bytes.fromhex(vector["wire_hex"]))
    one, subnormal, infinity, nan = 0x3C00, 0x0001, 0x7C00, 0x7E00
    expected = (one, 0xC000, 0x3800, 0x8000, subnormal, 0x03FF, 0x8001, 0x7BFF, infinity, 0xFC00, nan, 0x0400)
    assert struct.unpack("<12H", message.data) == expected


def test_the_warming_up_text_is_the_documented_one():
    assert BY_NAME["resp_warming_up"]["message"]["error"] == WARMING_UP


def test_shape_against_data_is_checked_after_decoding():
    wire = bytes.fromhex(BY_NAME["req_shape_data_mismatch"]["wire_hex"])
    assert kwaai.read_request(memoryview(wire)).shape == [1, 9, 9]
    with pytest.raises(ZrtError, match="expected 162 bytes for float16") as caught:
        decode_inference(wire)
    assert caught.value.kind == "bad_request"


# ---- the rules beside the vectors ----------------------------------------------------------------


@pytest.mark.parametrize(
    "wire",
    [
        pytest.param(request_bytes(payload_type=b"\x81\xadhidden_states\xc0"), id="enum as {name: nil}"),
        pytest.param(request_bytes(payload_type=b"\x81\x01\xc0"), id="enum as {index: nil}"),
        pytest.param(request_bytes(payload_type=b"\xde\x00\x01\xc4\x0dhidden_states\xc0"), id="enum as map16 of bin"),
        pytest.param(request_bytes(seq_pos=b"\xd3" + bytes(7) + b"\x07"), id="a signed form that is not negative"),
        pytest.param(request_bytes(shape=b"\x93\xd0\x01\xcf" + bytes(7) + b"\x01\x02"), id="dimensions in any width"),
        pytest.param(with_unknown(b"\xc7\x03\x05abc"), id="ext8 in an unknown field"),
        pytest.param(
            with_unknown(b"\x82\x92\x01\x02\xc3\xc0\xcb" + bytes(8)), id="a map with odd keys in an unknown field"
        ),
        pytest.param(with_unknown(b"\x01", key=b"\x05"), id="an index beyond the fields is an unknown key"),
        pytest.param(with_unknown(b"\x90", key=b"\xc4\x01\xff"), id="an unknown key as bin"),
        pytest.param(with_unknown(b"\x91" * MAX_DEPTH + b"\xc0"), id="1022 arrays in one another"),
        pytest.param(with_unknown(b"\x91" * (MAX_DEPTH - 1) + b"\xd4\x01\x00"), id="an ext counts as a level"),
    ],
)
def test_accepted(wire):
    assert kwaai.read_request(memoryview(wire)) == REQUEST


@pytest.mark.parametrize(
    ("wire", "message"),
    [
        (map_of([(b"\x00", b"\x01"), *((text(name), field) for name, field in PAIRS)]), "session_id: given twice"),
        (b"\x86\xaasession_id\x01" + request_bytes(data=b"\xc4\x04\x00\x3c\x00\xc0")[1:], "session_id: given twice"),
        (b"\x86\xa4data\xc4\x00" + request_bytes(data=b"\xc4\x04\x00\x3c\x00\xc0")[1:], "data: given twice"),
        (request_bytes(session_id=b"\xd0\xff"), "session_id: expected an integer in 0..18446744073709551615, got -1"),
        (request_bytes(session_id=b"\xd3" + b"\xff" * 8), "session_id: expected an integer in 0..18446744073709551615, got -1"),
        (with_unknown(b"\x01", key=b"\xd0\x00"), "expected a key"),
        (with_unknown(b"\x01", key=b"\xc0"), "expected a key"),
        (with_unknown(b"\xc1"), "c1"),
        (with_unknown(b"\x91" * (MAX_DEPTH + 1) + b"\xc0"), "nested deeper than 1022"),
        (with_unknown(b"\x81\xc0" * (MAX_DEPTH + 1) + b"\xc0"), "nested deeper than 1022"),
        (with_unknown(b"\x91" * MAX_DEPTH + b"\xd4\x01\x00"), "nested deeper than 1022"),
        (with_unknown(b"\x91" * 1_000_000 + b"\xc0"), "nested deeper than 1022"),
        (request_bytes(payload_type=b"\x82\x00\xc0\x01\xc0"), "payload_type: expected a map of 1, got 2"),
        (request_bytes(payload_type=b"\x81\x00\x01"), "payload_type: expected {token_ids: nil}"),
        (request_bytes(payload_type=b"\xd0\x00"), "payload_type: expected token_ids or hidden_states"),
        (request_bytes(payload_type=b"\xc3"), "payload_type: expected token_ids or hidden_states"),
        (request_bytes(session_id=b"\xff"), "session_id: expected an integer in 0..18446744073709551615, got -1"),
        (request_bytes(seq_pos=b"\xcf\x00\x00\x00\x01\x00\x00\x00\x00"), "seq_pos: expected an integer in 0..4294967295"),
        (request_bytes(shape=b"\xc0"), "shape: expected an array of integers, got nil"),
        (request_bytes(data=b"\x91\xcd\x01\x00"), "data: expected an integer in 0..255, got 256"),
        (request_bytes(data=None), "data: missing"),
        (b"\x94\x01\x02\x00\x90", "expected an array of 5, got 4"),
    ],
)  # fmt: skip
def test_refused_in_words_that_name_the_field(wire, message):
    with pytest.raises(Undecodable) as caught:
        kwaai.read_request(memoryview(wire))
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["session_id", "seq_pos", "payload_type", "shape", "data"])
@pytest.mark.parametrize(
    "claim",
    ["db ffffffff", "c6 ffffffff", "dd ffffffff", "df ffffffff", "c9 ffffffff 01", "da ffff", "c5 ffff", "dc ffff"],
)
def test_a_length_that_lies_costs_nothing(name, claim):
    frames = [request_bytes(**{name: bytes.fromhex(claim)}), with_unknown(bytes.fromhex(claim)), bytes.fromhex(claim)]
    for frame in frames:
        tracemalloc.start()
        try:
            with pytest.raises(Undecodable):
                kwaai.read_request(memoryview(frame))
            assert tracemalloc.get_traced_memory()[1] < 100_000
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("field", ["unknown", "shape"])
def test_a_frame_of_countless_values_is_given_up(field):
    many = b"\xdd" + (MAX_VALUES + 1).to_bytes(4, "big") + b"\x01" * (MAX_VALUES + 1)
    frame = with_unknown(many) if field == "unknown" else with_unknown(b"\xc0").replace(dict(PAIRS)["shape"], many)
    with pytest.raises(Undecodable, match=f"more than {MAX_VALUES} values"):
        kwaai.read_request(memoryview(frame))


def test_a_response_may_leave_out_error_as_a_map_but_not_as_an_array():
    fields = [b"\x05", b"\x00", b"\x90", b"\x90"]
    names = ["session_id", "response_type", "shape", "data"]
    wire = map_of([(text(name), field) for name, field in zip(names, fields, strict=True)])
    assert kwaai.read_response(memoryview(wire)).error is None
    with pytest.raises(Undecodable, match="expected an array of 5, got 4"):
        kwaai.read_response(memoryview(b"\x94" + b"".join(fields)))


def test_error_may_come_as_bin_that_holds_utf8():
    wire = b"\x95\x05\x00\x90\x90\xc4\x03\xe2\x80\x94"
    assert kwaai.read_response(memoryview(wire)).error == "—"


def test_bin_data_is_a_slice_of_the_frame_in_both_readers():
    frame = kwaai.write(REQUEST)
    extra = b"\x86\xa1x\xc0" + frame[1:]
    for wire in (frame, extra):
        assert kwaai.read_request(memoryview(wire)).data.obj is wire


OCTETS = st.one_of(
    st.binary(max_size=300), st.lists(st.sampled_from([0x00, 0x7F, 0x80, 0xCC, 0xCD, 0xFF]), max_size=300).map(bytes)
)


@settings(deadline=None, derandomize=True)
@given(OCTETS, st.sampled_from([1, 50]))
def test_arrays_of_octets_read_alike_in_the_shortest_form(part, times):
    data = part * times
    message = InferenceRequest(1, 2, "token_ids", [len(data)], memoryview(data))
    wire = kwaai.write(message, array=True)
    assert kwaai.read_request(memoryview(wire)) == message
    assert kwaai.read_request(memoryview(b"\x86\xa1x\xc0" + wire[1:])) == message


@settings(deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 255), st.sampled_from([">B", ">H", ">I", ">Q"])), max_size=60),
    st.sampled_from([1, 100]),
)
def test_arrays_of_octets_read_alike_in_any_width(items, times):
    marker = {">B": b"\xcc", ">H": b"\xcd", ">I": b"\xce", ">Q": b"\xcf"}
    body = b"".join(marker[width] + struct.pack(width, number) for number, width in items) * times
    data = bytes(number for number, _ in items) * times
    wire = b"\x95\x01\x02\x00\x90\xdd" + len(data).to_bytes(4, "big") + body
    assert bytes(kwaai.read_request(memoryview(wire)).data) == data


PLAIN = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(), st.binary()),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(), inner, max_size=4)),
    max_leaves=20,
)


@settings(deadline=None, derandomize=True)
@given(PLAIN)
def test_an_unknown_field_may_hold_anything(value):
    wire = with_unknown(msgspec.msgpack.encode(value))
    assert kwaai.read_request(memoryview(wire)) == REQUEST
    for n in range(0, len(wire), max(1, len(wire) // 20)):
        with pytest.raises(Undecodable):
            kwaai.read_request(memoryview(wire[:n]))
