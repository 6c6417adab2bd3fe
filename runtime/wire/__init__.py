"""Bytes <-> messages: the header frame, tensor frames, size limits, and bare single-frame messages.

Between zrt actors (actors.py) a message is `[header][body]` or `[header][body][data]`: the header's array, the documented message (a MessagePack
map, JSON between a leader and its ranks), and tensor bytes from `INLINE` on as a frame of their own, with the body's `data` left empty. A bare
message is the body alone: inference.py, ranks.py, layers.py, clients.py.
Every reader here takes whatever a peer sent and either returns a checked message or raises WireError, nothing else.
"""

from zrt.runtime.refusal import WireError
from zrt.runtime.wire.actors import Body, decode, encode
from zrt.runtime.wire.clients import decode_client, decode_event, encode_client, encode_event
from zrt.runtime.wire.inference import decode_inference, decode_response, encode_inference, encode_response
from zrt.runtime.wire.layers import decode_layers, encode_layers, raw_tensor
from zrt.runtime.wire.limits import INLINE, MAX_CLIENT_FRAME, MAX_FRAME
from zrt.runtime.wire.ranks import decode_rank_request, decode_rank_response, encode_rank

__all__ = [
    "INLINE",
    "MAX_CLIENT_FRAME",
    "MAX_FRAME",
    "Body",
    "WireError",
    "decode",
    "decode_client",
    "decode_event",
    "decode_inference",
    "decode_layers",
    "decode_rank_request",
    "decode_rank_response",
    "decode_response",
    "encode",
    "encode_client",
    "encode_event",
    "encode_inference",
    "encode_layers",
    "encode_rank",
    "encode_response",
    "raw_tensor",
]
