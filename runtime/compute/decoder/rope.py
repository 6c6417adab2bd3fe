"""Rotary position embedding (RoFormer, arXiv 2104.09864) in the half-split form of the Hugging Face
checkpoints.

Its scaling methods are those of `modeling_rope_utils` in transformers 5: position interpolation
(linear), NTK (dynamic), Llama 3's, YaRN (arXiv 2309.00071) and LongRoPE (arXiv 2402.13753).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

import torch
from torch import Tensor

from zrt.runtime.models.architecture.rope_spec import Rope
from zrt.runtime.models.architecture.spec import BlockSpec


def inverse_frequencies(rope: Rope, length: int = 0) -> Tensor:
    """Return float32 [dim / 2]: radians a position, for each rotated pair, in a sequence of
    `length` tokens (for the kinds that depend on it)."""
    return _FREQUENCIES[rope.kind](rope, length)


class Rotary(Protocol):
    """A map from positions to angles."""

    def at(self, positions: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and signed sin of positions int64 [rows]: two [rows, 1, dim], for every block
        of one forward.

        `lengths` int64 [rows] is the length of the sequence that each token was run in. `sin`
        carries the sign of the half it multiplies, so that rotating is `x * cos + swapped halves of
        x * sin`. Both are computed in float32 and rounded to the model's dtype, as in transformers.
        """


def rotaries(blocks: Sequence[BlockSpec], context: int, dtype: torch.dtype) -> tuple[list[Rotary], list[int | None]]:
    """Return the rotaries of these blocks, each once, and for each block which of them it uses
    (None: it rotates nothing)."""
    ropes = list(dict.fromkeys(block.rope for block in blocks if block.rope is not None))
    which = [None if block.rope is None else ropes.index(block.rope) for block in blocks]
    return [rotary(rope, context, dtype) for rope in ropes], which


def rotary(rope: Rope, context: int, dtype: torch.dtype) -> Rotary:
    """Return the map from positions below `context` to angles of `dtype`."""
    if rope.kind == "dynamic":
        return DynamicRotary(rope, dtype)
    if rope.kind == "longrope":
        return LongRotary(rope, context, dtype)
    return FixedRotary(rope, context, dtype)


class FixedRotary:
    """Angles that depend on the position alone, in a table of the whole context."""

    def __init__(self, rope: Rope, context: int, dtype: torch.dtype) -> None:
        self._cos, self._sin = _table(rope, inverse_frequencies(rope), context, dtype)

    def at(self, positions: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return the angles of positions; see `Rotary.at`."""
        return _rows(self._cos, positions), _rows(self._sin, positions)


class LongRotary:
    """LongRoPE: one table for tokens of sequences that the model was made for, and one for those of
    longer sequences."""

    def __init__(self, rope: Rope, context: int, dtype: torch.dtype) -> None:
        self._original = rope.original
        self._context = context
        short = _table(rope, inverse_frequencies(rope), context, dtype)
        long = _table(rope, inverse_frequencies(rope, rope.original + 1), context, dtype)
        self._cos, self._sin = (torch.cat(pair) for pair in zip(short, long, strict=True))

    def at(self, positions: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return the angles of positions; see `Rotary.at`."""
        rows = positions + (lengths > self._original) * self._context
        return _rows(self._cos, rows), _rows(self._sin, rows)


class DynamicRotary:
    """Dynamic NTK: every length beyond `original` has frequencies of its own, so there is no
    table."""

    def __init__(self, rope: Rope, dtype: torch.dtype) -> None:
        self._rope = rope
        self._dtype = dtype

    def at(self, positions: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return the angles of positions; see `Rotary.at`."""
        each, which = lengths.unique(return_inverse=True)
        frequencies = torch.stack([inverse_frequencies(self._rope, int(length)) for length in each])
        return _cos_and_sin(self._rope, positions[:, None] * frequencies[which], self._dtype)


def _rows(table: Tensor, rows: Tensor) -> Tensor:
    """Return `table[rows]`: plain indexing wakes all threads for 24 rows already, and takes 74 µs
    for 32 rows where this function takes 2."""
    return table.index_select(0, rows)


def _table(rope: Rope, frequencies: Tensor, context: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _cos_and_sin(rope, torch.outer(torch.arange(context, dtype=torch.float32), frequencies), dtype)


def _cos_and_sin(rope: Rope, angles: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and signed sin [rows, 1, dim] of angles float32 [rows, dim / 2]."""
    cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
    return torch.cat((cos, cos), dim=1).to(dtype).unsqueeze(1), torch.cat((-sin, sin), dim=1).to(dtype).unsqueeze(1)


def _power(theta: float, rope: Rope) -> Tensor:
    """Return theta ** (2i / dim) of the pairs i."""
    return torch.pow(theta, torch.arange(0, rope.dim, 2).float() / rope.dim)


def _default(rope: Rope, length: int) -> Tensor:
    return 1.0 / _power(rope.theta, rope)


def _linear(rope: Rope, length: int) -> Tensor:
    return _default(rope, length) / rope.factor


def _dynamic(rope: Rope, length: int) -> Tensor:
    stretch = rope.factor * max(length, rope.original) / rope.original - (rope.factor - 1)
    return 1.0 / _power(rope.theta * stretch ** (rope.dim / (rope.dim - 2)), rope)


def _llama3(rope: Rope, length: int) -> Tensor:
    """Return frequencies whose long waves are stretched by `factor`, short ones kept, and those
    between the two limits stretched by degrees."""
    plain = _default(rope, length)
    turns = rope.original * plain / (2 * math.pi)  # in the original context
    kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - kept) * plain / rope.factor + kept * plain


def _yarn(rope: Rope, length: int) -> Tensor:
    """Return frequencies stretched as in Llama 3, but by degrees that depend on the pair's number,
    between the pairs that turn `beta_fast` and `beta_slow` times."""
    plain = _default(rope, length)

    def pair(turns: float) -> float:
        return rope.dim * math.log(rope.original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.dim - 1)
    width = last - first or 0.001
    kept = 1 - ((torch.arange(rope.dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    return (1 - kept) * plain / rope.factor + kept * plain


def _longrope(rope: Rope, length: int) -> Tensor:
    factors = rope.long_factors if length > rope.original else rope.short_factors
    return 1.0 / (torch.tensor(factors) * _power(rope.theta, rope))


_FREQUENCIES: Final[Mapping[str, Callable[[Rope, int], Tensor]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
