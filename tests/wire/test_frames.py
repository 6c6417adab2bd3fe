"""Messages between actors as frames: what is sent, what is refused, and what a refusal says."""

import math
import mmap

import msgspec
import pytest
import zmq

from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.control import Address, Done
from zrt.runtime.messages.header import PROTOCOL, Header, HopTime, Step
from zrt.runtime.messages.inference import InferenceRequest
from zrt.runtime.messages.sampling import Sampling
from zrt.runtime.messages.sessions import Open, Opened, Sampled
from zrt.runtime.wire.decode_errors import WireError
from zrt.runtime.wire.envelopes import decode, encode
from zrt.runtime.wire.limits import INLINE, MAX_FRAME

WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2, "uint32": 4}
U32 = 2**32 - 1


def hidden(counts=(1,), width=8, dtype="float32", **changes):
    """A header and a body of hidden states, one step of n tokens for each of `counts`."""
    steps = [Step(100 + i, 1, 7, n) for i, n in enumerate(counts)]
    header = Header(PROTOCOL, "front", 5, to=6, model="m", dtype=dtype, steps=steps)
    rows = sum(counts)
    data = memoryview(bytes(i % 251 for i in range(rows * width * WIDTH[dtype])))
    fields = {"session_id": 100, "seq_pos": 7, "payload_type": "hidden_states", "shape": [1, rows, width], "data": data}
    return header, InferenceRequest(**{**fields, **changes})


def tokens(count=3, dtype="uint32", **changes):
    header = Header(PROTOCOL, "front", 5, dtype=dtype, steps=[Step(100, 1, 7, count)])
    fields = {
        "session_id": 100,
        "seq_pos": 7,
        "payload_type": "token_ids",
        "shape": [count],
        "data": memoryview(bytes(4 * count)),
    }
    return header, InferenceRequest(**{**fields, **changes})


def refused(header, body=None, frames=None):
    with pytest.raises(WireError) as caught:
        decode(frames if frames is not None else encode(header, body if body is not None else Done()))
    return caught.value


# ---- what travels --------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "frames"), [(INLINE - 4, 2), (INLINE, 3)])
def test_tensor_data_from_16_kib_on_travels_as_its_own_frame(size, frames):
    header, body = hidden(width=size // 4)
    sent = encode(header, body)
    assert len(sent) == frames
    assert decode(sent) == (header, body)
    assert header.body == "inference"
    assert len(body.data) == size, "the sender's own message is left as it was"


def test_the_data_frame_shares_the_senders_memory():
    memory = bytearray(2 * INLINE)
    header, body = hidden(width=INLINE // 2, data=memoryview(memory))
    data = encode(header, body)[2]
    memory[5] = 77
    assert data[5] == 77


@pytest.mark.parametrize("width", [16, INLINE])
@pytest.mark.parametrize("wrap", [bytes, memoryview, zmq.Frame, lambda frame: zmq.Frame(frame).buffer])
def test_decoded_data_is_a_slice_of_the_frame(wrap, width):
    header, body = hidden(width=width)
    frames = [wrap(bytes(frame)) for frame in encode(header, body)]
    decoded = decode(frames)[1]
    assert decoded == body
    carrier = frames[-1]
    owner = carrier.obj if isinstance(carrier, memoryview) else carrier
    assert decoded.data.obj is owner


def test_typed_and_shaped_memory_is_sent_as_its_bytes():
    flat = bytes(range(64))
    for shaped in (memoryview(flat).cast("f"), memoryview(flat).cast("B", [2, 32]), memoryview(flat).cast("f", [2, 8])):
        header, body = hidden([2], data=shaped)
        assert bytes(decode(encode(header, body))[1].data) == flat
        wide = memoryview(flat * 512).cast("f", [16, 512])
        header, body = hidden([16], width=512, data=wide)
        assert bytes(decode(encode(header, body))[1].data) == flat * 512


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_turn_of_many_sessions_keeps_steps_rows_and_times(dtype):
    header, body = hidden([1, 3, 2], dtype=dtype)
    header.steps[1].times = [HopTime(10, 20), HopTime(0, 2**40)]
    header.steps[2].until = 1
    assert decode(encode(header, body)) == (header, body)


@pytest.mark.parametrize("dtype", ["", "uint32"])
def test_token_ids_are_uint32_named_or_not(dtype):
    header, body = tokens(dtype=dtype)
    assert decode(encode(header, body)) == (header, body)


def test_the_widest_numbers_travel():
    header, body = tokens(1, session_id=2**64 - 1, seq_pos=U32 - 1)
    header.steps = [Step(2**64 - 1, 2**64 - 1, U32 - 1, 1)]
    header.incarnation = header.to = header.request = 2**64 - 1
    assert decode(encode(header, body)) == (header, body)


def test_encodings_are_fresh_each_time():
    header, body = hidden()
    first = encode(header, body)
    copies = [bytes(frame) for frame in first]
    encode(*tokens())
    assert [bytes(frame) for frame in first] == copies
    assert first[0] is not encode(header, body)[0]


def test_a_header_with_fields_appended_by_a_newer_writer_is_taken():
    header = Header(PROTOCOL, "front", 5, body="control")
    longer = msgspec.msgpack.encode([*msgspec.structs.astuple(header), "new", {"a": [1]}])
    assert decode([longer, msgspec.msgpack.encode(Done())]) == (header, Done())


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": PROTOCOL + 1}, f"header.version: the sender speaks protocol {PROTOCOL + 1}"),
        ({"incarnation": -1}, "header.incarnation: Expected `int` >= 0"),
        ({"to": -1}, "header.to: Expected `int` >= 0"),
        ({"request": "1"}, "header.request: Expected `int`, got `str`"),
        ({"sender": 1}, "header.sender: Expected `str`, got `int`"),
        ({"silence_ms": -1}, "header.silence_ms: Expected `int` >= 0"),
        ({"dtype": "float8"}, "header.dtype: expected float32, bfloat16, float16, uint32, got 'float8'"),
        ({"steps": [Step(-1, 1, 0, 1)]}, "header.steps[0].session: Expected `int` >= 0"),
        ({"steps": [Step(1, 1, 0, 1), Step(1, 1, 0, 0)]}, "header.steps[1].n: Expected `int` >= 1"),
        ({"steps": [Step(1, 1, -1, 1)]}, "header.steps[0].seq_pos: Expected `int` >= 0"),
        ({"steps": [Step(1, 1, U32 + 1, 1)]}, f"header.steps[0].seq_pos: Expected `int` <= {U32}"),
        ({"steps": [Step(1, 1, U32, 1)]}, f"header.steps[0]: expected seq_pos + n <= {U32}"),
        ({"steps": [Step(1, 1, 0, 1, until=-2)]}, "header.steps[0].until: Expected `int` >= -1"),
        ({"steps": [Step(1, 1, 0, 1, times=[HopTime(1, -1)])]}, "header.steps[0].times[0].compute: Expected `int` >= 0"),
    ],
)  # fmt: skip
def test_a_header_that_is_off_names_its_field(changes, message):
    header = Header(PROTOCOL, "front", 5)
    for name, value in changes.items():
        setattr(header, name, value)
    error = refused(header)
    assert (error.kind, message in str(error)) == ("bad_request", True), str(error)


@pytest.mark.parametrize(
    ("message", "changes", "text"),
    [
        (hidden, {"session_id": 99}, "session_id, seq_pos: expected those of the first step"),
        (hidden, {"seq_pos": 8}, "session_id, seq_pos: expected those of the first step"),
        (hidden, {"shape": [1, 2, 8]}, "decode hidden states: shape: expected [1, 1, hidden], got [1, 2, 8]"),
        (hidden, {"shape": [2, 1, 8]}, "decode hidden states: shape: expected [1, 1, hidden], got [2, 1, 8]"),
        (hidden, {"shape": [1, 8]}, "decode hidden states: shape: expected [1, 1, hidden], got [1, 8]"),
        (hidden, {"shape": [1, 1, 0]}, "decode hidden states: shape: expected [1, 1, hidden], got [1, 1, 0]"),
        (hidden, {"shape": [1, 1, 9]}, "decode hidden states: data: expected 36 bytes for float32 of shape [1, 1, 9], got 32"),
        (hidden, {"shape": [1, 1, U32]}, "expected 17179869180 bytes"),
        (hidden, {"payload_type": "logits"}, "deserialise InferenceRequest: payload_type: expected token_ids or hidden_states"),
        (hidden, {"session_id": -1}, "deserialise InferenceRequest: session_id: expected an integer in 0..18446744073709551615"),
        (tokens, {"shape": [1, 3]}, "decode token IDs: shape: expected [3], got [1, 3]"),
        (tokens, {"shape": [4]}, "decode token IDs: shape: expected [3], got [4]"),
        (tokens, {"data": memoryview(b"123")}, "decode token IDs: data: expected 12 bytes for uint32 of shape [3], got 3"),
        (tokens, {"data": memoryview(bytes(16))}, "decode token IDs: data: expected 12 bytes for uint32 of shape [3], got 16"),
        (tokens, {"dtype": "float32"}, "header.dtype: token_ids cannot be float32"),
    ],
)  # fmt: skip
def test_a_tensor_that_does_not_fit_its_steps_is_refused(message, changes, text):
    header, body = message(**changes)
    error = refused(header, body)
    assert (error.kind, text in str(error)) == ("bad_request", True), str(error)
    assert error.header == header


@pytest.mark.parametrize("dtype", ["", "uint32"])
def test_hidden_states_need_a_float_dtype(dtype):
    header, body = hidden()
    header.dtype = dtype
    assert "header.dtype: hidden_states cannot be" in str(refused(header, body))


def test_an_inference_request_needs_steps():
    header, body = hidden()
    header.steps = []
    assert "header.steps: expected at least one" in str(refused(header, body))


def test_a_data_frame_beside_inline_data_is_refused():
    header, body = hidden()
    frames = [*encode(header, body), bytes(32)]
    assert "expected none in the body beside a data frame" in str(refused(header, frames=frames))


@pytest.mark.parametrize(("message", "extra"), [(hidden, 2), (lambda: (hidden()[0], Done()), 1)])
def test_the_number_of_frames_is_fixed(message, extra):
    header, body = message()
    frames = encode(header, body)
    for wrong in ([], frames[:1], [*frames, *[b""] * extra]):
        assert refused(header, frames=wrong).kind == "bad_request"


def test_an_unknown_schema_is_an_unknown_op_and_carries_the_header():
    header = Header(PROTOCOL, "front", 5, request=9, body="dance")
    error = refused(header, frames=[msgspec.msgpack.encode(header), b"\x80"])
    assert error.kind == "unknown_op"
    assert "header.body: expected inference, control, ranks, layers, got 'dance'" in str(error)
    assert error.header == header


def test_an_unknown_control_message_is_an_unknown_op_and_carries_the_header():
    header = Header(PROTOCOL, "front", 5, request=9, body="control")
    error = refused(header, frames=[msgspec.msgpack.encode(header), msgspec.msgpack.encode({"type": "dance"})])
    assert error.kind == "unknown_op"
    assert "got 'dance'" in str(error)
    assert error.header == header


def test_another_version_still_tells_who_asked():
    header = Header(PROTOCOL + 1, "front", 5, request=9)
    assert refused(header).header == header


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"type": "opened"}, "opened: Object missing required field `have`"),
        ({"type": "opened", "have": "1"}, "opened.have: Expected `int`, got `str`"),
        ({"type": "sampled", "tokens": [[1, 2, 3, 4], [1, 2, "3", 4]]}, "sampled.tokens[1].index: Expected `int`, got `str`"),
        ({"type": "failed", "fault": {"kind": "internal", "message": 5}}, "failed.fault.message: Expected `str`, got `int`"),
        ({"have": 1}, "control: Object missing required field `type`"),
        ({"type": 5}, "control.type: Expected `str`, got `int`"),
        ([1, 2], "control: Expected `object`, got `array`"),
        ({"type": "opened", "have": 1, "x - at `$[1][99999999999]`": 1}, ""),
    ],
)  # fmt: skip
def test_a_control_message_that_is_off_names_its_field(body, message):
    frames = [msgspec.msgpack.encode(Header(PROTOCOL, "front", 5, body="control")), msgspec.msgpack.encode(body)]
    if not message:
        assert decode(frames)[1] == Opened(1), "an unknown field of a newer writer is passed over"
        return
    error = refused(None, frames=frames)
    assert (error.kind, message in str(error)) == ("bad_request", True), str(error)


# ---- hostile frames ------------------------------------------------------------------------------

PREFIX = msgspec.msgpack.encode(Header(PROTOCOL, "front", 5, body="control"))


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\x9b",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x9b\x01\xdb\xff\xff\xff\xff",
        PREFIX[:-1] + b"\xdd\xff\xff\xff\xff\x94\x01\x01\x01\x01",
        PREFIX + b"\x00",
        b"\x9c" + PREFIX[1:] + b"\x91" * 200_000,
        b"\x9c" + PREFIX[1:] + b"\x81\xa1a" * 200_000,
        b"\x9c" + PREFIX[1:-1] + b"\x91" * 200_000,
        b"\x93\x01\xa2\xff\xfe\x05",
    ],
)
def test_a_hostile_header_is_a_bad_request(frame):
    error = refused(None, frames=[frame, msgspec.msgpack.encode(Done())])
    assert error.kind == "bad_request"
    assert len(str(error)) < 1000


@pytest.mark.parametrize("schema", ["control", "inference"])
@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff\xa4type",
        b"\x82\xa4type\xa4done\xa1x" + b"\x91" * 200_000,
        b"\x82\xa1x" + b"\x81\xa1a" * 200_000,
        b"\x81\xa4type\xa2\xff\xfe",
        b"\x81\xa4type\xda\xff\xff" + b"z" * 0xFFFF,
        b"\x81\xda\xff\xff" + b"z" * 0xFFFF + b"\x00",
        msgspec.msgpack.encode(Sampled([])) + b"\x00",
    ],
)
def test_a_hostile_body_is_refused_with_the_header_known(schema, frame):
    header = Header(PROTOCOL, "front", 5, request=3, body=schema, dtype="uint32", steps=[Step(1, 1, 0, 1)])
    error = refused(None, frames=[msgspec.msgpack.encode(header), frame])
    assert error.kind in ("bad_request", "unknown_op")
    assert error.header == header
    assert len(str(error)) < 1000


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 3.0),
        ("logprobs", 21),
        ("seed", -1),
    ],
)
def test_an_open_that_samples_out_of_range_is_refused_by_field(field, value):
    body = Open(1, 1, 0, 0, [Address("last", 1, "")], 4, sampling=Sampling(**{field: value}))
    error = refused(None, frames=encode(Header(PROTOCOL, "coordinator", 5), body))
    assert error.kind == "bad_request"
    assert f"open.sampling.{field}: Expected" in str(error)


# ---- limits --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def oversize():
    """A little more than a frame may hold; pages that are never touched cost nothing."""
    return memoryview(mmap.mmap(-1, MAX_FRAME + 4))


def test_the_sender_refuses_a_frame_beyond_the_limit(oversize):
    header, body = hidden(data=oversize, shape=[1, 1, len(oversize) // 4])
    with pytest.raises(ZrtError, match=f"a frame of {len(oversize)} bytes, the limit is {MAX_FRAME}") as caught:
        encode(header, body)
    assert caught.value.kind == "too_large"


def test_the_receiver_refuses_a_frame_beyond_the_limit(oversize):
    header = Header(PROTOCOL, "front", 5, body="control")
    error = refused(None, frames=[msgspec.msgpack.encode(header), oversize])
    assert (error.kind, error.header) == ("too_large", header)
