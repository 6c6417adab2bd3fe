"""The inputs of one forward on a GPU, as the host gives them: written to pinned memory and sent in
one copy."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, Generic, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from zrt.runtime.compute.cuda.attention_launch import query_tile
from zrt.runtime.compute.decoder.rope import Rotary
from zrt.runtime.compute.decoder.shard import Shard
from zrt.runtime.compute.kv.paged_cache import PagedKVCache
from zrt.runtime.compute.shared_rows.channel import HandedRows, Rows, parts_of
from zrt.runtime.compute.turn import BatchStep

ALIGNMENT: Final = 256


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a batch: `tokens` of `prompts` steps that have several, and `singles`, the steps
    of one token."""

    tokens: int
    prompts: int
    singles: int

    @classmethod
    def of(cls, steps: Sequence[BatchStep]) -> "Size":
        """Return the size of a batch of these steps."""
        longer = [step.n for step in steps if step.n > 1]
        return cls(sum(longer), len(longer), len(steps) - len(longer))

    @property
    def rows(self) -> int:
        """The number of rows of the batch, one a token."""
        return self.tokens + self.singles

    def holds(self, other: "Size") -> bool:
        """Return whether a batch of the size `other` fits into a batch of this size."""
        return self.tokens >= other.tokens and self.prompts >= other.prompts and self.singles >= other.singles


Numbers = TypeVar("Numbers", np.ndarray[Any, Any], Tensor)
Layout: TypeAlias = list[tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True, slots=True)
class Singles(Generic[Numbers]):
    """The steps of one token, all int32: the number of each one's row [singles], the length of its
    history, itself included [singles], and its pages [singles, pages]."""

    rows: Numbers
    lengths: Numbers
    tables: Numbers


@dataclass(frozen=True, slots=True)
class Prompts(Generic[Numbers]):
    """The longer steps, all int32: the numbers of their rows [tokens], their pages [prompts,
    pages], and the tiles they are cut into [tiles, 4] (see `PagedAttention.attend_prompts`)."""

    rows: Numbers
    tables: Numbers
    tiles: Numbers


@dataclass(frozen=True, slots=True)
class Parts(Generic[Numbers]):
    """The data of a batch, on the host as arrays that are written, or on the device."""

    slots: Numbers
    """int64 [rows]: where in the pool each row's keys and values go."""
    asked: Numbers
    """int64 [singles + prompts]: the rows whose logits are asked for, as many as there are."""
    singles: Singles[Numbers]
    prompts: Prompts[Numbers]
    angles: list[tuple[Tensor, Tensor]]
    """cos and sin of every rope, two [rows, rope_dim]."""
    x: Tensor
    """Token ids int64 [rows], or hidden states [rows, hidden]."""


class Buffers:
    """A pinned buffer on the host, and one of the same size on the device. `sent` says that the
    device has read the last copy."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self.device = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.sent = torch.cuda.Event()

    def send(self, nbytes: int) -> None:
        """Start to copy `nbytes` bytes to the device."""
        self.device[:nbytes].copy_(self.host[:nbytes], non_blocking=True)
        self.sent.record()


class Inputs:
    """The data of a batch that `size` holds, in buffers of its own or in those given: `device` is
    the copy on the device."""

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
        self._host = _on_host(_views(self._buffers.host, layout))
        self.device = _parts(_views(self._buffers.device, layout))
        self._asking = 0
        self._nbytes = self._before_x = _size(layout[:-1])
        self._handed: list[tuple[int, HandedRows]] = []
        self.void: Tensor | None = None
        """Int32 on the device, for the batch that was sent last: not all 0 if rows that were handed
        over are void. None: no rows were handed over."""

    @staticmethod
    def nbytes(shard: Shard, cache: PagedKVCache, rotaries: Sequence[Rotary], size: Size) -> int:
        """Return how many bytes of buffers inputs of this size need."""
        return _size(_layout(shard, cache, rotaries, size))

    @property
    def asked(self) -> Tensor:
        """The rows whose logits are asked for, int64 on the device."""
        return self.device.asked[: self._asking]

    def fill(self, steps: Sequence[BatchStep], x: Rows) -> None:
        """Write a batch; rows beyond its own stand for one token of a history in the spare page."""
        self._buffers.sent.synchronize()  # the previous copy has read the buffer
        self._fill_x(x)
        self._fill_places(steps)
        positions, lengths = self._fill_asked(steps)
        self._fill_angles(positions, lengths, len(x))

    def send(self) -> None:
        """Start the copy to the device; rows handed over follow when they are there. ZrtError
        stage_lost: the rows will never be there."""
        self._buffers.send(self._nbytes)
        handed, self._handed = self._handed, []
        there = self.device.x
        self.void = torch.empty(len(handed), dtype=torch.int32, device=there.device) if handed else None
        for index, (start, rows) in enumerate(handed):
            to = there[start : start + len(rows)]
            assert self.void is not None
            rows.copy_to(to, self.void[index : index + 1])
            if to.dtype == torch.int64:
                to.clamp_(0, self._vocab - 1)  # void rows may hold numbers that are no ids

    def _fill_x(self, x: Rows) -> None:
        """Write the rows that are here, and remember those that are handed over."""
        host, written = self._host.x, 0
        self._handed = []
        for start, part in parts_of(x):
            if isinstance(part, HandedRows):
                self._handed.append((start, part))
            elif len(part):
                written = start + len(part)
                host[start:written] = part
        if host.dtype == torch.int64:  # all of them are looked up
            host[len(x) :], written = 0, len(host)
        self._nbytes = self._before_x + written * host[0].nbytes

    def _fill_places(self, steps: Sequence[BatchStep]) -> None:
        """Write where each row's keys and values go, and which history it sees."""
        cache, page, host = self._cache, self._cache.page_tokens, self._host
        singles, prompts = host.singles, host.prompts
        row, single, prompt, tokens = 0, 0, 0, 0
        tiles: list[tuple[int, int, int, int]] = []
        for step in steps:
            table = cache.table(step.key)
            if step.n == 1:
                host.slots[row] = table[step.seq_pos // page] * page + step.seq_pos % page
                singles.rows[single] = row
                singles.lengths[single] = step.seq_pos + 1
                singles.tables[single, : len(table)] = table
                single += 1
            else:
                host.slots[row : row + step.n] = cache.slots(step.key, step.seq_pos, step.n)
                prompts.tables[prompt, : len(table)] = table
                for start in range(0, step.n, self._tile):
                    tiles.append((row + start, min(self._tile, step.n - start), step.seq_pos + start, prompt))
                prompts.rows[tokens : tokens + step.n] = np.arange(row, row + step.n)
                prompt, tokens = prompt + 1, tokens + step.n
            row += step.n
        host.slots[row:] = cache.spare_page * page
        padding = len(singles.rows) - single
        if padding:
            singles.rows[single:] = np.arange(len(host.slots) - padding, len(host.slots))
            singles.lengths[single:] = 1
            singles.tables[single:, 0] = cache.spare_page
        # One of the prompts' rows once more, or a padding row.
        prompts.rows[tokens:] = tiles[0][0] if tiles else len(host.slots) - 1
        prompts.tiles[len(tiles) :, 1] = 0
        if tiles:
            prompts.tiles[: len(tiles)] = tiles

    def _fill_asked(self, steps: Sequence[BatchStep]) -> tuple[list[int], list[int]]:
        """Write the rows whose logits are asked for; return each row's position, and the length of
        the sequence that its rope is for."""
        positions: list[int] = []
        lengths: list[int] = []
        asked: list[int] = []
        for step in steps:
            row = len(positions)
            if step.logits:
                asked.append(row + step.n - 1)
            positions += range(step.seq_pos, step.seq_pos + step.n)
            lengths += (max(position + 1, step.rope_length) for position in positions[row:])
        self._host.asked[: len(asked)] = asked
        self._asking = len(asked)
        return positions, lengths

    def _fill_angles(self, positions: Sequence[int], lengths: Sequence[int], count: int) -> None:
        """Write cos and sin of the first `count` rows; the others are not rotated."""
        where, known = torch.tensor(positions, dtype=torch.int64), torch.tensor(lengths, dtype=torch.int64)
        for rotary, (cos, sin) in zip(self._rotaries, self._host.angles, strict=True):
            cos[count:], sin[count:] = 1, 0
            if count:
                got = rotary.at(where, known)
                cos[:count], sin[:count] = got[0].squeeze(1), got[1].squeeze(1)


def _layout(shard: Shard, cache: PagedKVCache, rotaries: Sequence[Rotary], size: Size) -> Layout:
    """Return shapes and dtypes of `Parts`, in its order; the part that may not have to be copied
    comes last."""
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


def _parts(views: Sequence[Tensor]) -> Parts[Tensor]:
    """Return the parts that lie in views of the layout."""
    slots, asked = views[:2]
    angles = list(zip(views[8:-1:2], views[9:-1:2], strict=True))
    return Parts(slots, asked, Singles(*views[2:5]), Prompts(*views[5:8]), angles, views[-1])


def _on_host(views: Sequence[Tensor]) -> Parts[np.ndarray[Any, Any]]:
    """Return the parts that lie in views on the host, as arrays, to which single numbers are
    written."""
    slots, asked, rows, lengths, tables, prompt_rows, prompt_tables, tiles = (part.numpy() for part in views[:8])
    there = _parts(views)
    singles, prompts = Singles(rows, lengths, tables), Prompts(prompt_rows, prompt_tables, tiles)
    return Parts(slots, asked, singles, prompts, there.angles, there.x)


def _size(layout: Layout) -> int:
    """Return the number of bytes of buffers of this layout."""
    return sum(_aligned(prod(shape) * dtype.itemsize) for shape, dtype in layout)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _views(buffer: Tensor, layout: Layout) -> list[Tensor]:
    """Return the tensors of this layout in a buffer of uint8."""
    views, start = [], 0
    for shape, dtype in layout:
        size = prod(shape) * dtype.itemsize
        views.append(buffer[start : start + size].view(dtype).view(shape))
        start += _aligned(size)
    return views
