"""Where weights come from: safetensors files read by byte range, or tensors drawn from a config alone.

A source fills tensors that the caller allocated, whole or in part, so nothing beyond one chunk is held besides them: files are read
with `preadv` (never mapped), straight into the destination where dtypes agree, through one staging chunk where they do not.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

import torch
from torch import Tensor

from zrt.runtime.compute.headers import TensorEntry, open_file, read_header, read_index
from zrt.runtime.compute.spec import ModelSpec
from zrt.runtime.errors import ZrtError

CHUNK_BYTES: Final = 8 << 20
RUN_BYTES: Final = 4 << 20  # of float32 drawn from one seed; another value makes other random models
SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
FILE_DTYPES: Final = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

Tick = Callable[[int], None]
"""Called with the destination bytes just filled, at least once every `CHUNK_BYTES`; may raise to stop the read."""


class Source(Protocol):
    """Fills tensors by name."""

    def check(self, name: str, shape: Sequence[int]) -> None:
        """`bad_model` unless the source has tensor `name`, whole, in this shape and a dtype it can read. Reads no data."""

    def read(self, name: str, shape: Sequence[int], into: Tensor, tick: Tick, *, row: int = 0, column: int = 0) -> None:
        """Fill `into` with the part of tensor `name` (`shape`, 1 or 2 dimensions) whose corner is (`row`, `column`).

        `into` may have another float dtype, another device and strides. `bad_model` when the source cannot serve exactly that.
        """


class Checkpoint:
    """The safetensors files of a model folder, by tensor name. Holds headers only; a file is open during a read alone."""

    def __init__(self, folder: Path, files: Mapping[str, Path], headers: dict[Path, dict[str, TensorEntry]]) -> None:
        """`files` says which file each tensor is in; `headers` are those read so far."""
        self._folder = folder
        self._files = files
        self._headers = headers

    def names(self) -> list[str]:
        """Every tensor the files say they hold."""
        return sorted(self._files)

    def entry(self, name: str) -> TensorEntry:
        """Where a tensor lies. Reads the header of its file at first need, so files of other stages may be absent."""
        file = self._files.get(name)
        if file is None:
            raise ZrtError("bad_model", f"tensor {name} is missing from the checkpoint in {self._folder}")
        if file not in self._headers:
            self._headers[file] = read_header(file)
        entry = self._headers[file].get(name)
        if entry is None:
            raise ZrtError("bad_model", f"tensor {name} is missing from {file}, where {INDEX_FILE} says it is")
        return entry

    def check(self, name: str, shape: Sequence[int]) -> None:
        """See `Source.check`."""
        entry = self.entry(name)
        if entry.shape != tuple(shape):
            raise ZrtError("bad_model", f"tensor {name} in {entry.file} is {list(entry.shape)}, not {list(shape)}")
        if entry.dtype not in FILE_DTYPES:
            raise ZrtError("bad_model", f"tensor {name} in {entry.file} is {entry.dtype}, not {', '.join(FILE_DTYPES)}")

    def read(self, name: str, shape: Sequence[int], into: Tensor, tick: Tick, *, row: int = 0, column: int = 0) -> None:
        """See `Source.read`."""
        self.check(name, shape)
        entry = self.entry(name)
        dtype = FILE_DTYPES[entry.dtype]
        full, part = _matrix_shape(shape), _as_matrix(into)
        _check_part(name, full, part, row, column)
        direct = dtype == into.dtype and into.device.type == "cpu" and part.is_contiguous() and part.shape[1] == full[1]
        row_bytes = full[1] * dtype.itemsize
        staging = None if direct else torch.empty(_rows_a_chunk(part, row_bytes), full[1], dtype=dtype)
        descriptor = open_file(entry.file)
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

    def check(self, name: str, shape: Sequence[int]) -> None:
        """See `Source.check`: it has every tensor, in every shape."""

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
        header = read_header(single)
        return Checkpoint(folder, dict.fromkeys(header, single), {single: header})
    if index.is_file():
        return Checkpoint(folder, read_index(index), {})
    raise ZrtError("bad_model", f"{folder} holds no weights: neither {SINGLE_FILE} nor {INDEX_FILE} (safetensors only)")


def _read_exactly(descriptor: int, into: Tensor, offset: int, name: str, file: Path) -> None:
    """Fill a contiguous CPU tensor from the file; `preadv` holds no GIL."""
    view = into.view(torch.uint8).flatten().numpy().data
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
