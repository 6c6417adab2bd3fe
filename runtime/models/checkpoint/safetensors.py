"""What lies where in safetensors files, checked before anything is read. Pure.

Format (https://huggingface.co/docs/safetensors): 8 bytes of header length, little-endian; a JSON
header; the data, which the tensors fill without overlaps and without holes. A model in several
files has a JSON index that maps each tensor's name to its file.
"""

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from zrt.runtime.errors import ZrtError
from zrt.runtime.model_files import open_model_file, read_model_file

HEADER_BYTES_MAX: Final = 100_000_000  # the format's own limit
ITEM_BYTES: Final[Mapping[str, int]] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
"""Bytes of one number, by the format's name of its dtype; the sub-byte dtypes, which zrt does not
read, are left out."""

Size = Annotated[int, msgspec.Meta(ge=0)]


class _HeaderEntry(msgspec.Struct):
    dtype: str
    shape: list[Size]
    data_offsets: tuple[Size, Size]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor in a file. `dtype` is the format's name; `begin` is the offset of its first byte
    from the start of the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """Tensors of one file, and all that is wrong with the file, in words that name it.

    A tensor whose own entry is wrong is in `damaged` instead of `tensors`. A file that is not
    `readable` has neither.
    """

    tensors: Mapping[str, TensorEntry]
    damaged: frozenset[str] = frozenset()
    problems: tuple[str, ...] = ()
    readable: bool = True


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """The file of each tensor, by an index file, and all that is wrong with the index, in words
    that name it.

    `damaged` are the tensors for which the index does not name a file that can be used.
    """

    files: Mapping[str, Path]
    damaged: frozenset[str] = frozenset()
    problems: tuple[str, ...] = ()
    readable: bool = True


def read_header(file: Path) -> SafetensorsHeader:
    """Return the header of one file. Whatever is wrong is in the header's `problems`: nothing is
    raised."""
    try:
        descriptor = open_model_file(file)
    except ZrtError as error:
        return _unreadable(error.message)
    try:
        size = os.fstat(descriptor).st_size
        length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
        if size < 8 or length > size - 8:
            header = f"a header of {length} bytes" if size >= 8 else "a header"
            return _unreadable(f"{file} is not a whole safetensors file: its {size} bytes cannot hold {header}")
        if length > HEADER_BYTES_MAX:
            return _unreadable(
                f"{file} is no safetensors file: its header has {length} bytes, more than {HEADER_BYTES_MAX}"
            )
        text = os.pread(descriptor, length, 8)
    except OSError as error:
        return _unreadable(f"cannot read {file}: {error.strerror}")
    finally:
        os.close(descriptor)
    try:
        entries, twice = _object(text)
    except (ValueError, RecursionError) as error:
        return _unreadable(f"{file} is damaged: its header is not a JSON object ({error})")
    entries.pop("__metadata__", None)
    return _header(file, entries, twice, 8 + length, size)


def read_index(index: Path) -> ShardIndex:
    """Return the files that an index names. Whatever is wrong is in its `problems`: nothing is
    raised."""
    try:
        text = read_model_file(index, HEADER_BYTES_MAX)
    except ZrtError as error:
        return ShardIndex({}, problems=(error.message,), readable=False)
    try:
        table, twice = _object(text)
        names = msgspec.convert(table.get("weight_map"), dict[str, str])
    except (ValueError, RecursionError) as error:
        return ShardIndex({}, problems=(f"{index} is damaged: {error}",), readable=False)
    problems = [f"{index} is damaged: it names {name} twice" for name in twice]
    files = {}
    for name, file in names.items():
        if Path(file).name != file or file in ("", "..") or not file.isprintable():
            problems.append(f"{index}: weight_map.{name} is {file!r}, not the name of a file beside it")
        else:
            files[name] = index.parent / file
    return ShardIndex(files, frozenset(names.keys() - files.keys()), tuple(problems))


def _unreadable(problem: str) -> SafetensorsHeader:
    return SafetensorsHeader({}, problems=(problem,), readable=False)


def _object(text: bytes) -> tuple[dict[str, Any], list[str]]:
    """Return the JSON object in a text, and the keys that stand twice in one of its objects.
    ValueError: the text is no JSON object."""
    twice: list[str] = []

    def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) < len(pairs):
            counts = Counter(key for key, _ in pairs)
            twice.extend(repr(key) for key, count in counts.items() if count > 1)
        return table

    def constant(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    value = json.loads(text.decode(), object_pairs_hook=table, parse_constant=constant)
    if not isinstance(value, dict):
        raise ValueError("it is something else")
    return value, twice


def _header(file: Path, entries: Mapping[str, Any], twice: list[str], data: int, size: int) -> SafetensorsHeader:
    """Return the header with these entries, checked. `data` is where the file's data begins, `size`
    the size of the file."""
    problems = [f"{file} is damaged: its header names {name} twice" for name in twice]
    tensors, damaged = {}, set()
    for name, raw in entries.items():
        try:
            tensors[name] = _entry(name, raw, file, data)
        except ValueError as error:
            damaged.add(name)
            problems.append(f"tensor {name if name.isprintable() else repr(name)} in {file}: {error}")
    end = max((entry.begin + entry.nbytes for entry in tensors.values()), default=data)
    if end > size:
        cut = [name for name, entry in tensors.items() if entry.begin + entry.nbytes > size]
        problems.append(
            f"{file} is cut off: it has {size} bytes, its header says {end}; "
            f"{len(cut)} of its {len(tensors)} tensors are not whole, such as {cut[0]}"
        )
    if not damaged:
        problems += _gaps(file, tensors, data, size)
    return SafetensorsHeader(tensors, frozenset(damaged), tuple(problems))


def _entry(name: str, raw: Any, file: Path, data: int) -> TensorEntry:
    """Return one entry of a header, checked by itself. ValueError: the entry is wrong."""
    try:
        entry = msgspec.convert(raw, _HeaderEntry)
    except msgspec.ValidationError as error:
        raise ValueError(f"its header entry is damaged ({error})") from error
    if not name.isprintable():
        raise ValueError("its name cannot be printed")
    begin, end = entry.data_offsets
    item_bytes = ITEM_BYTES.get(entry.dtype)
    if end < begin or (item_bytes is not None and end - begin != prod(entry.shape) * item_bytes):
        raise ValueError(f"bytes {begin} to {end} do not hold {entry.dtype} {entry.shape}")
    return TensorEntry(file, entry.dtype, tuple(entry.shape), data + begin, end - begin)


def _gaps(file: Path, tensors: Mapping[str, TensorEntry], data: int, size: int) -> list[str]:
    """Return where the tensors do not fill the data one after the other."""
    problems = []
    position, before = data, ""
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].nbytes)):
        if entry.begin < position:
            problems.append(
                f"tensor {name} in {file} overlaps tensor {before}: it begins {position - entry.begin} bytes before its end"
            )
        elif entry.begin > position:
            problems.append(
                f"{file} is damaged: {entry.begin - position} bytes before tensor {name} belong to no tensor"
            )
        if entry.begin + entry.nbytes >= position:
            position, before = entry.begin + entry.nbytes, name
    if position < size:
        problems.append(f"{file} is damaged: {size - position} bytes at its end belong to no tensor")
    return problems
