"""A mailbox: the one reader of one socket, on the loop's own file descriptors, and an outbox for
each of the socket's peers.

libzmq's descriptor signals a change once and then stays silent until everything has been looked at,
and any call on the socket may consume the signal. Hence: read until EAGAIN (a bounded number of
messages, then the loop gets its turn), look again after each send, and retry what a peer had no
room for at every wake-up (a ROUTER's POLLOUT says nothing of one peer), and by a timer besides.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

import zmq

from zrt.runtime.errors import ZrtError
from zrt.runtime.transport.flood_guard import FloodGuard
from zrt.runtime.transport.outbox import BYTES, MESSAGES, Frames, Outbox
from zrt.runtime.transport.sockets import Socket, descriptor, readable

log = logging.getLogger(__name__)

TURN: Final = 64
"""The number of messages read before the loop gets its turn."""
TURN_S: Final = 0.01
"""The seconds of reading after which the loop gets its turn in any case: a few messages may be long
ones."""
GATHER_S: Final = 0.01
"""The seconds for which a turn may go on to read, without handing on, what it did not get to:
libzmq holds unread messages without a bound."""
RETRY_S: Final = 0.01
LEND: Final = 256 * 1024
"""The size in bytes from which frames are lent to libzmq rather than copied: below, the copy is
cheaper than the bookkeeping (measured)."""
VIEW: Final = 16 * 1024
"""The size in bytes from which received frames are handed out as views of libzmq's memory; smaller
ones are handed out as bytes."""

_DONTWAIT: Final = int(zmq.DONTWAIT)
_MORE: Final = int(zmq.DONTWAIT | zmq.SNDMORE)


class Mailbox:
    """The owner of `socket`, a ROUTER (`routed`) or a DEALER; `on_message` gets each multipart
    message that arrives, a ROUTER's with the peer's routing id first.

    Peers are named by their routing ids; a DEALER's one peer is b"". Every method is called on the
    loop's thread.
    """

    def __init__(self, socket: Socket, on_message: Callable[[Frames], None], *, routed: bool, limit: int) -> None:
        self.limit = limit
        self._socket = socket
        self._on_message = on_message
        self._routed = routed
        self._loop = asyncio.get_running_loop()
        self._outboxes: dict[bytes, Outbox] = {}
        self._backlog = FloodGuard()
        self._closed = False
        self._reading = False
        self._scheduled = False
        self._retry: asyncio.TimerHandle | None = None
        self._fd = descriptor(socket)
        self._loop.add_reader(self._fd, self._wake)
        self._schedule()  # what arrived before the reader was there is not signalled again

    # ---- sending ---------------------------------------------------------------------------------

    def send(self, frames: Frames, peer: bytes = b"") -> bool:
        """Send a message, or queue it behind what already waits for this peer. Return False if a
        ROUTER knows no such peer (any more).

        The frames are bytes or flat views of bytes; a view's memory must not be written to while
        the peer may still have to take it.

        ZrtError too_large: a frame over `limit`; overloaded: the peer's outbox is full; cancelled:
        the mailbox is closed.
        """
        if self._closed:
            raise ZrtError("cancelled", "the mailbox is closed")
        size = 0
        for frame in frames:
            if len(frame) > self.limit:
                raise ZrtError("too_large", f"a frame of {len(frame)} bytes, the limit is {self.limit}")
            size += len(frame)
        outbox = self._outboxes.get(peer)
        if outbox is not None:
            if not outbox.takes(size):
                text = f"a peer takes nothing: {len(outbox)} messages wait ({MESSAGES} messages or {BYTES >> 20} MiB at most)"
                raise ZrtError("overloaded", text)
            if outbox:
                outbox.push(frames, size)
                return True
        there = True
        try:
            if not self._give(frames, peer):
                self._outbox(peer).push(frames, size)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._drop(peer)
            there = False
        # Sending, also in vain, may have consumed the news of a message that arrived.
        if not self._reading and readable(self._socket):
            self._schedule()
        return there

    def behind(self, peer: bytes = b"") -> bool:
        """Return whether libzmq has yet to take messages for this peer, or to let go of large
        ones."""
        outbox = self._outboxes.get(peer)
        return outbox is not None and not outbox.idle

    async def room(self, timeout: float, peer: bytes = b"") -> None:
        """Wait until the peer's outbox is at most half full.

        ZrtError deadline after `timeout` seconds; stage_lost when the peer is gone; the reason
        given to `close` when the mailbox is closed.
        """
        outbox = self._outboxes.get(peer)
        if outbox is None or outbox.roomy:
            return
        waiter: asyncio.Future[None] = self._loop.create_future()
        outbox.waiters.append(waiter)
        try:
            async with asyncio.timeout(timeout):
                await waiter
        except TimeoutError:
            raise ZrtError("deadline", f"a peer's outbox stayed full for {timeout:g} s") from None
        finally:
            if waiter in outbox.waiters:
                outbox.waiters.remove(waiter)

    def _give(self, frames: Frames, peer: bytes) -> bool:
        """Hand a message to libzmq; return False if it has no room. Only the first frame can be
        refused."""
        send = self._socket.send
        try:
            if self._routed:
                send(peer, _MORE)
            last = len(frames) - 1
            for index, frame in enumerate(frames):
                flags = _DONTWAIT if index == last else _MORE
                if len(frame) < LEND:
                    send(frame, flags)
                else:
                    self._outbox(peer).lend(send(frame, flags, copy=False, track=True), len(frame))
        except zmq.Again:
            return False
        return True

    def _outbox(self, peer: bytes) -> Outbox:
        outbox = self._outboxes.get(peer)
        if outbox is None:
            outbox = self._outboxes[peer] = Outbox()
            if self._retry is None:
                self._retry = self._loop.call_later(RETRY_S, self._again)
        return outbox

    def _again(self) -> None:
        self._retry = None
        self._flush()
        if self._outboxes:
            self._retry = self._loop.call_later(RETRY_S, self._again)

    def _flush(self) -> None:
        """Retry what waits, peer by peer, and remove the outboxes that have become idle."""
        for peer, outbox in list(self._outboxes.items()):
            try:
                while outbox and self._give(outbox.first(), peer):
                    outbox.drop_first()
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                self._drop(peer)
                continue
            outbox.wake()
            if outbox.idle:
                del self._outboxes[peer]
        if readable(self._socket):
            self._schedule()

    def _drop(self, peer: bytes) -> None:
        outbox = self._outboxes.pop(peer, None)
        if outbox is not None:
            outbox.fail(ZrtError("stage_lost", "the peer is gone"))

    # ---- reading ---------------------------------------------------------------------------------

    def drain(self) -> None:
        """Read all that has arrived, for the last time. To be called only after the connection is
        over, so that there is an end to what arrives."""
        while not self._closed and not self._reading and self._read(TURN):
            pass

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._scheduled = False
        self._wake()

    def _wake(self) -> None:
        if self._closed or self._reading:
            return
        if self._read(TURN):
            self._schedule()
        if self._outboxes and not self._closed:
            self._flush()

    def _read(self, most: int) -> bool:
        """Hand on at most `most` messages; return whether there may be more."""
        late = time.monotonic() + TURN_S
        self._reading = True
        try:
            for _ in range(most):
                frames = self._backlog.pop() if self._backlog else self._receive()
                if frames is None:
                    return self._backlog.flooded
                try:
                    self._on_message(frames)
                except Exception:
                    log.exception("a message could not be handled")
                if self._closed:
                    return False
                if time.monotonic() > late:
                    break
            if self._routed:
                self._gather()
        finally:
            self._reading = False
        return True

    def _gather(self) -> None:
        """Read what this turn did not get to, so that it is counted, and cut off a peer that sends
        too much."""
        late = time.monotonic() + GATHER_S
        while (frames := self._receive()) is not None:
            flood = self._backlog.push(frames)
            if flood is not None:
                log.warning("%r sends more than can be read here: its connection is ended", flood)
            if time.monotonic() > late:
                break

    def _receive(self) -> Frames | None:
        """Return the next message from the socket; None if there is none, or for now nothing but
        the rest of a flood."""
        receive = self._socket.recv
        for _ in range(TURN):
            if not readable(self._socket):  # a fifth of what EAGAIN's exception costs
                self._backlog.over()
                return None
            frame = receive(_DONTWAIT, False)
            frames: Frames = [frame.bytes if len(frame) < VIEW else frame.buffer]
            while frame.more:
                frame = receive(_DONTWAIT, False)
                frames.append(frame.bytes if len(frame) < VIEW else frame.buffer)
            if not (self._routed and self._backlog.refuses(frames, frame)):
                return frames
        return None

    # ---- the end ---------------------------------------------------------------------------------

    def close(self, reason: ZrtError) -> None:
        """Stop reading, drop what waits in outboxes, and close the socket (which still sends what
        it has, for LINGER_MS).

        `reason` is the error for those who wait for room.
        """
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._fd)
        if self._retry is not None:
            self._retry.cancel()
        for outbox in self._outboxes.values():
            outbox.fail(reason)
        self._outboxes.clear()
        self._socket.close()
