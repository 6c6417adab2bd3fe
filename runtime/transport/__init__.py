"""ZeroMQ sockets, and nothing of what they carry: bytes and peers.

zmq is imported here and nowhere else. There is no loss while a connection lives: outboxes are
bounded, then there is back-pressure.

In reading order:

- sockets.py: the one place that makes sockets
- mailbox.py: the one reader of a ROUTER
- outbox.py: what one peer has yet to take
- link.py: a DEALER to one peer, and what libzmq reports of it
- flood_guard.py: what was read and not handed on, and who sends too much

May import: the files of runtime/ itself.
"""
