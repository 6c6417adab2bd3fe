"""The refusal of a frame: one exception, and the text that names the field at fault."""

import re
from typing import Any, Final, TypeVar, get_args

import msgspec
from msgspec import Struct
from msgspec.msgpack import Decoder

from zrt.runtime.errors import Kind, ZrtError
from zrt.runtime.messages.header import Header, HopTime, Step
from zrt.runtime.messages.prompt import Id
from zrt.runtime.messages.sessions import SampledToken

_TEXT: Final = 500
_INDEX: Final = re.compile(r"\[(\d{1,9})\]")
_HEADER_PATH: Final = (Header, None, Step, None, HopTime)
_BODY_PATH: Final = (None, SampledToken, None, HopTime)


class WireError(ZrtError):
    """The refusal of what a peer sent: bad_request, unknown_op or too_large.

    `header` is the message's header, `id` a client message's id, where they could be read (else
    None and empty), so that the sender can be told.
    """

    def __init__(self, kind: Kind, message: str, *, header: Header | None = None, id: str = "") -> None:
        super().__init__(kind, message if len(message) <= _TEXT else message[:_TEXT] + "…")
        self.header = header
        self.id = id


class _Tag(Struct):
    type: str


class _Named(Struct):
    id: Id


_tag: Final = Decoder(_Tag)
_named: Final = Decoder(_Named)
_Read = TypeVar("_Read")


def _peek(decoder: Decoder[_Read], frame: memoryview) -> _Read | None:
    try:
        return decoder.decode(frame)
    except (ValueError, RecursionError):
        return None


def bad_header(error: Exception) -> WireError:
    """Return the error for a header frame that did not decode."""
    return WireError("bad_request", _explain("header", error, _HEADER_PATH))


def bad_tagged(what: str, error: Exception, frame: memoryview, union: Any) -> WireError:
    """Return the error for a map with a `type` that did not decode as one of `union`: an unknown
    `type`, or the field at fault."""
    named = _peek(_named, frame)
    id = named.id if named else ""
    tag = _peek(_tag, frame)
    known = sorted(str(member.__struct_config__.tag) for member in get_args(union))
    if tag is not None and tag.type not in known:
        return WireError("unknown_op", f"type: expected one of {', '.join(known)}, got {tag.type!r}", id=id)
    return WireError("bad_request", _explain(tag.type if tag else what, error, _BODY_PATH), id=id)


def _explain(what: str, error: Exception, levels: tuple[type[Struct] | None, ...]) -> str:
    """Return `what.field: what was expected`. `levels` tells what each index in msgspec's path
    stands for: a list's item (None) or a Struct's field."""
    if isinstance(error, RecursionError):
        return f"{what}: nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"{what}: a string is not UTF-8"
    text, _, path = str(error).partition(" - at ")
    level = iter(levels)

    def name(index: re.Match[str]) -> str:
        struct = next(level, None)
        fields = struct.__struct_fields__ if struct else ()
        number = int(index[1])
        return f".{fields[number]}" if number < len(fields) else index[0]

    if isinstance(error, msgspec.ValidationError) and path.startswith("`$"):
        return f"{what}{_INDEX.sub(name, path.strip('`$'))}: {text}"
    return f"{what}: {error}"
