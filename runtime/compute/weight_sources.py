"""Sources of weights: safetensors files read by byte range, or tensors drawn from a config alone.

A source fills tensors that the caller allocated, whole or in part, so nothing beyond one chunk is
held besides them: files are read with `preadv` (never mapped), straight into the destination where
dtypes agree, through one staging chunk where they do not.
"""

import hashlib
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final, Protocol

import torch
from torch import Tensor

from zrt.runtime.errors import ZrtError
from zrt.runtime.model_files import open_model_file
from zrt.runtime.models.architecture.spec import ModelSpec
from zrt.runtime.models.checkpoint.formats.weight_format import ByteRuns, matrix_shape
from zrt.runtime.models.checkpoint.index import CheckpointIndex

CHUNK_BYTES: Final = 8 << 20
RUN_BYTES: Final = 4 << 20  # of float32 drawn from one seed; another value makes other random models
DRAWERS: Final = 16
"""The most threads that draw at once, if there are so many cores; each holds a run, and one more
run is being placed."""
Tick = Callable[[int], None]
"""A function called with the number of destination bytes just filled, at least once every
`CHUNK_BYTES`; may raise to stop the read."""


class Source(Protocol):
    """A source of tensors by name, each read into a tensor that is there."""

    def matched(self, spec: ModelSpec) -> "tuple[Source, ModelSpec]":
        """Return the source and the spec to load by: the files decide what a tied head is tied
        to."""

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Raise ZrtError bad_model or unsupported unless the source has tensor `name`, whole, in
        this shape and a dtype it can read. Reads no data."""

    def read(self, name: str, shape: Sequence[int], into: Tensor, tick: Tick, *, row: int = 0, column: int = 0) -> None:
        """Fill `into` with the part of tensor `name` (`shape`, 1 or 2 dimensions) whose corner is
        (`row`, `column`).

        `into` may have another float dtype, another device and strides. ZrtError bad_model: the
        source cannot serve exactly that part.
        """


class Checkpoint(CheckpointIndex):
    """The safetensors files of a model folder, to be read. A file is open only while it is read."""

    def read(self, name: str, shape: Sequence[int], into: Tensor, tick: Tick, *, row: int = 0, column: int = 0) -> None:
        """Read a part of a tensor; see `Source.read`."""
        self.check(name, shape)
        entry, weights = self.entry(name), self.weight_format(name)
        dtype: torch.dtype = getattr(torch, weights.name)
        part = _as_matrix(into)
        _check_part(name, matrix_shape(shape), part, row, column)
        direct = dtype == into.dtype and into.device.type == "cpu" and part.is_contiguous()
        columns = range(column, column + part.shape[1])
        width = len(columns) * dtype.itemsize
        staging = None if direct else _Staging(_rows_a_chunk(part, width), len(columns), dtype, into.device)
        descriptor = open_model_file(entry.file)
        try:
            for start, stop in _chunks(part, width):
                target = part[start:stop]
                chunk = target if staging is None else staging.free(stop - start)
                (runs,) = weights.runs(shape, range(row + start, row + stop), columns)
                _read_runs(descriptor, chunk, entry.begin, runs, name, entry.file)
                if staging is not None:
                    staging.send(chunk, target)
                tick(target.numel() * target.itemsize)
        finally:
            os.close(descriptor)
            if staging is not None:
                staging.end()


class RandomCheckpoint:
    """A model made from its config alone. Every tensor depends on its own name and shape, not on
    how the model is cut.

    Numbers are uniform, with the standard deviation `spec.init_range`; those of norm weights are
    spread around 1, or around 0 where a family keeps them as their difference from 1. A tensor is
    drawn in runs of rows, each from a seed of its own, so that a part costs its own rows only.
    Uniform draws are exact on every machine.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._spread = spec.init_range * 3**0.5
        self._norm_center = 0.0 if spec.norms_plus_one else 1.0

    def matched(self, spec: ModelSpec) -> tuple[Source, ModelSpec]:
        """Return this source and the spec as it is (see `Source.matched`): random weights fit any
        spec."""
        return self, spec

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Accept every tensor, in every shape (see `Source.check`)."""

    def read(self, name: str, shape: Sequence[int], into: Tensor, tick: Tick, *, row: int = 0, column: int = 0) -> None:
        """Draw a part of a tensor; see `Source.read`."""
        full, part = matrix_shape(shape), _as_matrix(into)
        _check_part(name, full, part, row, column)
        center = self._norm_center if name.endswith("norm.weight") else 0.0
        run = max(1, RUN_BYTES // (full[1] * 4))

        def draw(first: int, memory: Tensor) -> Tensor:
            seed = hashlib.blake2b(f"{name}:{first}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(seed, "little", signed=True))
            rows = memory[: full[0] - first]
            return rows.uniform_(center - self._spread, center + self._spread, generator=generator)

        def place(first: int, rows: Tensor) -> None:
            start, stop = max(row, first), min(row + part.shape[0], first + rows.shape[0])
            target = part[start - row : stop - row]
            target.copy_(rows[start - first : stop - first, column : column + part.shape[1]].to(into.dtype))
            tick(target.numel() * target.itemsize)

        runs = range(row // run * run, row + part.shape[0], run)
        if len(runs) == 1:
            place(runs[0], draw(runs[0], _pages(run, full[1])))
            return
        drawers = min(DRAWERS, len(os.sched_getaffinity(0)))
        free = [_pages(run, full[1]) for _ in range(min(drawers + 1, len(runs)))]
        pool = ThreadPoolExecutor(drawers, "draw")
        drawn: deque[tuple[int, Tensor, Future[Tensor]]] = deque()

        def place_first() -> None:
            begin, memory, rows = drawn.popleft()
            place(begin, rows.result())
            free.append(memory)

        try:
            for first in runs:
                if not free:
                    place_first()
                memory = free.pop()
                drawn.append((first, memory, pool.submit(draw, first, memory)))
            while drawn:
                place_first()
        finally:
            pool.shutdown(cancel_futures=True)


def _pages(rows: int, width: int) -> Tensor:
    """Return float32 [rows, width], 0, in pages of its own, which the system has back when the
    tensor is dropped. malloc would keep, for each thread, the memory that the thread allocates and
    frees."""
    return torch.frombuffer(mmap.mmap(-1, rows * width * 4, mmap.MAP_PRIVATE), dtype=torch.float32).view(rows, width)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open the checkpoint in `folder`: `model.safetensors`, else the files its index names.
    ZrtError bad_model: there is neither."""
    return Checkpoint.open(folder)


class _Staging:
    """The buffers for chunks that cannot be read straight into a tensor. On the way to a GPU there
    are two: one is filled from the file while the other is copied."""

    def __init__(self, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._device = device
        self._chunks = [torch.empty(rows, width, dtype=dtype, pin_memory=on_gpu) for _ in range(2 if on_gpu else 1)]
        self._sent = [torch.cuda.Event() for _ in self._chunks] if on_gpu else []
        self._turn = 0

    def free(self, rows: int) -> Tensor:
        """Return a buffer of `rows` rows to write to."""
        if self._sent:
            self._sent[self._turn].synchronize()
        return self._chunks[self._turn][:rows]

    def send(self, chunk: Tensor, target: Tensor) -> None:
        """Start the copy of a chunk that `free` returned."""
        target.copy_(chunk, non_blocking=True)
        if self._sent:
            self._sent[self._turn].record(torch.cuda.current_stream(self._device))
        self._turn = (self._turn + 1) % len(self._chunks)

    def end(self) -> None:
        """Wait until all copies have arrived."""
        for sent in self._sent:
            sent.synchronize()


def _read_runs(descriptor: int, into: Tensor, begin: int, runs: ByteRuns, name: str, file: Path) -> None:
    """Fill a contiguous CPU tensor [rows, columns] from the runs of bytes that hold it, counted
    from offset `begin`: one run, or one a row."""
    parts = (into,) if runs.count == 1 else into.unbind(0)
    for part, run in zip(parts, runs, strict=True):
        _read_exactly(descriptor, part, begin + run.start, name, file)


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


def _as_matrix(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor.unsqueeze(1)


def _check_part(name: str, full: tuple[int, int], part: Tensor, row: int, column: int) -> None:
    if row < 0 or column < 0 or row + part.shape[0] > full[0] or column + part.shape[1] > full[1]:
        raise ZrtError(
            "internal", f"tensor {name} {list(full)} has no part {list(part.shape)} at row {row}, column {column}"
        )


def _rows_a_chunk(part: Tensor, row_bytes: int) -> int:
    """Return the most rows for which the bytes read and the bytes filled each stay within a
    chunk."""
    return max(1, min(part.shape[0], CHUNK_BYTES // max(row_bytes, part.shape[1] * part.itemsize, 1)))


def _chunks(part: Tensor, row_bytes: int) -> Iterator[tuple[int, int]]:
    step = _rows_a_chunk(part, row_bytes)
    for start in range(0, part.shape[0], step):
        yield start, min(start + step, part.shape[0])
