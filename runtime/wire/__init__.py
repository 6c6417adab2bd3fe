"""Bytes <-> messages: the header frame, tensor frames, size limits, and bare single-frame messages.

Between zrt actors (envelopes.py) a message is `[header][body]` or `[header][body][data]`: the
header's array, the documented message (a MessagePack map, JSON between a leader and its ranks), and
tensor bytes from `INLINE` on as a frame of their own, with the body's `data` left empty. A bare
message is the body alone: inference.py, ranks.py, layers.py, clients.py. Every reader here takes
whatever a peer sent and either returns a checked message or raises WireError, nothing else.
"""
