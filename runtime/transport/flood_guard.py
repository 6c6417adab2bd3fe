"""The messages read from a ROUTER but not handed on yet, and the defence against a peer that sends
too many: a flood.

libzmq's own bound (RCVHWM) stops reading a connection, and in version 4.3.5 a connection that
breaks while it is stopped may end the process: a PING among what is still buffered is answered on a
descriptor that is no longer watched, which libzmq asserts never happens. So no connection is
stopped: the reader takes what there is, and when that gets too much, the peer with the most waiting
here loses its connection.
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
"""The most that may wait, from all peers together. A peer of ours has far less in flight: credit
limits it."""
DROPS: Final = 1024
"""The number of messages after which a flood is cut off anew: it may have come back under the same
routing id."""

_LEAST: Final = 2
"""The bytes that the shortest frame takes on a connection."""
_RECEIVED: Final = struct.Struct("=Q")
_RECEIVED_AT: Final = 128
"""The offset of tcpi_bytes_received in Linux's tcp_info (linux/tcp.h)."""
_RESET: Final = struct.pack("ii", 1, 0)
"""The SO_LINGER value that resets a connection when it is closed, so that a peer that still sends
notices."""


class FloodGuard:
    """The messages of a ROUTER's peers that wait to be handed on. Peers take turns, each one's
    messages stay in order. False while nothing waits."""

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
        """Keep a message, whose first frame is its peer's routing id. If too much waits now, drop
        all that waits from the peer with the most, take that peer for a flood, and return its
        routing id."""
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
        """Return whether a message that was read is part of a flood and so is dropped. `last` is
        its last frame, through which its connection is found."""
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
        """Whether some flood has not been read to its end."""
        return bool(self._floods)

    def over(self) -> None:
        """Forget all floods, since there is nothing more to read."""
        self._floods.clear()


class _Queue:
    __slots__ = ("bytes", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[tuple[Frames, int]] = deque()
        self.bytes = 0


class _Flood:
    __slots__ = ("bytes", "dropped")

    def __init__(self, size: int) -> None:
        self.bytes = size  # read from the peer, at least
        self.dropped = 0


def _size(frames: Frames) -> int:
    return sum(len(frame) + _LEAST for frame in frames[1:])


def _cut(frame: zmq.Frame, read: int) -> None:
    """End the connection that a frame came over, from which `read` bytes or more have been read.

    libzmq may have closed that connection meanwhile, and its descriptor may be another's by now: a
    connection over which less than `read` has come is left alone.
    """
    with (
        suppress(OSError, zmq.ZMQError, struct.error),
        socket.socket(fileno=os.dup(int(frame.get(zmq.SRCFD)))) as connection,
    ):
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_AT + _RECEIVED.size)
        if _RECEIVED.unpack_from(info, _RECEIVED_AT)[0] >= read:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            connection.shutdown(socket.SHUT_RDWR)
