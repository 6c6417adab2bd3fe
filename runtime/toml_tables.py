"""Tables of a TOML file as Structs, with every mistake collected in words rather than the first one raised."""

import difflib
import re
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Final, Literal, TypeVar, get_args, get_origin

import msgspec

Readers = Mapping[str, Callable[[object], Any]]
"""How the values of some keys are read; those of others by their type. They raise ValueError."""

_UNITS: Final = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_T = TypeVar("_T", bound=msgspec.Struct)


def read_table(
    kind: type[_T],
    table: object,
    at: str,
    readers: Readers,
    mistakes: list[str],
    judged: AbstractSet[str] = frozenset(),
) -> _T | None:
    """`table` as `kind`, with what is wrong in it added to `mistakes` and left out: None if that is required, or `judged` beside other tables."""
    if not isinstance(table, dict):
        mistakes.append(f"{at} must be a table, not {table!r}")
        return None
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    found = [f"{at} {mistake}" for mistake in unknown(table, list(fields), "key")]
    values: dict[str, Any] = {}
    misread: set[str] = set()
    for name, field in fields.items():
        if name not in table:
            if field.required:
                found.append(f"{at} lacks {name}")
                misread.add(name)
            continue
        try:
            values[name] = readers.get(name, _reader(field.type))(table[name])
        except ValueError as error:  # msgspec.ValidationError is one
            found.append(f"{at} {name}: {error}")
            if fields[name].required or name in judged:
                misread.add(name)
    mistakes += found
    return None if misread else kind(**values)


def read_tables(
    kind: type[_T], tables: object, at: str, readers: Readers, mistakes: list[str]
) -> tuple[_T, ...] | None:
    """A list of tables, as `read_table` reads them: None if one of them is."""
    if not isinstance(tables, list):
        mistakes.append(f"{at} must be a list of tables, not {tables!r}")
        return None
    read = [read_table(kind, table, f"{at} {n}", readers, mistakes) for n, table in enumerate(tables, 1)]
    known = tuple(table for table in read if table is not None)
    return known if len(known) == len(read) else None


def unknown(table: Mapping[str, object], valid: list[str], what: str) -> list[str]:
    """A mistake for each name that is not valid, with the one that may have been meant."""
    mistakes = []
    for name in table:
        if name not in valid:
            near = difflib.get_close_matches(name, valid, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            mistakes.append(f"{name} is no {what} here; {hint}valid: {', '.join(valid)}")
    return mistakes


def _reader(kind: Any) -> Callable[[object], Any]:
    def read(value: object) -> Any:
        if get_origin(kind) is Literal and value not in get_args(kind):
            raise ValueError(f"{value!r} is not one of {', '.join(get_args(kind))}")
        return msgspec.convert(value, kind)

    return read


def size(value: object) -> int:
    """Bytes of an int or of a text such as "1GiB" or "1.5 GiB". Raises ValueError."""
    match msgspec.convert(value, int | str):
        case int(count):
            pass
        case text:
            found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]+)", text, re.ASCII)
            if found is None or found[2] not in _UNITS:
                raise ValueError(
                    f'{text!r} is no size; write bytes or a text such as "1GiB" (units {", ".join(_UNITS)})'
                )
            count = int(float(found[1]) * _UNITS[found[2]])
    if count < 1:
        raise ValueError(f"{value!r} is no size above 0")
    return count
