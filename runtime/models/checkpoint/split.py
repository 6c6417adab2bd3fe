"""The split of one shard over the ranks of a tensor-parallel group: pure arithmetic, for loading
and for planning.

q, k, v, gate and up are split by rows (each rank computes its own heads and its own part of the
MLP), o and down by columns (each rank computes a summand), embedding and head by vocabulary. Norms
are whole everywhere, except those over all heads at once. Where a group has more ranks than the
model kv heads, several ranks hold the same kv head. (Megatron-LM, arXiv 1909.08053.)
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from zrt.runtime.errors import ZrtError
from zrt.runtime.models.architecture.spec import ModelSpec
from zrt.runtime.models.checkpoint.formats.weight_format import WeightFormat, matrix_shape
from zrt.runtime.models.checkpoint.layout import (
    EMBEDDING,
    HEAD,
    PAGE_TOKENS,
    Shapes,
    block_name,
    block_shapes,
    end_shapes,
    held_ends,
    kv_token_bytes,
)


@dataclass(frozen=True, slots=True)
class Cut:
    """Part of one tensor that a rank holds: these runs of rows, one after the other, of these
    columns (None: all). After the stored rows the rank holds `padding` rows of zeros."""

    rows: tuple[range, ...]
    columns: range | None = None
    padding: int = 0

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Return the part's shape, `padding` and all, of a tensor of shape `stored`."""
        rows = sum(map(len, self.rows)) + self.padding
        return (rows, *(stored[1:] if self.columns is None else (len(self.columns),)))

    def stored_parts(self, stored: tuple[int, ...]) -> Iterator[tuple[range, range]]:
        """Yield the rows and the columns of each part that lies in storage in one piece, in the
        order in which the rank holds them."""
        columns = range(matrix_shape(stored)[1]) if self.columns is None else self.columns
        for rows in filter(len, self.rows):
            yield rows, columns

    def nbytes(self, stored: tuple[int, ...], weights: WeightFormat) -> int:
        """Return the part's bytes. ZrtError unsupported: weights in this format cannot be cut this
        way."""
        for rows, columns in self.stored_parts(stored):
            weights.check_cut(stored, rows, columns)
        return weights.of(stored).nbytes(self.shape(stored))


@dataclass(frozen=True, slots=True)
class RankPart:
    """Place of rank `rank` in a group of `world` ranks. With a world of 1 every tensor is whole."""

    rank: int = 0
    world: int = 1

    def spec(self, spec: ModelSpec) -> ModelSpec:
        """Return the model as this rank computes it: its own heads and its own part of the MLP.
        ZrtError bad_config: the model cannot be split this way."""
        check_split(spec, self.world)
        return replace(
            spec,
            num_heads=spec.num_heads // self.world,
            num_kv_heads=max(1, spec.num_kv_heads // self.world),
            intermediate_size=spec.intermediate_size // self.world,
        )

    def shares(self, spec: ModelSpec) -> int:
        """Return how many ranks hold the same kv head."""
        return max(1, self.world // spec.num_kv_heads)

    def cut(self, spec: ModelSpec, name: str, shape: tuple[int, ...]) -> Cut:
        """Return what this rank holds of the tensor with this full name and stored shape."""
        if self.world == 1:
            return Cut((range(shape[0]),))
        if name in (EMBEDDING, HEAD):
            rows = vocabulary_rows(spec, self.world)
            own = range(min(shape[0], self.rank * rows), min(shape[0], (self.rank + 1) * rows))
            return Cut((own,), padding=rows - len(own))
        module, kind = name.rsplit(".", 2)[-2:]
        heads, kv_heads, inner = self._heads(spec), self._kv_heads(spec), self._inner(spec)
        q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        if module == "q_proj" or (module == "q_norm" and spec.qk_norm == "width"):
            return Cut((heads,))
        if module in ("k_proj", "v_proj") or (module == "k_norm" and spec.qk_norm == "width"):
            return Cut((kv_heads,))
        if module == "qkv_proj":
            return Cut((heads, _moved(kv_heads, q), _moved(kv_heads, q + kv)))
        if module in ("gate_proj", "up_proj"):
            return Cut((inner,))
        if module == "gate_up_proj":
            return Cut((inner, _moved(inner, spec.intermediate_size)))
        if module in ("o_proj", "down_proj") and kind == "weight":
            return Cut((range(shape[0]),), heads if module == "o_proj" else inner)
        if module in ("o_proj", "down_proj") and self.rank:
            return Cut(())  # rank 0 alone adds the bias of a sum
        return Cut((range(shape[0]),))

    def _heads(self, spec: ModelSpec) -> range:
        size = spec.num_heads // self.world * spec.head_dim
        return range(self.rank * size, (self.rank + 1) * size)

    def _kv_heads(self, spec: ModelSpec) -> range:
        count = max(1, spec.num_kv_heads // self.world)
        first = self.rank * spec.num_kv_heads // self.world
        return range(first * spec.head_dim, (first + count) * spec.head_dim)

    def _inner(self, spec: ModelSpec) -> range:
        size = spec.intermediate_size // self.world
        return range(self.rank * size, (self.rank + 1) * size)


def vocabulary_rows(spec: ModelSpec, world: int) -> int:
    """Return the rows of embedding and head on each rank; the last one's are padded where the
    vocabulary does not divide."""
    return -(-spec.vocab_size // world)


def check_split(spec: ModelSpec, world: int) -> None:
    """Raise ZrtError bad_config, with the sizes that work, unless the model can be split over
    `world` ranks."""
    if world not in works(spec):
        sizes = ", ".join(map(str, works(spec)))
        raise ZrtError(
            "bad_config",
            f"tp = {world} cannot split {spec.num_heads} heads, {spec.num_kv_heads} kv heads and an MLP of {spec.intermediate_size}; "
            f"sizes that work: {sizes}",
        )


def works(spec: ModelSpec) -> list[int]:
    """Return the tp sizes a model can be split by: they divide heads and MLP, and divide the kv
    heads or are a multiple of them."""
    return list(_works(spec))


def _works(spec: ModelSpec) -> Iterator[int]:
    for world in range(1, spec.num_heads + 1):
        splits_kv = spec.num_kv_heads % world == 0 or world % spec.num_kv_heads == 0
        if spec.num_heads % world == 0 and spec.intermediate_size % world == 0 and splits_kv:
            yield world


def _moved(span: range, by: int) -> range:
    return range(span.start + by, span.stop + by)


def kv_page_bytes(spec: ModelSpec, blocks: int, dtype: str, world: int) -> int:
    """Return the bytes of a page of `blocks` blocks on one rank."""
    return PAGE_TOKENS * blocks * kv_token_bytes(RankPart(0, world).spec(spec), dtype)


def kv_pages(spec: ModelSpec, blocks: int, dtype: str, kv_bytes: int, world: int) -> int:
    """Return how many pages `kv_bytes` hold, where every rank has an equal share of the bytes."""
    return kv_bytes // world // kv_page_bytes(spec, blocks, dtype, world)


def part_bytes(
    spec: ModelSpec,
    part: RankPart,
    first: int,
    last: int,
    weights: WeightFormat,
    ends: tuple[bool, bool] | None = None,
) -> int:
    """Return the bytes of one rank's weights: the value of `Shard.nbytes` once loaded. `ends` says
    whether embedding and head are held, by default with the model's first and last block.

    ZrtError unsupported: weights in this format cannot be cut this way.
    """
    block = {block_name(first, name): shape for name, shape in block_shapes(spec).items()}
    at_ends = end_shapes(spec, *(held_ends(spec, first, last) if ends is None else ends))
    return _part_bytes(spec, part, at_ends, weights) + (last - first + 1) * _part_bytes(spec, part, block, weights)


def _part_bytes(spec: ModelSpec, part: RankPart, stored: Shapes, weights: WeightFormat) -> int:
    return sum(part.cut(spec, name, shape).nbytes(shape, weights) for name, shape in stored.items())
