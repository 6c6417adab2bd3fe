"""A stranger that speaks ZMTP 3.1 (rfc.zeromq.org/spec/37) over a plain connection, and so can
break that at any byte."""

import socket
import struct
from collections.abc import Iterator
from contextlib import closing, contextmanager
from urllib.parse import urlsplit

from support.peers import PATIENCE_S

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)


def message(body: bytes, *, more: bool = False) -> bytes:
    return _frame(int(more), body)


def ping(ttl_ms: int = 10_000) -> bytes:
    return _command(b"PING", struct.pack(">H", ttl_ms // 100))


@contextmanager
def stranger(endpoint: str, routing_id: bytes = b"") -> Iterator[socket.socket]:
    """Open a DEALER's connection and finish the handshake. At the end of the block it is reset
    rather than closed."""
    where = urlsplit(endpoint)
    with closing(socket.create_connection((where.hostname, where.port), PATIENCE_S)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.sendall(GREETING)
        _read(connection, len(GREETING))
        connection.sendall(
            _command(b"READY", _property(b"Socket-Type", b"DEALER") + _property(b"Identity", routing_id))
        )
        _read(connection, _read(connection, 2)[1])
        yield connection


def _frame(flags: int, body: bytes) -> bytes:
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return struct.pack(">BQ", flags | 2, len(body)) + body


def _command(name: bytes, data: bytes) -> bytes:
    return _frame(4, bytes([len(name)]) + name + data)


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + struct.pack(">I", len(value)) + value


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionError("the other side closed the connection during the handshake")
        data += more
    return data
