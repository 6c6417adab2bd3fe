"""Tables of a TOML file as Structs, with every mistake collected in words rather than the first one
raised."""

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, TypeVar, get_args, get_origin

import msgspec
import msgspec.inspect

Readers = Mapping[str, Callable[[object], Any]]
"""Readers for the values of some keys; values of other keys are read by their type. A reader raises
ValueError."""

_UNITS: Final = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE: Final = 'bytes or a text such as "1GiB"'
_T = TypeVar("_T", bound=msgspec.Struct)
_V = TypeVar("_V")


@dataclass(frozen=True, slots=True)
class Read(Generic[_T]):
    """A table as it was read. The keys in `misread` are in the file, but could not be read: in
    `table` they have their defaults."""

    table: _T
    misread: frozenset[str] = frozenset()

    def has(self, *names: str) -> bool:
        """Return whether none of these keys is misread: the file has it, or rightly leaves it
        out."""
        return self.misread.isdisjoint(names)


def read_table(kind: type[_T], table: object, at: str, readers: Readers, mistakes: list[str]) -> Read[_T] | None:
    """Return `table` as `kind`, and add what is wrong in it to `mistakes`. None: `table` is no
    table, or a required key could not be read."""
    if not isinstance(table, dict):
        mistakes.append(f"{at} must be a table, not {shown(table)}")
        return None
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    mistakes += [f"{at} {mistake}" for mistake in unknown(table, list(fields), "key")]
    meant = {near for name in table if name not in fields and (near := _near(name, list(fields)))}
    values: dict[str, Any] = {}
    misread: set[str] = set()
    for name, field in fields.items():
        if name not in table:
            if field.required:
                mistakes.append(f"{at} lacks {name}")
            if field.required or name in meant:
                misread.add(name)
            continue
        try:
            values[name] = readers.get(name, _reader(field.type))(table[name])
        except ValueError as error:
            mistakes.append(f"{at} {name}: {error}")
            misread.add(name)
    if any(fields[name].required for name in misread):
        return None
    return Read(kind(**values), frozenset(misread))


def read_tables(
    kind: type[_T], tables: object, at: str, readers: Readers, mistakes: list[str]
) -> list[Read[_T] | None] | None:
    """Return a list of tables, each as `read_table` returns it. None: `tables` is no list."""
    if not isinstance(tables, list):
        mistakes.append(f"{at} must be a list of tables, not {shown(tables)}")
        return None
    return [read_table(kind, table, f"{at} {n}", readers, mistakes) for n, table in enumerate(tables, 1)]


def unknown(table: Mapping[str, object], valid: list[str], what: str) -> list[str]:
    """Return a mistake for each name that is not valid, with the valid name that may have been
    meant."""
    mistakes = []
    for name in table:
        if name not in valid:
            near = _near(name, valid)
            hint = f"did you mean {near}? " if near else ""
            mistakes.append(f"{name} is not a {what} here; {hint}valid: {', '.join(valid)}")
    return mistakes


def _near(name: str, valid: list[str]) -> str:
    """Return the valid name that may have been meant; empty if none is near."""
    return next(iter(difflib.get_close_matches(name, valid, n=1)), "")


def read_as(kind: type[_V], value: object, expected: str) -> _V:
    """Return `value` if it is of type `kind`. Raises ValueError, which says what was `expected`."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        raise ValueError(f"expected {expected}, got {shown(value)}") from None


def shown(value: object) -> str:
    """Return a value roughly as it is written in the file."""
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _reader(kind: Any) -> Callable[[object], Any]:
    def read(value: object) -> Any:
        if get_origin(kind) is Literal and value not in get_args(kind):
            raise ValueError(f"{shown(value)} is not one of {', '.join(get_args(kind))}")
        return read_as(kind, value, _in_words(msgspec.inspect.type_info(kind)))

    return read


def _in_words(kind: msgspec.inspect.Type) -> str:
    """Return what values of a type look like in a file, in words."""
    match kind:
        case msgspec.inspect.UnionType(types):  # a key that has no default is left out, not null
            return " or ".join(_in_words(each) for each in types if not isinstance(each, msgspec.inspect.NoneType))
        case msgspec.inspect.IntType() | msgspec.inspect.FloatType():
            number = "a whole number" if isinstance(kind, msgspec.inspect.IntType) else "a number"
            signs = {">": kind.gt, ">=": kind.ge, "<": kind.lt, "<=": kind.le}
            limits = " and ".join(f"{sign} {limit:g}" for sign, limit in signs.items() if limit is not None)
            return f"{number} {limits}".rstrip()
        case msgspec.inspect.BoolType():
            return "true or false"
        case msgspec.inspect.StrType(min_length=1):
            return "a text that is not empty"
        case msgspec.inspect.StrType(pattern=str(pattern)):
            return f"a text of the pattern {pattern}"
        case _:
            return "a text"


def size(value: object) -> int:
    """Return the bytes in an int or in a text such as "1GiB" or "1.5 GiB". Raises ValueError."""
    match read_as(int | str, value, _SIZE):  # type: ignore[arg-type]
        case int(count):
            pass
        case text:
            found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]+)", text, re.ASCII)
            if found is None or found[2] not in _UNITS:
                raise ValueError(f"{text!r} is no size; write {_SIZE} (units {', '.join(_UNITS)})")
            count = int(float(found[1]) * _UNITS[found[2]])
    if count < 1:
        raise ValueError(f"{value!r} is no size above 0")
    return count
