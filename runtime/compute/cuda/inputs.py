"""What one forward on a GPU is told by the host: written to pinned memory and sent in one copy."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Final, TypeAlias

import numpy as np
import torch
from torch import Tensor

from zrt.runtime.compute.cuda.launch import query_tile
from zrt.runtime.compute.decoder.rope import Rotary
from zrt.runtime.compute.decoder.shard import Shard
from zrt.runtime.compute.kv.paged_cache import PagedKVCache
from zrt.runtime.compute.shared_rows.channel import HandedRows, Rows, parts_of
from zrt.runtime.compute.turn import BatchStep

ALIGNMENT: Final = 256


@dataclass(frozen=True, slots=True)
class Size:
    """Of a batch: `tokens` of `prompts` steps that have several, and `singles`, the steps of one
    token."""

    tokens: int
    prompts: int
    singles: int

    @classmethod
    def of(cls, steps: Sequence[BatchStep]) -> "Size":
        longer = [step.n for step in steps if step.n > 1]
        return cls(sum(longer), len(longer), len(steps) - len(longer))

    @property
    def rows(self) -> int:
        return self.tokens + self.singles

    def holds(self, other: "Size") -> bool:
        return self.tokens >= other.tokens and self.prompts >= other.prompts and self.singles >= other.singles


Layout: TypeAlias = list[tuple[tuple[int, ...], torch.dtype]]


class Buffers:
    """The same bytes twice: pinned on the host, and on the device. `sent` says that the device has
    read what was sent last."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self.device = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.sent = torch.cuda.Event()

    def send(self, nbytes: int) -> None:
        """Start to copy so many bytes to the device."""
        self.device[:nbytes].copy_(self.host[:nbytes], non_blocking=True)
        self.sent.record()


class Inputs:
    """A batch that `size` holds, in buffers of its own or in those that it is given.

    On the device: `ids` int64 [rows] or `hidden` [rows, hidden]; `slots` int64 [rows], where in the
    pool each row's keys and values go; of every rope cos and sin [rows, rope_dim] (`angles`);
    `asked`, the rows whose logits are asked for; of each single its `rows` number, the `lengths` of
    its history (itself included) and its `tables` of pages, all int32; of the longer steps their
    `prompt_rows`, their `prompt_tables` and the `tiles` they are cut into
    (gpu_kernels.Heads.attend_prompts).
    """

    def __init__(
        self,
        shard: Shard,
        cache: PagedKVCache,
        rotaries: Sequence[Rotary],
        size: Size,
        buffers: Buffers | None = None,
    ) -> None:
        self._vocab = shard.spec.vocab_size
        self._cache = cache
        self._rotaries = rotaries
        self._tile = query_tile(shard.dtype)
        layout = _layout(shard, cache, rotaries, size)
        self._buffers = Buffers(_size(layout), shard.device) if buffers is None else buffers
        *numbers, self._x = _views(self._buffers.host, layout)
        on_host = [part.numpy() for part in numbers[:8]]
        self._slots, self._asked, self._rows, self._lengths, self._tables = on_host[:5]
        self._prompt_rows, self._prompt_tables, self._tiles = on_host[5:]
        self._angles = list(zip(numbers[8::2], numbers[9::2], strict=True))
        *numbers, self.ids = _views(self._buffers.device, layout)
        self.hidden = self.ids
        self.slots, self._asked_there, self.rows, self.lengths, self.tables = numbers[:5]
        self.prompt_rows, self.prompt_tables, self.tiles = numbers[5:8]
        self.angles = list(zip(numbers[8::2], numbers[9::2], strict=True))
        self._asking = 0
        self._nbytes = self._before_x = _size(layout[:-1])
        self._handed: list[tuple[int, HandedRows]] = []
        self.void: Tensor | None = None
        """int32 on the device, of the batch that was sent last: not all 0 if rows that were handed
        over are void. None: none were."""

    @staticmethod
    def nbytes(shard: Shard, cache: PagedKVCache, rotaries: Sequence[Rotary], size: Size) -> int:
        """Of the buffers that they need."""
        return _size(_layout(shard, cache, rotaries, size))

    @property
    def asked(self) -> Tensor:
        """int64 on the device: the rows whose logits are asked for."""
        return self._asked_there[: self._asking]

    def fill(self, steps: Sequence[BatchStep], x: Rows) -> None:
        """Write a batch; rows beyond its own stand for one token of a history in the spare page."""
        self._buffers.sent.synchronize()  # the copy before has read the buffer
        cache, page = self._cache, self._cache.page_tokens
        count, written = len(x), 0
        self._handed = []
        for start, part in parts_of(x):
            if isinstance(part, HandedRows):
                self._handed.append((start, part))
            elif len(part):
                written = start + len(part)
                self._x[start:written] = part
        if self._x.dtype == torch.int64:  # all of them are looked up
            self._x[count:], written = 0, len(self._x)
        self._nbytes = self._before_x + written * self._x[0].nbytes
        self._slots[count:] = cache.spare_page * page
        positions: list[int] = []
        lengths: list[int] = []
        single, prompt, tokens = 0, 0, 0
        tiles: list[tuple[int, int, int, int]] = []
        asked: list[int] = []
        for step in steps:
            table, row = cache.table(step.key), len(positions)
            if step.logits:
                asked.append(row + step.n - 1)
            if step.n == 1:
                self._slots[row] = table[step.seq_pos // page] * page + step.seq_pos % page
                self._rows[single] = row
                self._lengths[single] = step.seq_pos + 1
                self._tables[single, : len(table)] = table
                single += 1
            else:
                self._slots[row : row + step.n] = cache.slots(step.key, step.seq_pos, step.n)
                self._prompt_tables[prompt, : len(table)] = table
                for start in range(0, step.n, self._tile):
                    tiles.append((row + start, min(self._tile, step.n - start), step.seq_pos + start, prompt))
                self._prompt_rows[tokens : tokens + step.n] = np.arange(row, row + step.n)
                prompt, tokens = prompt + 1, tokens + step.n
            positions += range(step.seq_pos, step.seq_pos + step.n)
            lengths += (max(position + 1, step.rope_length) for position in positions[row:])
        padding = len(self._rows) - single
        if padding:
            self._rows[single:] = np.arange(len(self._slots) - padding, len(self._slots))
            self._lengths[single:] = 1
            self._tables[single:, 0] = cache.spare_page
        self._prompt_rows[tokens:] = (
            tiles[0][0] if tiles else len(self._slots) - 1
        )  # one of theirs once more, or one that pads
        self._tiles[len(tiles) :, 1] = 0
        if tiles:
            self._tiles[: len(tiles)] = tiles
        self._asked[: len(asked)] = asked
        self._asking = len(asked)
        where, known = torch.tensor(positions, dtype=torch.int64), torch.tensor(lengths, dtype=torch.int64)
        for rotary, (cos, sin) in zip(self._rotaries, self._angles, strict=True):
            cos[count:], sin[count:] = 1, 0
            if count:
                got = rotary.at(where, known)
                cos[:count], sin[:count] = got[0].squeeze(1), got[1].squeeze(1)

    def send(self) -> None:
        """Start the copy to the device; rows handed over follow when they are there. ZrtError
        stage_lost: they never will be."""
        self._buffers.send(self._nbytes)
        handed, self._handed = self._handed, []
        self.void = torch.empty(len(handed), dtype=torch.int32, device=self.hidden.device) if handed else None
        for index, (start, rows) in enumerate(handed):
            to = self.hidden[start : start + len(rows)]
            assert self.void is not None
            rows.copy_to(to, self.void[index : index + 1])
            if to.dtype == torch.int64:
                to.clamp_(0, self._vocab - 1)  # void ones are no ids


def _layout(shard: Shard, cache: PagedKVCache, rotaries: Sequence[Rotary], size: Size) -> Layout:
    """Of the buffers; what may not have to be copied comes last."""
    spec, width, rows = shard.spec, cache.table_width, size.rows
    return [
        ((rows,), torch.int64),
        ((size.singles + size.prompts,), torch.int64),
        ((size.singles,), torch.int32),
        ((size.singles,), torch.int32),
        ((size.singles, width), torch.int32),
        ((size.tokens,), torch.int32),
        ((size.prompts, width), torch.int32),
        ((size.tokens // query_tile(shard.dtype) + size.prompts, 4), torch.int32),
        *[((rows, spec.rope_dim), shard.dtype)] * (2 * len(rotaries)),
        ((rows,), torch.int64) if shard.is_first else ((rows, spec.hidden_size), shard.dtype),
    ]


def _size(layout: Layout) -> int:
    return sum(_aligned(prod(shape) * dtype.itemsize) for shape, dtype in layout)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _views(buffer: Tensor, layout: Layout) -> list[Tensor]:
    views, start = [], 0
    for shape, dtype in layout:
        size = prod(shape) * dtype.itemsize
        views.append(buffer[start : start + size].view(dtype).view(shape))
        start += _aligned(size)
    return views
