"""Messages as bytes: the header frame, tensor frames, size limits, and bare single-frame messages.

Between zrt actors (envelopes.py) a message is `[header][body]` or `[header][body][data]`: the
header's array, the documented message (a MessagePack map, JSON between a leader and its ranks), and
tensor bytes from `INLINE` on as a frame of their own, with the body's `data` left empty. A bare
message is the body alone: inference.py, ranks.py, layers.py, clients.py. Every reader here takes
whatever a peer sent and either returns a checked message or raises WireError, nothing else.

In reading order:

- envelopes.py: messages between actors: header, body, data
- inference.py: bare inference messages, and the checks of all inference messages
- ranks.py: messages of TP ranks, as JSON
- layers.py: messages of layer workers
- clients.py: messages of clients, and the events sent to them
- cluster_changes.py: differences between snapshots of a cluster
- limits.py: how large frames may be
- decode_errors.py: why a frame is refused, with the field at fault
- codecs/: what a typed decode does not cover, one system a file

May import: runtime/messages/ and the files of runtime/ itself. No sockets here.
"""
