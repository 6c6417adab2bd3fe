"""Where weights come from: safetensors files read by byte range, or tensors drawn from a config alone.

A source fills tensors that the caller allocated, whole or in part, so nothing beyond one chunk is held besides them: files are read
with `preadv` (never mapped), straight into the destination where dtypes agree, through one staging chunk where they do not.
Format: https://huggingface.co/docs/safetensors (8 bytes of little-endian header length, JSON header, data).
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from zrt.runtime.compute.spec import ModelSpec
from zrt.runtime.errors import ZrtError

CHUNK_BYTES: Final = 8 << 20
RUN_BYTES: Final = 4 << 20  # of float32 drawn from one seed; another value makes other random models
HEADER_BYTES_MAX: Final = 100_000_000  # the format's own limit
INDEX_BYTES_MAX: Final = 64 << 20
SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
FILE_DTYPES: Final = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

Tick = Callable[[int], None]
"""Called with the destination bytes just filled, at least once every `CHUNK_BYTES`; may raise to stop the read."""


class Source(Protocol):
    """Fills tensors by name."""

    def read(self, name: str, shape: Sequence[int], into: Tensor, tick: Tick, *, row: int = 0, column: int = 0) -> None:
        """Fill `into` with the part of tensor `name` (`shape`, 1 or 2 dimensions) whose corner is (`row`, `column`).

        `into` may have another float dtype, another device and strides. `bad_model` when the source cannot serve exactly that.
        """


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor in a safetensors file: `begin` is its first byte, counted from the start of the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int


class Checkpoint:
    """The safetensors files of a model folder, by tensor name. Holds headers only; a file is open during a read alone."""

    def __init__(self, files: dict[str, Path], folder: Path) -> None:
        self.folder = folder
        self._files = files
        self._entries: dict[Path, dict[str, TensorEntry]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def names(self) -> list[str]:
        return sorted(self._files)

    def entry(self, name: str) -> TensorEntry:
        """Where a tensor lies. Reads the header of its file at first need, so files of other stages may be absent."""
        file = self._files.get(name)
        if file is None:
            raise ZrtError("bad_model", f"tensor {name} is missing from the checkpoint in {self.folder}")
        if file not in self._entries:
            self._entries[file] = read_header(file)
        entry = self._entries[file].get(name)
        if entry is None:
            raise ZrtError("bad_model", f"tensor {name} is missing from {file}, where {INDEX_FILE} says it is")
        return entry

    def read(self, name: str, shape: Sequence[int], into: Tensor, tick: Tick, *, row: int = 0, column: int = 0) -> None:
        """See `Source.read`."""
        entry = self.entry(name)
        if entry.shape != tuple(shape):
            raise ZrtError("bad_model", f"tensor {name} in {entry.file} is {list(entry.shape)}, not {list(shape)}")
        dtype = FILE_DTYPES.get(entry.dtype)
        if dtype is None:
            raise ZrtError("bad_model", f"tensor {name} in {entry.file} is {entry.dtype}, not {', '.join(FILE_DTYPES)}")
        full, part = _matrix_shape(shape), _as_matrix(into)
        _check_part(name, full, part, row, column)
        direct = dtype == into.dtype and into.device.type == "cpu" and part.is_contiguous() and part.shape[1] == full[1]
        row_bytes = full[1] * dtype.itemsize
        staging = None if direct else torch.empty(_rows_a_chunk(part, row_bytes), full[1], dtype=dtype)
        descriptor = _open(entry.file)
        try:
            for start, stop in _chunks(part, row_bytes):
                target = part[start:stop]
                chunk = target if staging is None else staging[: stop - start]
                _read_exactly(descriptor, chunk, entry.begin + (row + start) * row_bytes, name, entry.file)
                if staging is not None:
                    target.copy_(chunk[:, column : column + part.shape[1]])
                tick(target.numel() * target.itemsize)
        finally:
            os.close(descriptor)


class RandomCheckpoint:
    """A model made from its config alone. Every tensor depends on its own name and shape, not on how the model is cut.

    Numbers are uniform, with the standard deviation `spec.init_range`; those of norm weights are spread around 1. A tensor is drawn in
    runs of rows, each from a seed of its own, so that a part costs its own rows only. Uniform draws are exact on every machine.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._spread = spec.init_range * 3**0.5

    def read(self, name: str, shape: Sequence[int], into: Tensor, tick: Tick, *, row: int = 0, column: int = 0) -> None:
        """See `Source.read`."""
        full, part = _matrix_shape(shape), _as_matrix(into)
        _check_part(name, full, part, row, column)
        center = 1.0 if name.endswith("norm.weight") else 0.0
        run = max(1, RUN_BYTES // (full[1] * 4))
        drawn = torch.empty(min(run, full[0]), full[1])
        for first in range(row // run * run, row + part.shape[0], run):
            seed = hashlib.blake2b(f"{name}:{first}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(seed, "little", signed=True))
            rows = drawn[: min(run, full[0] - first)]
            rows.uniform_(center - self._spread, center + self._spread, generator=generator)
            start, stop = max(row, first), min(row + part.shape[0], first + rows.shape[0])
            target = part[start - row : stop - row]
            target.copy_(rows[start - first : stop - first, column : column + part.shape[1]])
            tick(target.numel() * target.itemsize)


def open_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in `folder`: `model.safetensors`, else the files its index names. `bad_model` when there is neither."""
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.is_file():
        entries = read_header(single)
        checkpoint = Checkpoint(dict.fromkeys(entries, single), folder)
        checkpoint._entries[single] = entries
        return checkpoint
    if index.is_file():
        return Checkpoint(_read_index(index), folder)
    raise ZrtError("bad_model", f"{folder} holds no weights: neither {SINGLE_FILE} nor {INDEX_FILE} (safetensors only)")


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file. `bad_model` names the file, and the tensor, whose header is wrong or whose data is cut off."""
    descriptor = _open(file)
    try:
        size = os.fstat(descriptor).st_size
        length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
        if size < 8 or length > min(HEADER_BYTES_MAX, size - 8):
            raise ZrtError("bad_model", f"{file} is not a whole safetensors file: {size} bytes cannot hold its header")
        text = os.pread(descriptor, length, 8)
    finally:
        os.close(descriptor)
    header = _parse_object(text, file)
    header.pop("__metadata__", None)
    return {name: _entry(name, fields, file, 8 + length, size) for name, fields in header.items()}


def _entry(name: str, fields: Any, file: Path, data: int, size: int) -> TensorEntry:
    """One header entry, checked. `data` is where the file's data begins, `size` the size of the file."""
    if not isinstance(fields, dict):
        raise ZrtError("bad_model", f"tensor {name} in {file}: its header entry is not an object")
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not (
        isinstance(dtype, str) and _sizes(shape) and _sizes(offsets) and len(offsets) == 2 and offsets[0] <= offsets[1]
    ):
        raise ZrtError("bad_model", f"tensor {name} in {file}: its header entry lacks a dtype, shape or data_offsets")
    nbytes = offsets[1] - offsets[0]
    if dtype in FILE_DTYPES and nbytes != prod(shape) * FILE_DTYPES[dtype].itemsize:
        raise ZrtError("bad_model", f"tensor {name} in {file}: {nbytes} bytes do not hold {dtype} {shape}")
    if data + offsets[1] > size:
        raise ZrtError(
            "bad_model",
            f"tensor {name} in {file} ends at byte {data + offsets[1]}, but the file has {size}: it is cut off",
        )
    return TensorEntry(file, dtype, tuple(shape), data + offsets[0], nbytes)


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value)


def _read_index(index: Path) -> dict[str, Path]:
    descriptor = _open(index)
    try:
        text = os.pread(descriptor, INDEX_BYTES_MAX, 0)
    finally:
        os.close(descriptor)
    files = _parse_object(text, index).get("weight_map")
    if not isinstance(files, dict):
        raise ZrtError("bad_model", f"{index} has no weight_map object")
    for name, file in files.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ZrtError("bad_model", f"{index}: weight_map.{name} is {file!r}, not the name of a file beside it")
    return {name: index.parent / file for name, file in files.items()}


def _parse_object(text: bytes, file: Path) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ZrtError("bad_model", f"{file} is damaged: its header is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ZrtError("bad_model", f"{file} is damaged: its header is not a JSON object")
    return value


def _open(file: Path) -> int:
    try:
        return os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ZrtError("bad_model", f"cannot read {file}: {error.strerror}") from error


def _read_exactly(descriptor: int, into: Tensor, offset: int, name: str, file: Path) -> None:
    """Fill a contiguous CPU tensor from the file; `preadv` holds no GIL."""
    view = memoryview(into.view(torch.uint8).numpy()).cast("B")
    done = 0
    while done < len(view):
        try:
            count = os.preadv(descriptor, [view[done:]], offset + done)
        except OSError as error:
            raise ZrtError("bad_model", f"reading tensor {name} from {file} failed: {error.strerror}") from error
        if count == 0:
            raise ZrtError("bad_model", f"tensor {name} in {file} is cut off: the file ended while it was read")
        done += count


def _matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    return (shape[0], shape[1]) if len(shape) == 2 else (shape[0], 1)


def _as_matrix(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor.unsqueeze(1)


def _check_part(name: str, full: tuple[int, int], part: Tensor, row: int, column: int) -> None:
    if row < 0 or column < 0 or row + part.shape[0] > full[0] or column + part.shape[1] > full[1]:
        raise ZrtError(
            "internal", f"tensor {name} {list(full)} has no part {list(part.shape)} at row {row}, column {column}"
        )


def _rows_a_chunk(part: Tensor, row_bytes: int) -> int:
    """Rows that keep both what is read and what is filled within a chunk."""
    return max(1, min(part.shape[0], CHUNK_BYTES // max(row_bytes, part.shape[1] * part.itemsize, 1)))


def _chunks(part: Tensor, row_bytes: int) -> Iterator[tuple[int, int]]:
    step = _rows_a_chunk(part, row_bytes)
    for start in range(0, part.shape[0], step):
        yield start, min(start + step, part.shape[0])
