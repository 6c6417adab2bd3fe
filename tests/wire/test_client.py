"""What a client may get wrong, and what it is told: the kind, the id if it can be read, and the
field at fault."""

import msgspec
import pytest

from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.client import Accepted, Generate, Piece, Status
from zrt.runtime.messages.sampling import Logprob, TokenLogprobs
from zrt.runtime.wire.clients import decode_client, decode_event, encode_client, encode_event
from zrt.runtime.wire.decode_errors import WireError
from zrt.runtime.wire.limits import MAX_CLIENT_FRAME

pack = msgspec.msgpack.encode


def refused(frame):
    with pytest.raises(WireError) as caught:
        decode_client(frame)
    return caught.value


def test_the_documented_example_is_a_request():
    frame = pack({"type": "generate", "id": "1", "prompt": "Why is the sky blue?", "max_tokens": 64})
    assert decode_client(frame) == Generate(id="1", prompt="Why is the sky blue?", max_tokens=64)


def test_the_documented_example_is_an_answer():
    event = Accepted(id="1", session=123, seed=42, prompt_tokens=36, resume="5f1c", lease_s=10.0)
    expected = {"type": "accepted", "id": "1", "session": 123, "seed": 42, "prompt_tokens": 36}
    expected |= {"resume": "5f1c", "lease_s": 10.0}
    assert msgspec.msgpack.decode(encode_event(event)) == expected


def test_what_was_not_asked_for_is_not_in_a_piece():
    piece = Piece(id="1", index=0, text="a", token_ids=[5])
    expected = {"type": "piece", "id": "1", "index": 0, "text": "a", "token_ids": [5]}
    assert msgspec.msgpack.decode(encode_event(piece)) == expected


def test_what_was_asked_for_is_in_a_piece():
    said = [TokenLogprobs(5, -0.5, [Logprob(5, -0.5), Logprob(7, -1.5)])]
    event = msgspec.msgpack.decode(
        encode_event(Piece(id="1", choice=2, index=0, text="a", token_ids=[5], logprobs=said))
    )
    assert event["choice"] == 2
    top = [{"token": 5, "logprob": -0.5}, {"token": 7, "logprob": -1.5}]
    assert event["logprobs"] == [{"token": 5, "logprob": -0.5, "top": top}]


def test_a_text_that_is_not_unicode_is_not_sent():
    with pytest.raises(ZrtError, match="UTF-8") as caught:
        encode_client(Generate(id="1", prompt="caf\udcc3"))
    assert caught.value.kind == "bad_request"


@pytest.mark.parametrize("wrap", [bytes, memoryview, bytearray])
def test_any_buffer_is_taken(wrap):
    assert decode_client(wrap(encode_client(Status(id="1")))) == Status(id="1")


@pytest.mark.parametrize(
    ("request_map", "kind", "id", "message"),
    [
        ({"type": "generate", "id": "7", "max_tokens": "64"}, "bad_request", "7", "generate.max_tokens: Expected `int | null`, got `str`"),
        ({"type": "generate", "id": "7", "max_tokens": 0}, "bad_request", "7", "generate.max_tokens: Expected `int` >= 1"),
        ({"type": "generate", "id": "7", "temperature": -1}, "bad_request", "7", "generate.temperature: Expected"),
        ({"type": "generate", "id": "7", "temperature": float("nan")}, "bad_request", "7", "generate.temperature: Expected"),
        ({"type": "generate", "id": "7", "top_p": 0}, "bad_request", "7", "generate.top_p: Expected"),
        ({"type": "generate", "id": "7", "top_p": 1.5}, "bad_request", "7", "generate.top_p: Expected"),
        ({"type": "generate", "id": "7", "seed": 2**63}, "bad_request", "7", "generate.seed: Expected"),
        ({"type": "generate", "id": "7", "min_p": 1.5}, "bad_request", "7", "generate.min_p: Expected"),
        ({"type": "generate", "id": "7", "repetition_penalty": 0}, "bad_request", "7", "generate.repetition_penalty: Expected"),
        ({"type": "generate", "id": "7", "repetition_penalty": float("inf")}, "bad_request", "7", "generate.repetition_penalty: Expected"),
        ({"type": "generate", "id": "7", "presence_penalty": 2.5}, "bad_request", "7", "generate.presence_penalty: Expected"),
        ({"type": "generate", "id": "7", "frequency_penalty": -2.5}, "bad_request", "7", "generate.frequency_penalty: Expected"),
        ({"type": "generate", "id": "7", "min_tokens": -1}, "bad_request", "7", "generate.min_tokens: Expected"),
        ({"type": "generate", "id": "7", "ignore_eos": 1}, "bad_request", "7", "generate.ignore_eos: Expected `bool`"),
        ({"type": "generate", "id": "7", "logit_bias": {5: 101}}, "bad_request", "7", "generate.logit_bias[...]: Expected `float` <= 100.0"),
        ({"type": "generate", "id": "7", "logit_bias": {"5": 1}}, "bad_request", "7", "in `$.logit_bias`"),
        ({"type": "generate", "id": "7", "logprobs": 21}, "bad_request", "7", "generate.logprobs: Expected `int` <= 20"),
        ({"type": "generate", "id": "7", "n": 0}, "bad_request", "7", "generate.n: Expected `int` >= 1"),
        ({"type": "generate", "id": "7", "n": 17}, "bad_request", "7", "generate.n: Expected `int` <= 16"),
        ({"type": "generate", "id": "7", "stop_token_ids": [1] * 257}, "bad_request", "7", "generate.stop_token_ids: Expected `array`"),
        ({"type": "generate", "id": "7", "num_beams": 4}, "bad_request", "7", "generate: Object contains unknown field `num_beams`"),
        ({"type": "generate", "id": "7", "token_ids": [1, -1]}, "bad_request", "7", "generate.token_ids[1]: Expected `int` >= 0"),
        ({"type": "generate", "id": "7", "stop": ["a", ""]}, "bad_request", "7", "generate.stop[1]: Expected `str` of length >= 1"),
        ({"type": "generate", "id": "7", "stop": ["a" * 257]}, "bad_request", "7", "generate.stop[0]: Expected `str` of length <= 256"),
        ({"type": "generate", "id": "7", "stop": ["a"] * 65}, "bad_request", "7", "generate.stop: Expected `array` of length <= 64"),
        ({"type": "generate", "id": "7", "repetition_penalty": 1e-38}, "bad_request", "7", "generate.repetition_penalty: Expected `float` >= 0.01"),
        ({"type": "generate", "id": "7", "messages": [{"role": "a"}]}, "bad_request", "7", "generate.messages[0]: Object missing required field"),
        ({"type": "generate", "id": "7", "messages": [{"role": 1}]}, "bad_request", "7", "generate.messages[0].role: Expected `str`, got `int`"),
        ({"type": "generate", "id": "7", "max_token": 64}, "bad_request", "7", "generate: Object contains unknown field `max_token`"),
        ({"type": "status"}, "bad_request", "", "status: Object missing required field `id`"),
        ({"type": "status", "id": 7}, "bad_request", "", "status.id: Expected `str`, got `int`"),
        ({"type": "status", "id": ""}, "bad_request", "", "status.id: Expected `str` of length >= 1"),
        ({"type": "status", "id": "x" * 65}, "bad_request", "", "status.id: Expected `str` of length <= 64"),
        ({"id": "7"}, "bad_request", "7", "request: Object missing required field `type`"),
        ({"type": 1, "id": "7"}, "bad_request", "7", "request.type: Expected `str`, got `int`"),
        ({"type": "sing", "id": "7"}, "unknown_op", "7", "resume, status, subscribe, undrain, unsubscribe, got 'sing'"),
        ({"type": "accepted", "id": "7"}, "unknown_op", "7", "got 'accepted'"),
        (["generate", "7"], "bad_request", "", "request: Expected `object`, got `array`"),
        ("generate", "bad_request", "", "request: Expected `object`, got `str`"),
        (None, "bad_request", "", "request: Expected `object`, got `None`"),
    ],
)  # fmt: skip
def test_a_bad_request_is_told_what_is_wrong_with_it(request_map, kind, id, message):
    error = refused(pack(request_map))
    assert (error.kind, error.id) == (kind, id), str(error)
    assert message in str(error)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b'{"type":"status","id":"1"}',
        b"\xdf\xff\xff\xff\xff",
        b"\x81\xa4type\xdb\xff\xff\xff\xff",
        b"\x83\xa4type\xa6status\xa2id\xa17\xa1x" + b"\x91" * 200_000,
        b"\x82\xa2id\xa17\xa1x" + b"\x81\xa1a" * 200_000,
        b"\x82\xa4type\xa6status\xa2id\xa2\xff\xfe",
        pack({"type": "status", "id": "7"}) + b"\x00",
        pack({"type": "status", "id": "7"})[:-1],
        pack({"type": "status", "id": "7", "x" * 100_000: 1}),
        pack({"type": "x" * 100_000, "id": "7"}),
    ],
)
def test_a_hostile_frame_is_refused_in_a_short_text(frame):
    error = refused(frame)
    assert error.kind in ("bad_request", "unknown_op")
    assert len(str(error)) < 1000


def test_the_id_is_told_even_where_the_type_is_unknown_to_this_version():
    assert refused(pack({"id": "abc", "type": "teleport", "to": [1, {"x": None}]})).id == "abc"


def test_an_event_of_a_newer_coordinator_is_an_unknown_op():
    with pytest.raises(WireError, match="got 'hologram'") as caught:
        decode_event(pack({"type": "hologram", "id": "7"}))
    assert (caught.value.kind, caught.value.id) == ("unknown_op", "7")


def test_an_event_may_carry_fields_that_this_version_does_not_know():
    frame = pack({"type": "accepted", "id": "1", "session": 1, "seed": 2, "prompt_tokens": 3, "mood": "good"})
    assert decode_event(frame) == Accepted(id="1", session=1, seed=2, prompt_tokens=3)


def test_16_mib_is_the_limit_for_both_sides():
    request = Generate(id="7", prompt="x" * MAX_CLIENT_FRAME)
    with pytest.raises(ZrtError, match=f"the limit is {MAX_CLIENT_FRAME}") as caught:
        encode_client(request)
    assert caught.value.kind == "too_large"
    assert refused(pack(request)).kind == "too_large"
    fits = Generate(id="7", prompt="x" * (MAX_CLIENT_FRAME - 1024))
    assert decode_client(encode_client(fits)) == fits
