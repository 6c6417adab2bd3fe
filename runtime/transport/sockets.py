"""The one place that makes ZeroMQ sockets: the context they live in, their options, and the
endpoints they bind.

A DEALER made here lives for one connection: libzmq never reconnects it. libzmq's own option for
that (RECONNECT_IVL -1) ends the pipe as soon as the peer is gone and drops what had already
arrived, a last reply for one, so the reconnect is put off for a day instead, and the owner of the
DEALER closes it at the first sign that its connection is over (see link.py).
"""

import asyncio
import errno
import threading
from contextlib import suppress
from typing import Final, TypeAlias, cast

import zmq

from zrt.runtime.endpoints import WILDCARDS, split_endpoint
from zrt.runtime.errors import ZrtError

Socket: TypeAlias = "zmq.Socket[bytes]"

HIGH_WATER: Final = 256
"""The number of outgoing messages that libzmq holds for one peer, besides the outbox. Incoming ones
have no such bound (see flood_guard.py)."""
LINGER_MS: Final = 250
"""How long a closed socket still tries to send what it was given."""
CLOSE_S: Final = 5.0
"""How long a context may take to end, lingering included."""
CONNECT_MS: Final = 5_000
"""How long a connection may take to be made: then a host that does not answer, or a peer that
accepts but does not speak ZMTP (a stopped process), is given up."""
PING_MS: Final = 2_000
PING_TIMEOUT_MS: Final = 10_000
"""How long a connection whose other side is stopped, or whose host is gone, takes to break.

DEALERs find out by ZMTP heartbeats, which libzmq's own thread answers, so that a busy process stays
connected. ROUTERs leave that to TCP: what they sent is not taken for this long, or the host does
not answer. libzmq 4.3.5 may end the process when a ROUTER's own heartbeat is due on a connection
that has broken after another took its routing id over.
"""
KEEPALIVE_S: Final = 2
"""The seconds between TCP's keepalive probes of a ROUTER's silent connection."""

_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)
_NEVER_MS: Final = 86_400_000
_MONITORED: Final = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_CONNECT_RETRIED
)
_NONE_LEFT: Final = (errno.EMFILE, errno.ENFILE)


class Sockets:
    """One ZeroMQ context and the sockets made in it. Used by one thread; whoever makes it closes
    it, after all its sockets."""

    def __init__(
        self, *, connect_ms: int = CONNECT_MS, ping_timeout_ms: int = PING_TIMEOUT_MS, receive_bytes: int = -1
    ) -> None:
        """Make the context. The kernel holds at most `receive_bytes` for a DEALER that does not
        read; -1: as many as it likes, which may be megabytes."""
        self.connect_ms = connect_ms
        self._ping_timeout_ms = ping_timeout_ms
        self._receive_bytes = receive_bytes
        try:
            self._context = zmq.Context(io_threads=1)
        except zmq.ZMQError as error:
            raise _not_made(error) from None

    def router(self, listen: str, advertise: str | None, *, limit: int) -> tuple[Socket, str]:
        """Return a bound ROUTER and the endpoint others connect to. Port 0 becomes a free port.

        `advertise` (tcp://host or tcp://host:port) replaces what `listen` names, for peers that
        reach this host by another name; a port it leaves out is the one bound. Frames over `limit`
        bytes end the connection that sends them. ZrtError bad_config: not an endpoint, a port that
        is taken, or a wildcard without an `advertise`.
        """
        host, port = split_endpoint(listen)
        if host in WILDCARDS and advertise is None:
            text = f"{listen} names every interface, so nobody knows which to connect to: say --advertise tcp://HOST"
            text += ' (in a cluster file advertise = "tcp://HOST")'
            raise ZrtError("bad_config", text)
        socket = self._make(zmq.ROUTER, limit, ipv6=_is_v6(host))
        socket.setsockopt(zmq.TCP_MAXRT, self._ping_timeout_ms)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_S)
        socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_S)
        # A peer whose routing id is unknown is an error (EHOSTUNREACH), not silence; a client that
        # comes back under its own routing id takes over from its old connection, which may not have
        # been noticed to be dead yet.
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            socket.bind(f"tcp://{_host(host)}:{port or '*'}")
            bound = split_endpoint(cast(bytes, socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode())[1]
            if advertise is None:
                return socket, f"tcp://{_host(host)}:{bound}"
            shown, fixed = split_endpoint(advertise)
            if shown in WILDCARDS:
                raise ZrtError("bad_config", f"{advertise} cannot be advertised: it names no host")
            return socket, f"tcp://{_host(shown)}:{fixed or bound}"
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise _not_bound(listen, error) from None
        except ZrtError:
            socket.close(linger=0)
            raise

    def dealer(self, routing_id: bytes, endpoint: str, *, limit: int) -> tuple[Socket, Socket]:
        """Return a DEALER that connects to `endpoint`, and the PAIR on which libzmq reports the
        connection's events.

        ZrtError bad_config: not an endpoint; internal: no descriptor is left.
        """
        host, port = split_endpoint(endpoint)
        if host in WILDCARDS or not port:
            raise ZrtError("bad_config", f"{endpoint} is not a place to connect to: expected tcp://HOST:PORT")
        socket = self._make(zmq.DEALER, limit, ipv6=_is_v6(host))
        socket.setsockopt(zmq.ROUTING_ID, routing_id)
        socket.setsockopt(zmq.RCVBUF, self._receive_bytes)
        socket.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, self.connect_ms)
        socket.setsockopt(zmq.HEARTBEAT_IVL, min(PING_MS, self._ping_timeout_ms // 2))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, self._ping_timeout_ms)
        monitor: Socket | None = None
        try:
            monitor = socket.get_monitor_socket(int(_MONITORED))
            monitor.setsockopt(zmq.LINGER, 0)
            socket.connect(f"tcp://{_host(host)}:{port}")
        except zmq.ZMQError as error:
            if monitor is not None:
                monitor.close(linger=0)
            socket.close(linger=0)
            if error.errno in _NONE_LEFT:
                raise _not_made(error) from None
            raise ZrtError("bad_config", f"cannot connect to {endpoint}: {error.strerror}") from None
        return socket, monitor

    def _make(self, kind: int, limit: int, *, ipv6: bool) -> Socket:
        """Return a new socket with its options set. ZrtError internal: no descriptor is left."""
        try:
            socket = self._context.socket(kind)
        except zmq.ZMQError as error:
            raise _not_made(error) from None
        for option, value in (
            (zmq.LINGER, LINGER_MS),
            (zmq.SNDHWM, HIGH_WATER),
            (zmq.RCVHWM, 0),
            (zmq.MAXMSGSIZE, limit),
            (zmq.HANDSHAKE_IVL, self.connect_ms),
            (zmq.IPV6, int(ipv6)),
        ):
            socket.setsockopt(option, value)
        return socket

    async def close(self) -> None:
        """End the context; takes up to LINGER_MS while something is still being sent. ZrtError
        internal: a socket was left open."""
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()

        def settle() -> None:
            if not over.done():
                over.set_result(None)

        def end() -> None:
            self._context.term()
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(settle)

        # term() blocks, so it has a thread of its own; a daemon, since a forgotten socket would
        # hold it for ever.
        threading.Thread(target=end, name="zmq-term", daemon=True).start()
        try:
            async with asyncio.timeout(CLOSE_S):
                await over
        except TimeoutError:
            raise ZrtError("internal", "the ZeroMQ context does not end: a socket was left open") from None


def descriptor(socket: Socket) -> int:
    """Return the descriptor a loop watches for a socket."""
    return cast(int, socket.getsockopt(zmq.FD))


def readable(socket: Socket) -> bool:
    """Return whether a message waits. Asking consumes libzmq's signal, which is not given again."""
    return bool(cast(int, socket.get(_EVENTS)) & _POLLIN)


def _is_v6(host: str) -> bool:
    return ":" in host


def _host(host: str) -> str:
    return f"[{host}]" if _is_v6(host) else host


def _not_made(error: zmq.ZMQError) -> ZrtError:
    return ZrtError("internal", f"no socket can be made: {error.strerror}; `ulimit -n` says how many there may be")


def _not_bound(listen: str, error: zmq.ZMQError) -> ZrtError:
    if error.errno == errno.EADDRINUSE:
        text = f"{listen} is taken by another process: end it, or --listen on another port (port 0 picks a free one)"
    elif error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
        text = f"{listen} is not an address of this machine: listen on one of its own, or on 127.0.0.1"
    else:
        text = f"cannot listen on {listen}: {error.strerror}"
    return ZrtError("bad_config", text)
