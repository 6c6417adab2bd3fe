"""Cake's bytes, for native Cake peers: frames of an 8-byte header and a payload as the speedy
encoder writes it, big-endian.

There are two tables of message tags, and the bytes do not tell which one a peer speaks: `SEED` (12
messages, the documented one) and `HEAD` (13, with ModelDataResume, and chunks that may be
compressed and carry a CRC-32). The caller of a reader or writer names the table.

The reference reader ignores bytes of a payload after the message; here they are refused, since they
mean that the peer speaks the other table.
"""

import hashlib
import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from msgspec import Struct

from zrt.runtime.messages.layers import (
    Batch,
    Goodbye,
    Hello,
    LayerAssignment,
    LayerAssignmentAck,
    ModelDataChunk,
    ModelDataDone,
    RawTensor,
    SingleOp,
    Tensor,
    WorkerError,
    WorkerInfo,
    WorkerReady,
)
from zrt.runtime.wire.codecs import Undecodable

MAGIC: Final = 0x0104F4C7
MAX_PAYLOAD: Final = 512 * 1024 * 1024
HEADER_BYTES: Final = 8
NONCE_BYTES: Final = 32


class PackedChunk(Struct):
    """HEAD's ModelDataChunk. `checksum` is CRC-32 (zlib's) of `data` as it travels; `compressed`
    data is one zstd frame.

    The checksum is not checked here, and the data not decompressed.
    """

    filename: str
    offset: int
    total_size: int
    compressed: bool
    checksum: int
    data: memoryview


class ModelDataResume(Struct):
    """HEAD's request to go on with a file from `offset` on."""

    filename: str
    offset: int


@dataclass(frozen=True)
class MessageTable:
    """A table of the messages that the tags stand for: the tag is the index."""

    name: str
    messages: tuple[type[Struct], ...]


_SHARED: Final = (
    Hello,
    WorkerInfo,
    SingleOp,
    Batch,
    Tensor,
    Goodbye,
    LayerAssignment,
    LayerAssignmentAck,
)
SEED: Final = MessageTable("seed", (*_SHARED, ModelDataChunk, ModelDataDone, WorkerReady, WorkerError))
HEAD: Final = MessageTable("head", (*_SHARED, PackedChunk, ModelDataDone, ModelDataResume, WorkerReady, WorkerError))


def write(message: Struct, table: MessageTable) -> bytes:
    """Return the frame of a message. ValueError: the table has no such message, or a number or the
    payload is too large."""
    kind = type(message)
    if kind not in table.messages:
        raise ValueError(f"{kind.__name__} is not a message of the {table.name} table")
    parts = [table.messages.index(kind).to_bytes(4, "big")]
    for name, field in _FIELDS[kind].items():
        field.write(getattr(message, name), parts)
    size = sum(map(len, parts))
    if size > MAX_PAYLOAD:
        raise ValueError(f"a payload of {size} bytes, the limit is {MAX_PAYLOAD}")
    return b"".join((MAGIC.to_bytes(4, "big"), size.to_bytes(4, "big"), *parts))


def payload_size(header: bytes | memoryview) -> int:
    """Return how many bytes follow a frame's header. Undecodable: not a header, or more than
    MAX_PAYLOAD."""
    if len(header) < HEADER_BYTES:
        raise Undecodable(f"header: expected {HEADER_BYTES} bytes, got {len(header)}")
    magic, size = int.from_bytes(header[:4], "big"), int.from_bytes(header[4:8], "big")
    if magic != MAGIC:
        raise Undecodable(f"header: expected 0x{MAGIC:08x}, got 0x{magic:08x}")
    if size > MAX_PAYLOAD:
        raise Undecodable(f"header: a payload of {size} bytes, the limit is {MAX_PAYLOAD}")
    return size


def read(frame: bytes | memoryview, table: MessageTable) -> tuple[Struct, int]:
    """Return the first message of a buffer and how many bytes it takes; its data is a slice of the
    buffer. Undecodable: the message is not all there, or not one of `table`."""
    view = memoryview(frame)
    end = HEADER_BYTES + payload_size(view[:HEADER_BYTES])
    if len(view) < end:
        raise Undecodable(f"payload: {end - len(view)} bytes are missing")
    return read_payload(view[HEADER_BYTES:end], table), end


def read_payload(payload: memoryview, table: MessageTable) -> Struct:
    """Return the message in a frame's payload. Undecodable: not one of `table`."""
    reader = _Reader(payload)
    tag = reader.unsigned(4)
    if tag >= len(table.messages):
        raise Undecodable(f"tag: expected 0 to {len(table.messages) - 1} ({table.name} table), got {tag}")
    kind = table.messages[tag]
    try:
        message = kind(**{name: field.read(reader) for name, field in _FIELDS[kind].items()})
    except UnicodeDecodeError:
        raise Undecodable(f"{kind.__name__}: a string is not UTF-8") from None
    if reader.left:
        raise Undecodable(f"{kind.__name__}: {reader.left} bytes follow the message")
    return message


def proof(key: bytes, nonce: bytes) -> bytes:
    """Return the answer to a peer's 32-byte nonce, which shows before any frame that we hold the
    cluster's key.

    The master begins with its nonce; the worker sends its proof of that and a nonce of its own; the
    master sends its proof.
    """
    return hmac.digest(key, nonce, hashlib.sha256)


# ---- speedy's primitives -------------------------------------------------------------------------


class _Reader:
    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._view) - self._at

    def take(self, size: int) -> memoryview:
        if size > self.left:
            raise Undecodable(f"unexpected end: {size} bytes are claimed, {self.left} are left")
        self._at += size
        return self._view[self._at - size : self._at]

    def unsigned(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def octets(self) -> memoryview:
        return self.take(self.unsigned(4))

    def text(self) -> str:
        return str(self.octets(), "utf-8")

    def items(self, read: Callable[["_Reader"], Any]) -> list[Any]:
        """Read as many items as are claimed; every item takes bytes, so that a claim alone costs
        nothing."""
        return [read(self) for _ in range(self.unsigned(4))]


_Parts = list[bytes | memoryview]


@dataclass(frozen=True)
class _Field:
    """The reader and the writer of a field."""

    read: Callable[[_Reader], Any]
    write: Callable[[Any, Any], None]


def _unsigned(size: int) -> _Field:
    def write(value: int, parts: _Parts) -> None:
        try:
            parts.append(value.to_bytes(size, "big"))
        except OverflowError:
            raise ValueError(f"{value} does not fit in {size} bytes") from None

    return _Field(lambda reader: reader.unsigned(size), write)


def _write_octets(value: bytes | memoryview, parts: _Parts) -> None:
    _U32.write(len(value), parts)
    parts.append(value)


def _vector(item: _Field) -> _Field:
    def write(values: list[Any], parts: _Parts) -> None:
        _U32.write(len(values), parts)
        for value in values:
            item.write(value, parts)

    return _Field(lambda reader: reader.items(item.read), write)


def _write_step(step: tuple[str, int, int], parts: _Parts) -> None:
    _TEXT.write(step[0], parts)
    _U64.write(step[1], parts)
    _U64.write(step[2], parts)


def _write_tensor(tensor: RawTensor, parts: _Parts) -> None:
    for name, field in _RAW.items():
        field.write(getattr(tensor, name), parts)


_U32: Final = _unsigned(4)
_U64: Final = _unsigned(8)
_BOOL: Final = _Field(lambda reader: reader.unsigned(1) != 0, lambda value, parts: parts.append(bytes([value])))
_OCTETS: Final = _Field(_Reader.octets, _write_octets)
_TEXT: Final = _Field(_Reader.text, lambda value, parts: _write_octets(value.encode(), parts))
_RAW: Final[Mapping[str, _Field]] = {"data": _OCTETS, "dtype": _unsigned(1), "shape": _vector(_U64)}
_TENSOR: Final = _Field(
    lambda reader: RawTensor(**{name: field.read(reader) for name, field in _RAW.items()}), _write_tensor
)
_STEP: Final = _Field(lambda reader: (reader.text(), reader.unsigned(8), reader.unsigned(8)), _write_step)

_FIELDS: Final[Mapping[type[Struct], Mapping[str, _Field]]] = {
    Hello: {},
    WorkerInfo: {
        "version": _TEXT,
        "dtype": _TEXT,
        "os": _TEXT,
        "arch": _TEXT,
        "device": _TEXT,
        "device_idx": _U64,
        "latency": _unsigned(16),
    },
    SingleOp: {"layer_name": _TEXT, "x": _TENSOR, "index_pos": _U64, "block_idx": _U64},
    Batch: {"x": _TENSOR, "batch": _vector(_STEP)},
    Tensor: _RAW,
    Goodbye: {},
    LayerAssignment: {"layers": _vector(_TEXT), "model_hash": _TEXT},
    LayerAssignmentAck: {"needs_data": _BOOL},
    ModelDataChunk: {"filename": _TEXT, "offset": _U64, "total_size": _U64, "data": _OCTETS},
    PackedChunk: {
        "filename": _TEXT,
        "offset": _U64,
        "total_size": _U64,
        "compressed": _BOOL,
        "checksum": _U32,
        "data": _OCTETS,
    },
    ModelDataDone: {},
    ModelDataResume: {"filename": _TEXT, "offset": _U64},
    WorkerReady: {},
    WorkerError: {"message": _TEXT},
}
