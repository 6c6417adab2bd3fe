"""What has been read from a ROUTER but not handed on yet, and whoever sends so much that it cannot
be: a flood.

libzmq's own bound (RCVHWM) stops reading a connection, and in version 4.3.5 a connection that
breaks while it is stopped may end the process: a PING among what is still buffered is answered on a
descriptor that is no longer watched, which libzmq asserts never happens. So nothing is stopped: the
reader takes what there is, and who has more of it here than anybody else when it gets too much
loses its connection.
"""

import os
import socket
import struct
from collections import deque
from contextlib import suppress
from typing import Final

import zmq

from zrt.runtime.transport.outbox import Frames

MESSAGES: Final = 32_768
BYTES: Final = 1024 * 1024 * 1024
"""What may wait, of all peers together. A peer of ours has far less open: credit bounds it."""
DROPS: Final = 1024
"""A flood is cut off anew after so many more messages: it may have come back under the same routing
id."""

_LEAST: Final = 2
"""Bytes that the shortest frame takes on a connection."""
_RECEIVED: Final = struct.Struct("=Q")
_RECEIVED_AT: Final = 128
"""Where Linux's tcp_info (linux/tcp.h) has tcpi_bytes_received."""
_RESET: Final = struct.pack("ii", 1, 0)
"""Closed at once, so that whoever still sends hears of it."""


class FloodGuard:
    """The peers take turns, each one's messages stay in order. False while nothing waits."""

    def __init__(self) -> None:
        self._queues: dict[bytes, _Queue] = {}
        self._messages = 0
        self._bytes = 0
        self._floods: dict[bytes, _Flood] = {}

    def __bool__(self) -> bool:
        return bool(self._queues)

    def pop(self) -> Frames:
        """Return the next message; there must be one."""
        peer = next(iter(self._queues))
        queue = self._queues.pop(peer)
        frames, size = queue.waiting.popleft()
        queue.bytes -= size
        self._messages -= 1
        self._bytes -= size
        if queue.waiting:
            self._queues[peer] = queue
        return frames

    def push(self, frames: Frames) -> bytes | None:
        """Keep a message, its peer's routing id first. The peer that is now taken for a flood, if
        this was too much: what it had here is dropped."""
        peer, size = bytes(frames[0]), _size(frames)
        queue = self._queues.get(peer)
        if queue is None:
            queue = self._queues[peer] = _Queue()
        queue.waiting.append((frames, size))
        queue.bytes += size
        self._messages += 1
        self._bytes += size
        if self._messages <= MESSAGES and self._bytes <= BYTES:
            return None
        by_bytes = self._messages <= MESSAGES
        most, much = max(self._queues.items(), key=lambda item: item[1].bytes if by_bytes else len(item[1].waiting))
        del self._queues[most]
        self._messages -= len(much.waiting)
        self._bytes -= much.bytes
        self._floods[most] = _Flood(much.bytes)
        return most

    def refuses(self, frames: Frames, last: zmq.Frame) -> bool:
        """Return whether a message that was read is part of a flood, and so comes to nothing.
        `last` is its last frame, which knows its connection."""
        flood = self._floods.get(bytes(frames[0])) if self._floods else None
        if flood is None:
            return False
        flood.bytes += _size(frames)
        if flood.dropped % DROPS == 0:
            _cut(last, flood.bytes)
        flood.dropped += 1
        return True

    @property
    def flooded(self) -> bool:
        """Whether there is a flood that has not been read to its end."""
        return bool(self._floods)

    def over(self) -> None:
        """There is nothing more to read: no flood is left."""
        self._floods.clear()


class _Queue:
    __slots__ = ("bytes", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[tuple[Frames, int]] = deque()
        self.bytes = 0


class _Flood:
    __slots__ = ("bytes", "dropped")

    def __init__(self, size: int) -> None:
        self.bytes = size  # read from it, at least
        self.dropped = 0


def _size(frames: Frames) -> int:
    return sum(len(frame) + _LEAST for frame in frames[1:])


def _cut(frame: zmq.Frame, read: int) -> None:
    """End the connection that a frame came over, from which `read` bytes or more have been read.

    libzmq may have closed it meanwhile, and its descriptor be another's by now: one over which less
    has come is left alone.
    """
    with (
        suppress(OSError, zmq.ZMQError, struct.error),
        socket.socket(fileno=os.dup(int(frame.get(zmq.SRCFD)))) as connection,
    ):
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_AT + _RECEIVED.size)
        if _RECEIVED.unpack_from(info, _RECEIVED_AT)[0] >= read:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            connection.shutdown(socket.SHUT_RDWR)
