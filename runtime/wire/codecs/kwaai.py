"""KwaaiNet's two messages as MessagePack: written as KwaaiNet documents them, read as its reference
decoder (rmp-serde) reads them.

The usual form, a map of exactly the five known keys with `data` as bin, is a typed decode.
Everything else goes through the tolerant reader: `data` as an array of integers (what KwaaiNet
writes), `shape` as bin, keys in any order, as bin or as the field's index, unknown keys, the
positional form, enums as index, bin or {name: nil}. A repeated key is refused. Where laxness would
lose data zrt is stricter than the reference: bytes after the value are refused.

`shape` is not compared with `data` here; see wire/inference.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final, get_args

import msgspec

from zrt.runtime.messages.inference import InferenceRequest, InferenceResponse, PayloadType, ResponseType
from zrt.runtime.wire.codecs import Undecodable
from zrt.runtime.wire.codecs.msgpack_walker import Walker

_U32_MAX: Final = 2**32 - 1
_U64_MAX: Final = 2**64 - 1
_MAP_OF_5: Final = 0x85

_encoder: Final = msgspec.msgpack.Encoder()
_request: Final = msgspec.msgpack.Decoder(InferenceRequest)
_response: Final = msgspec.msgpack.Decoder(InferenceResponse)


def write(message: InferenceRequest | InferenceResponse, *, array: bool = False) -> bytes:
    """Return one message as bytes, keys in declaration order, integers in the shortest form; `data`
    as bin, or with `array` as documented: integers."""
    if not array:
        return _encoder.encode(message)
    return _encoder.encode({**msgspec.structs.asdict(message), "data": list(bytes(message.data))})


def read_request(frame: memoryview) -> InferenceRequest:
    """Return the request in a frame. Undecodable if the reference decoder would refuse it. `data`
    is a slice of the frame where it is bin."""
    if len(frame) > 0 and frame[0] == _MAP_OF_5:
        try:
            return _request.decode(frame)
        except (ValueError, RecursionError):
            pass
    return InferenceRequest(**_fields(frame, _REQUEST))


def read_response(frame: memoryview) -> InferenceResponse:
    """Return the response in a frame. Undecodable if the reference decoder would refuse it. `data`
    is a slice of the frame where it is bin."""
    if len(frame) > 0 and frame[0] == _MAP_OF_5:
        try:
            return _response.decode(frame)
        except (ValueError, RecursionError):
            pass
    return InferenceResponse(**_fields(frame, _RESPONSE, absent={"error": None}))


Readers = dict[str, Callable[[Walker], object]]


def _fields(frame: memoryview, readers: Readers, absent: dict[str, object] | None = None) -> dict[str, Any]:
    """Return the values by field name, from a map or from an array of all fields in order; `absent`
    gives what a map may leave out."""
    walker = Walker(frame)
    names = list(readers)
    values: dict[str, Any] = {}
    family, count = walker.head()
    if family == "array":
        if count != len(names):
            raise Undecodable(f"expected an array of {len(names)}, got {count}")
        for name in names:
            values[name] = _field(walker, name, readers)
    elif family == "map":
        for _ in range(count):
            key = _key(walker, names)
            if key is None:
                walker.skip()
            elif key in values:
                raise Undecodable(f"{key}: given twice")
            else:
                values[key] = _field(walker, key, readers)
        values = {**(absent or {}), **values}
    else:
        raise Undecodable(f"expected a map of {', '.join(names)}, got {family}")
    missing = [name for name in names if name not in values]
    if missing:
        raise Undecodable(f"{missing[0]}: missing")
    walker.end()
    return values


def _field(walker: Walker, name: str, readers: Readers) -> object:
    try:
        return readers[name](walker)
    except Undecodable as error:
        raise Undecodable(f"{name}: {error}") from None


def _key(walker: Walker, names: list[str]) -> str | None:
    """Return the field that a map's key names, by name or index; None for a key that is
    nobody's."""
    family, number = walker.head()
    if family == "unsigned":
        return names[number] if number < len(names) else None
    if family in ("str", "bin"):
        key = bytes(walker.take(number))
        return next((name for name in names if name.encode() == key), None)
    raise Undecodable(f"expected a key (str, bin or index), got {family}")


def _variant(walker: Walker, names: list[str]) -> str:
    """Return an enum's name: as str, bin or index, or as a map {one of these: nil}."""
    family, number = walker.head()
    wrapped = family == "map"
    if wrapped:
        if number != 1:
            raise Undecodable(f"expected a map of 1, got {number}")
        family, number = walker.head()
    name = None
    if family == "unsigned" and number < len(names):
        name = names[number]
    elif family in ("str", "bin"):
        given = bytes(walker.take(number))
        name = next((name for name in names if name.encode() == given), None)
    if name is None:
        raise Undecodable(f"expected {' or '.join(names)}, got another {family}")
    if wrapped and walker.head()[0] != "nil":
        raise Undecodable(f"expected {{{name}: nil}}")
    return name


def _dimensions(walker: Walker) -> list[int]:
    family, count = walker.head()
    if family == "bin":
        return list(walker.take(count))
    if family == "array":
        return [walker.unsigned(_U32_MAX) for _ in range(count)]
    raise Undecodable(f"expected an array of integers, got {family}")


def _octets(walker: Walker) -> memoryview:
    family, count = walker.head()
    if family == "bin":
        return walker.take(count)
    if family == "array":
        return walker.octets(count)
    raise Undecodable(f"expected bin or an array of integers, got {family}")


def _text(walker: Walker) -> str | None:
    family, count = walker.head()
    if family == "nil":
        return None
    if family not in ("str", "bin"):
        raise Undecodable(f"expected a string or nil, got {family}")
    try:
        return str(walker.take(count), "utf-8")
    except UnicodeDecodeError:
        raise Undecodable("expected a string, got bytes that are not UTF-8") from None


_REQUEST: Final[Readers] = {
    "session_id": partial(Walker.unsigned, limit=_U64_MAX),
    "seq_pos": partial(Walker.unsigned, limit=_U32_MAX),
    "payload_type": partial(_variant, names=list(get_args(PayloadType))),
    "shape": _dimensions,
    "data": _octets,
}
_RESPONSE: Final[Readers] = {
    "session_id": partial(Walker.unsigned, limit=_U64_MAX),
    "response_type": partial(_variant, names=list(get_args(ResponseType))),
    "shape": _dimensions,
    "data": _octets,
    "error": _text,
}
