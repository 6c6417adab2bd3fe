"""Every message there is survives the wire, whatever its fields hold; and no bytes get anything but
WireError out of a reader."""

import math
from typing import get_args

import msgspec
import msgspec.inspect as shape_of
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zrt.runtime.errors import KINDS
from zrt.runtime.messages.client import ClientEvent, ClientRequest, Error
from zrt.runtime.messages.control import Failed, Fault
from zrt.runtime.messages.header import PROTOCOL, HandedOver, Header, Step
from zrt.runtime.messages.inference import InferenceRequest, InferenceResponse
from zrt.runtime.wire.clients import decode_client, decode_event, encode_client, encode_event
from zrt.runtime.wire.codecs import Undecodable, kwaai
from zrt.runtime.wire.decode_errors import WireError
from zrt.runtime.wire.envelopes import ControlMessage, decode, encode
from zrt.runtime.wire.inference import decode_inference, decode_response, encode_inference, encode_response

CONTROL, REQUESTS, EVENTS = get_args(ControlMessage), get_args(ClientRequest), get_args(ClientEvent)
FEW = settings(deadline=None, derandomize=True, max_examples=20)
MANY = settings(deadline=None, derandomize=True, max_examples=300)


def values(kind):
    """A strategy for anything that a type of the protocol allows, with every field of a Struct
    filled."""
    match kind:
        case shape_of.StructType():
            return st.builds(kind.cls, **{field.name: values(field.type) for field in kind.fields})
        case shape_of.ListType():
            return st.lists(values(kind.item_type), min_size=kind.min_length or 0, max_size=3)
        case shape_of.DictType():
            return st.dictionaries(values(kind.key_type), values(kind.value_type), max_size=3)
        case shape_of.UnionType():
            return st.one_of([values(member) for member in kind.types])
        case shape_of.LiteralType():
            return st.sampled_from(kind.values)
        case shape_of.IntType():
            low = -(2**63) if kind.ge is None else kind.ge
            return st.integers(low, 2**64 - 1 if kind.le is None else kind.le)
        case shape_of.FloatType():
            low = kind.ge if kind.gt is None else kind.gt
            return st.floats(low, kind.le, exclude_min=kind.gt is not None, allow_nan=False)
        case shape_of.StrType():
            return st.text(min_size=kind.min_length or 0, max_size=kind.max_length or 20)
        case shape_of.BoolType():
            return st.booleans()
        case shape_of.AnyType():
            return st.none() | st.booleans() | st.integers(0, 2**64 - 1) | st.text(max_size=20)
        case shape_of.NoneType():
            return st.none()
        case shape_of.MemoryViewType():
            return st.binary(max_size=64).map(memoryview)
    raise NotImplementedError(f"{kind}: the wire carries no such type yet")


def any_of(*structs):
    return st.one_of([values(shape_of.type_info(struct)) for struct in structs])


WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}


@st.composite
def headers(draw, least=0):
    """A header that a peer of this version could have sent, with at least `least` small steps."""
    header = draw(any_of(Header))
    header.version, header.dtype = PROTOCOL, ""
    header.steps = draw(st.lists(any_of(Step), min_size=least, max_size=3))
    for step in header.steps:
        step.n = draw(st.integers(1, 4))
        step.seq_pos = min(step.seq_pos, 2**32 - 1 - step.n)
    return header


HEADERS = headers()


@st.composite
def turns(draw):
    """A header and an InferenceRequest that belong together."""
    header = draw(headers(least=1))
    rows = sum(step.n for step in header.steps)
    first = header.steps[0]
    if draw(st.booleans()):
        header.dtype = draw(st.sampled_from(["", "uint32"]))
        kind, dims, size = "token_ids", [rows], 4
    else:
        header.dtype = draw(st.sampled_from(["float32", "bfloat16", "float16"]))
        kind, dims, size = "hidden_states", [1, rows, draw(st.sampled_from([1, 8, 4096]))], WIDTH[header.dtype]
    if header.handed is not None:  # the rows lie elsewhere, one a step
        header.handed = msgspec.structs.replace(header.handed, rows=[0] * len(header.steps))
        size = 0
    data = memoryview(bytes(math.prod(dims) * size))
    return header, InferenceRequest(first.session, first.seq_pos, kind, dims, data)


# ---- round trips ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CONTROL)
def test_every_control_message_survives_the_wire(kind):
    @FEW
    @given(HEADERS, any_of(kind))
    def survives(header, body):
        assert decode(encode(header, body)) == (header, body)
        assert header.body == "control"

    survives()


@MANY
@given(turns())
def test_every_turn_survives_the_wire(turn):
    header, body = turn
    assert decode(encode(header, body)) == (header, body)


@pytest.mark.parametrize("kind", REQUESTS)
def test_every_client_request_survives_the_wire(kind):
    @FEW
    @given(any_of(kind))
    def survives(request):
        assert decode_client(encode_client(request)) == request

    survives()


@pytest.mark.parametrize("kind", EVENTS)
def test_every_event_survives_the_wire(kind):
    @FEW
    @given(any_of(kind))
    def survives(event):
        assert decode_event(encode_event(event)) == event

    survives()


@pytest.mark.parametrize("array", [False, True])
@FEW
@given(response=any_of(InferenceResponse))
def test_every_bare_response_survives_the_wire(array, response):
    assert decode_response(encode_response(response, array=array)) == response


@pytest.mark.parametrize("array", [False, True])
@FEW
@given(request=any_of(InferenceRequest))
def test_every_bare_request_survives_the_codec(array, request):
    assert kwaai.read_request(memoryview(encode_inference(request, array=array))) == request


@pytest.mark.parametrize("kind", CONTROL + REQUESTS + EVENTS)
def test_a_message_is_a_map_whose_type_is_its_class_name_in_snake_case(kind):
    name = kind.__struct_config__.tag
    assert kind.__struct_config__.tag_field == "type"
    assert name.replace("_", "") == kind.__name__.lower()
    assert name.count("_") == sum(letter.isupper() for letter in kind.__name__) - 1


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_of_error_can_be_told_to_actors_and_clients(kind):
    failed = Failed(Fault(kind, "text", "front"))
    assert decode(encode(Header(PROTOCOL, "front", 5), failed))[1] == failed
    error = Error(id="1", kind=kind, message="text", where="front")
    assert decode_event(encode_event(error)) == error


# ---- truncation and noise ------------------------------------------------------------------------


def taken(reader, frame):
    """Whether the reader took it; anything that it raises beside WireError fails the test."""
    try:
        reader(frame)
    except WireError as error:
        refusal = error
    else:
        return True
    assert refusal.kind in ("bad_request", "unknown_op", "too_large")
    assert refusal.message
    return False


def sample(kind):
    """One message of this kind, every field filled."""
    found = []

    @settings(deadline=None, derandomize=True, max_examples=1, database=None)
    @given(any_of(kind))
    def draw(message):
        found.append(message)

    draw()
    return found[0]


@pytest.mark.parametrize("kind", CONTROL)
def test_a_control_message_cut_short_anywhere_is_refused(kind):
    head, body = map(bytes, encode(Header(PROTOCOL, "front", 5, steps=[Step(1, 1, 0, 1)]), sample(kind)))
    for n in range(len(head)):
        assert not taken(decode, [head[:n], body])
    for n in range(len(body)):
        assert not taken(decode, [head, body[:n]])


@pytest.mark.parametrize("width", [8, 8192])
def test_a_turn_cut_short_anywhere_is_refused(width):
    header = Header(PROTOCOL, "front", 5, dtype="float16", steps=[Step(1, 1, 0, 1)])
    data = memoryview(bytes(width * 2))
    frames = [bytes(frame) for frame in encode(header, InferenceRequest(1, 0, "hidden_states", [1, 1, width], data))]
    for index, frame in enumerate(frames):
        for n in {*range(min(len(frame), 300)), len(frame) - 1}:
            assert not taken(decode, [*frames[:index], frame[:n], *frames[index + 1 :]])
            assert not taken(decode, [*frames[:index], frame[:n]])


HANDED = HandedOver(7, 8, 9, 4, 8192, 0, 1, [0, 2])


@pytest.mark.parametrize(
    ("shape", "data", "handed", "taken_"),
    [
        ([1, 3, 64], b"", HANDED, True),
        ([1, 4, 64], b"", HANDED, False),
        ([3], b"", HANDED, False),
        ([1, 3, 64], bytes(3 * 64 * 2), HANDED, False),
        ([1, 3, 64], b"", None, False),
        ([1, 3, 64], b"", msgspec.structs.replace(HANDED, rows=[0]), False),
        ([1, 3, 64], b"", msgspec.structs.replace(HANDED, rows=[0, 1, 2]), False),
    ],
)
def test_rows_handed_over_are_left_out_of_the_body(shape, data, handed, taken_):
    header = Header(PROTOCOL, "front", 5, dtype="float16", steps=[Step(1, 1, 0, 1), Step(2, 1, 5, 2)], handed=handed)
    request = InferenceRequest(1, 0, "hidden_states", shape, memoryview(data))
    assert taken(decode, [bytes(frame) for frame in encode(header, request)]) is taken_


@pytest.mark.parametrize("kind", REQUESTS)
def test_a_client_request_cut_short_anywhere_is_refused(kind):
    frame = encode_client(sample(kind))
    for n in range(len(frame)):
        assert not taken(decode_client, frame[:n])


@pytest.mark.parametrize("kind", EVENTS)
def test_an_event_cut_short_anywhere_is_refused(kind):
    frame = encode_event(sample(kind))
    for n in range(len(frame)):
        assert not taken(decode_event, frame[:n])


@st.composite
def spoilt(draw, frames):
    """A frame with some of its bytes replaced, inserted or taken out."""
    frame = bytearray(draw(frames))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(frame)))
        frame[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(frame)


PLAIN = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(), st.binary()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=11),
        st.dictionaries(st.one_of(st.sampled_from(["type", "id", "session", "prompt", "data"]), st.text()), inner),
    ),
    max_leaves=25,
).map(msgspec.msgpack.encode)
NOISE = st.one_of(st.binary(max_size=200), PLAIN)

HEADER_FRAMES = HEADERS.map(lambda header: bytes(encode(header, Failed(Fault("internal", "")))[0]))
CONTROL_FRAMES = st.tuples(HEADERS, any_of(*CONTROL)).map(lambda both: [bytes(frame) for frame in encode(*both)])
TURN_FRAMES = turns().map(lambda both: [bytes(frame) for frame in encode(*both)])


@MANY
@given(st.lists(st.one_of(NOISE, HEADER_FRAMES, spoilt(HEADER_FRAMES)), max_size=4))
def test_noise_for_an_actor_raises_nothing_but_a_wire_error(frames):
    taken(decode, frames)


@MANY
@given(st.one_of(CONTROL_FRAMES, TURN_FRAMES), st.data())
def test_a_spoilt_message_raises_nothing_but_a_wire_error(frames, data):
    index = data.draw(st.integers(0, len(frames) - 1))
    frames[index] = data.draw(spoilt(st.just(frames[index])))
    taken(decode, frames)


@MANY
@given(st.one_of(NOISE, spoilt(any_of(*REQUESTS).map(encode_client))))
def test_noise_for_the_coordinator_raises_nothing_but_a_wire_error(frame):
    taken(decode_client, frame)


@MANY
@given(st.one_of(NOISE, spoilt(any_of(*EVENTS).map(encode_event))))
def test_noise_for_a_client_raises_nothing_but_a_wire_error(frame):
    taken(decode_event, frame)


@MANY
@given(st.booleans(), st.data())
def test_noise_as_a_bare_message_raises_nothing_but_a_wire_error(array, data):
    requests = any_of(InferenceRequest).map(lambda message: encode_inference(message, array=array))
    responses = any_of(InferenceResponse).map(lambda message: encode_response(message, array=array))
    frame = data.draw(st.one_of(NOISE, spoilt(requests), spoilt(responses)))
    taken(decode_inference, frame)
    taken(decode_response, frame)


@MANY
@given(
    st.one_of(any_of(InferenceRequest).map(encode_inference), spoilt(any_of(InferenceRequest).map(encode_inference)))
)
def test_the_typed_and_the_tolerant_reader_agree(frame):
    """An unknown key in front sends the same fields through the tolerant reader."""
    if frame[:1] != b"\x85":
        return
    assert verdict(frame) == verdict(b"\x86\xa1x\xc0" + frame[1:])


def verdict(frame):
    try:
        return kwaai.read_request(memoryview(frame))
    except Undecodable:
        return None
