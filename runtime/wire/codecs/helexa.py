"""helexa's JSON messages, as serde_json reads and writes them (messages/ranks.py).

A typed decode would take a key given twice, -0 and 1.0 for integers, and any depth, and would not
know the array form `["op", field, …]`. So the text is parsed with hooks and the result converted.
What is refused: bytes after the value, `op` or a known field given twice, numbers that are not
plain integers of 64 bits where one belongs, lone surrogates, nesting deeper than `MAX_DEPTH`.
Unknown fields may hold anything.
"""

import json
import re
from collections import Counter
from typing import Any, Final, Never, TypeAlias, get_args

import msgspec

from zrt.runtime.messages.ranks import WorkerRequest, WorkerResponse
from zrt.runtime.wire.codecs import Undecodable

MAX_DEPTH: Final = 127
"""The most arrays and objects inside one another, the message itself included: serde_json's
limit."""

_U64_MAX: Final = 2**64 - 1
_U64_DIGITS: Final = 20
_TOKENS: Final = re.compile(r'"(?:[^"\\]|\\.)*"?|[\[{]|[\]}]', re.DOTALL)
_ESCAPES: Final = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<lone>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
_encoder: Final = msgspec.json.Encoder()

_Structs: TypeAlias = dict[str, type[msgspec.Struct]]


class UnknownOp(Undecodable):
    """The error for a message whose `op` is none of those that are read here."""


def write(message: WorkerRequest | WorkerResponse) -> bytes:
    """Return a message as compact JSON, `op` first, without a newline."""
    return _encoder.encode(message)


def read_request(frame: bytes | memoryview) -> WorkerRequest:
    """Return the request in a frame. Undecodable if the reference decoder would refuse it;
    UnknownOp if only for its `op`."""
    request: WorkerRequest = _read(frame, _REQUESTS)
    return request


def read_response(frame: bytes | memoryview) -> WorkerResponse:
    """Return the response in a frame. Errors as for `read_request`."""
    response: WorkerResponse = _read(frame, _RESPONSES)
    return response


class _Object(dict[str, Any]):
    """A JSON object that remembers which keys it had twice."""

    repeated: frozenset[str] = frozenset()


def _object(pairs: list[tuple[str, Any]]) -> _Object:
    made = _Object(pairs)
    if len(made) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        made.repeated = frozenset(key for key, count in counts.items() if count > 1)
    return made


def _integer(text: str) -> int | float:
    """Return an integer as serde_json reads it: what is no u64 or negative i64, and -0, is a
    float."""
    if text == "-0" or len(text) > _U64_DIGITS:
        return float(text)
    number = int(text)
    return number if -(2**63) <= number <= _U64_MAX else float(text)


def _constant(text: str) -> Never:
    raise ValueError(f"{text} is no JSON")


_decoder: Final = json.JSONDecoder(object_pairs_hook=_object, parse_int=_integer, parse_constant=_constant)


def _read(frame: bytes | memoryview, structs: _Structs) -> Any:
    try:
        text = str(frame, "utf-8")
        _check(text)
        value = _decoder.decode(text)
    except ValueError as error:
        raise Undecodable(str(error)) from None
    if isinstance(value, list):
        value = _positional(value, structs)
    if not isinstance(value, _Object):
        raise Undecodable("expected an object with `op`, or an array that begins with it")
    if "op" not in value:
        raise Undecodable("op: missing")
    op = value["op"]
    if not isinstance(op, str):
        raise Undecodable("op: expected a string")
    struct = structs.get(op)
    if struct is None:
        raise UnknownOp(f"op: expected one of {', '.join(structs)}, got {op!r}")
    twice = value.repeated & {"op", *struct.__struct_fields__}
    if twice:
        raise Undecodable(f"{min(twice)}: given twice")
    try:
        return msgspec.convert(value, struct)
    except ValueError as error:
        raise Undecodable(f"{op}: {error}") from None


def _check(text: str) -> None:
    if text.count("[") + text.count("{") > MAX_DEPTH:
        depth = 0
        for token in _TOKENS.finditer(text):
            first = token[0][0]
            depth += first in "[{"
            depth -= first in "]}"
            if depth > MAX_DEPTH:
                raise Undecodable(f"nested deeper than {MAX_DEPTH}")
    if "\\u" in text and any(escape["lone"] for escape in _ESCAPES.finditer(text)):
        raise Undecodable("half a surrogate pair")


def _positional(values: list[Any], structs: _Structs) -> _Object:
    """Return the object that an array stands for."""
    op = values[0] if values else None
    struct = structs.get(op) if isinstance(op, str) else None
    names = ("op", *(struct.__struct_fields__ if struct is not None else ()))
    if struct is not None and len(values) > len(names):
        raise Undecodable(f"{op}: expected {len(names) - 1} fields, got {len(values) - 1}")
    return _Object(zip(names, values, strict=False))


def _by_op(union: Any) -> _Structs:
    return {str(struct.__struct_config__.tag): struct for struct in get_args(union)}


_REQUESTS: Final = _by_op(WorkerRequest)
_RESPONSES: Final = _by_op(WorkerResponse)
