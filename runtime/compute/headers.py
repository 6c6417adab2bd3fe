"""What lies where in safetensors files, checked before anything is read. Pure.

Format (https://huggingface.co/docs/safetensors): 8 bytes of header length, little-endian; a JSON header; the data. A model in several
files has a JSON index that maps each tensor's name to its file.
"""

import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Final

import msgspec

from zrt.runtime.errors import ZrtError

HEADER_BYTES_MAX: Final = 100_000_000  # the format's own limit
ITEM_BYTES: Final = {"F32": 4, "BF16": 2, "F16": 2}

Size = Annotated[int, msgspec.Meta(ge=0)]


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[Size]
    data_offsets: tuple[Size, Size]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor in a file. `dtype` is the format's name; `begin` is its first byte, counted from the start of the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of one file. `bad_model` names the file, and the tensor, whose header is wrong or whose data is cut off."""
    descriptor = open_file(file)
    try:
        size = os.fstat(descriptor).st_size
        length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
        if size < 8 or length > min(HEADER_BYTES_MAX, size - 8):
            raise ZrtError("bad_model", f"{file} is not a whole safetensors file: {size} bytes cannot hold its header")
        text = os.pread(descriptor, length, 8)
    finally:
        os.close(descriptor)
    try:
        header = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ZrtError("bad_model", f"{file} is damaged: its header is not a JSON object ({error})") from error
    header.pop("__metadata__", None)
    return {name: _entry(name, raw, file, 8 + length, size) for name, raw in header.items()}


def read_index(index: Path) -> dict[str, Path]:
    """The file of each tensor, by an index file. `bad_model` when it is wrong, or names a file that is not beside it."""

    class Index(msgspec.Struct):
        weight_map: dict[str, str]

    descriptor = open_file(index)
    try:
        text = os.pread(descriptor, HEADER_BYTES_MAX, 0)
    finally:
        os.close(descriptor)
    try:
        files = msgspec.json.decode(text, type=Index).weight_map
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ZrtError("bad_model", f"{index} is damaged: {error}") from error
    for name, file in files.items():
        if Path(file).name != file:
            raise ZrtError("bad_model", f"{index}: weight_map.{name} is {file!r}, not the name of a file beside it")
    return {name: index.parent / file for name, file in files.items()}


def open_file(file: Path) -> int:
    """A descriptor for reading, the caller's to close."""
    try:
        return os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ZrtError("bad_model", f"cannot read {file}: {error.strerror}") from error


def _entry(name: str, raw: msgspec.Raw, file: Path, data: int, size: int) -> TensorEntry:
    """One entry of a header, checked. `data` is where the file's data begins, `size` the size of the file."""
    try:
        entry = msgspec.json.decode(raw, type=_Entry)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ZrtError("bad_model", f"tensor {name} in {file}: its header entry is damaged ({error})") from error
    begin, end = entry.data_offsets
    item_bytes = ITEM_BYTES.get(entry.dtype)
    if end < begin or (item_bytes is not None and end - begin != prod(entry.shape) * item_bytes):
        raise ZrtError(
            "bad_model", f"tensor {name} in {file}: bytes {begin} to {end} do not hold {entry.dtype} {entry.shape}"
        )
    if data + end > size:
        raise ZrtError(
            "bad_model", f"tensor {name} in {file} ends at byte {data + end}, but the file has {size}: it is cut off"
        )
    return TensorEntry(file, entry.dtype, tuple(entry.shape), data + begin, end - begin)
