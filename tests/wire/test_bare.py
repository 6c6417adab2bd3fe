"""A bare InferenceRequest, from a peer that knows nothing of zrt: what a block server is handed,
and what it refuses."""

import mmap

import pytest

from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.inference import InferenceRequest, InferenceResponse
from zrt.runtime.wire.decode_errors import WireError
from zrt.runtime.wire.inference import decode_inference, decode_response, encode_inference, encode_response
from zrt.runtime.wire.limits import MAX_FRAME

LAST = 2**32 - 1


def tokens(count, size=None, shape=None, seq_pos=0):
    data = memoryview(bytes(4 * count if size is None else size))
    return InferenceRequest(5, seq_pos, "token_ids", [count] if shape is None else shape, data)


def hidden(shape, size, seq_pos=0):
    return InferenceRequest(5, seq_pos, "hidden_states", shape, memoryview(bytes(size)))


@pytest.mark.parametrize("array", [False, True])
@pytest.mark.parametrize(
    "request_",
    [tokens(1), tokens(300), tokens(1, seq_pos=LAST - 1), hidden([1, 1, 8], 16), hidden([1, 7, 576], 8064)],
)
def test_a_sound_request_is_taken_in_both_forms(request_, array):
    assert decode_inference(encode_inference(request_, array=array)) == request_


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (tokens(0), "shape: expected at least one token, got none"),
        (tokens(2, size=7), "decode token IDs: shape: expected [1], got [2]"),
        (tokens(1, size=7), "decode token IDs: data: expected 4 bytes for uint32 of shape [1], got 7"),
        (tokens(2, shape=[1, 2]), "decode token IDs: shape: expected [2], got [1, 2]"),
        (tokens(2, shape=[]), "decode token IDs: shape: expected [2], got []"),
        (tokens(1, seq_pos=LAST), f"seq_pos: expected seq_pos + n <= {LAST}, got {LAST} + 1"),
        (hidden([1, 0, 8], 0), "shape: expected at least one token, got none"),
        (hidden([1, 1, 0], 0), "decode hidden states: shape: expected [1, 1, hidden], got [1, 1, 0]"),
        (hidden([], 2), "decode hidden states: shape: expected [1, 1, hidden], got []"),
        (hidden([2, 4], 16), "decode hidden states: shape: expected [1, 1, hidden], got [2, 4]"),
        (hidden([2, 1, 4], 16), "decode hidden states: shape: expected [1, 1, hidden], got [2, 1, 4]"),
        (hidden([1, 1, 8], 15), "decode hidden states: data: expected 16 bytes for float16 of shape [1, 1, 8], got 15"),
        (hidden([1, 1, 8], 32), "decode hidden states: data: expected 16 bytes for float16 of shape [1, 1, 8], got 32"),
        (hidden([1, LAST, LAST], 16), "decode hidden states: data: expected 36893488130239234050 bytes"),
    ],
)
def test_a_request_whose_parts_do_not_agree_is_refused(request_, message):
    with pytest.raises(WireError) as caught:
        decode_inference(encode_inference(request_))
    assert caught.value.kind == "bad_request"
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("reader", "message"),
    [(decode_inference, "deserialise InferenceRequest: "), (decode_response, "deserialise InferenceResponse: ")],
)
def test_an_undecodable_message_begins_with_the_documented_text(reader, message):
    with pytest.raises(WireError) as caught:
        reader(b"hello")
    assert caught.value.message.startswith(message)


def test_a_frame_beyond_the_limit_is_refused_by_both_sides():
    memory = memoryview(mmap.mmap(-1, MAX_FRAME + 1))
    for reader in (decode_inference, decode_response):
        with pytest.raises(WireError) as caught:
            reader(memory)
        assert caught.value.kind == "too_large"
    response = InferenceResponse(1, "logits", [1, 1, 1], memory, None)
    request = InferenceRequest(1, 0, "hidden_states", [1, 1, 1], memory)
    for array in (False, True):
        for write in (
            lambda array: encode_response(response, array=array),
            lambda array: encode_inference(request, array=array),
        ):
            with pytest.raises(ZrtError) as sent:
                write(array)
            assert sent.value.kind == "too_large"
