"""ZeroMQ sockets that carry bytes between peers, whatever the bytes mean.

zmq is imported here and nowhere else. Nothing is lost while a connection lives: outboxes are
bounded, and a full one causes back-pressure.

In reading order:

- sockets.py: the one place that makes sockets
- mailbox.py: the one reader of a ROUTER
- outbox.py: what one peer has yet to take
- link.py: a DEALER to one peer, and what libzmq reports of it
- flood_guard.py: messages read but not handed on yet, and peers that send too many

May import: the files of runtime/ itself.
"""
