"""The weights one process holds: a contiguous run of blocks, with the embedding on the first and
norm and head on the last."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from zrt.runtime.compute.decoder.linear import Linear, linear
from zrt.runtime.compute.decoder.tp_linear import LEADER, Collectives, RowParallelLinear, VocabularyLinear
from zrt.runtime.compute.tensors import dtype_name
from zrt.runtime.compute.weight_sources import Source
from zrt.runtime.errors import ZrtError
from zrt.runtime.models.architecture.spec import ModelSpec
from zrt.runtime.models.checkpoint.layout import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    block_bytes,
    block_name,
    block_shapes,
    blocks_shapes,
    embedding_bytes,
    end_shapes,
    ends_bytes,
    gate_up_parts,
    qkv_parts,
)
from zrt.runtime.models.checkpoint.split import RankPart, part_bytes


@dataclass(frozen=True, slots=True)
class Block:
    """One decoder layer. The products that share an input are merged: q, k, v rows in `qkv`; gate,
    up rows in `gate_up`.

    Norm weights are in the shard's dtype, or float32 where `spec.wide_norms`. A norm that the model
    lacks is None.
    """

    attention_norm: Tensor | None  # [hidden]
    qkv: Linear
    qk_norm: Tensor | None  # [heads + kv heads, head_dim], the norm weight of each q and k head
    q_norm: Tensor | None  # [heads x head_dim], where q is normed over all its heads at once
    k_norm: Tensor | None  # [kv heads x head_dim], likewise
    o: Linear
    attention_out_norm: Tensor | None  # [hidden]
    mlp_norm: Tensor | None  # [hidden]
    gate_up: Linear
    down: Linear
    mlp_out_norm: Tensor | None  # [hidden]


@dataclass(frozen=True, slots=True)
class Shard:
    """Blocks `first..last` (inclusive, global indices) of a model, ready to compute; `nbytes`
    counts a shared tensor once.

    With a `group` it is one rank's part of them: `spec` is the model as that rank computes it, and
    embedding and head are split by vocabulary.
    """

    spec: ModelSpec
    first: int
    last: int
    dtype: torch.dtype
    device: torch.device
    nbytes: int
    blocks: tuple[Block, ...]
    embedding: Linear | None  # [vocab, hidden], on the first stage, for its rows
    final_norm: Tensor | None  # [hidden], on the last stage, as the blocks' norms
    head: Linear | None  # [vocab, hidden], on the last stage; the embedding itself where tied and held together
    group: Collectives | None = None

    @staticmethod
    def load(
        spec: ModelSpec,
        source: Source,
        blocks: tuple[int, int],
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        ends: tuple[bool, bool] | None = None,
        table: Linear | None = None,
        group: Collectives | None = None,
        progress: Callable[[int, int], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> "Shard":
        """Read a shard from `source`, once all its tensors are known to be there. Blocks the
        calling thread.

        `ends` says whether embedding and head are part of it, by default with the model's first and
        last block; where it is given, there may be no blocks, and `last` is `first - 1` then.
        `table` is the embedding or head of another shard on this device: where they are tied it is
        this one's as well, which neither reads nor counts it. Of a shard that is split over a
        `group`, only what this rank computes with is read. Beyond the shard itself it holds one
        chunk of `weights.CHUNK_BYTES`. `progress(bytes done, bytes in all)` and `cancelled()` are
        called at least every 8 MiB. Errors: `bad_model`, `cancelled`, `insufficient_memory`,
        `bad_config` for blocks the model does not have.
        """
        first, last = blocks
        least = first if ends is None else first - 1
        if not first >= 0 or not least <= last < spec.num_blocks:
            raise ZrtError("bad_config", f"blocks {first}-{last} are not within this model's 0-{spec.num_blocks - 1}")
        source, spec = source.matched(spec)
        part = RankPart() if group is None else RankPart(group.rank, group.world)
        own = part.spec(spec)
        if ends is None:
            ends = first == 0, last == spec.num_blocks - 1
            nbytes = part_bytes(spec, part, first, last, dtype_name(dtype))
        else:
            nbytes = (last - first + 1) * block_bytes(spec, dtype_name(dtype)) + ends_bytes(
                spec, *ends, dtype_name(dtype)
            )
        at_ends = end_shapes(spec, *ends)
        for name, shape in (at_ends | blocks_shapes(spec, first, last)).items():
            source.check(name, shape)
        shared = table is not None and spec.tied and at_ends.pop(EMBEDDING, None) is not None
        if shared:
            nbytes -= embedding_bytes(spec, dtype_name(dtype))
        loader = _Loader(spec, source, dtype, torch.device(device), part, group, nbytes, progress, cancelled)
        tensors = {name: loader.tensor(name, shape) for name, shape in at_ends.items()}
        tables = {name: loader.table(tensor) for name, tensor in tensors.items() if tensor.dim() == 2}
        if shared and table is not None:
            tables[EMBEDDING] = table
        is_first, is_last = ends
        return Shard(
            spec=own,
            first=first,
            last=last,
            dtype=dtype,
            device=torch.device(device),
            nbytes=nbytes,
            blocks=tuple(loader.block(index) for index in range(first, last + 1)),
            embedding=tables[EMBEDDING] if is_first else None,
            final_norm=loader.as_norm(tensors[FINAL_NORM]) if is_last else None,
            head=tables[EMBEDDING if spec.tied else HEAD] if is_last else None,
            group=group,
        )

    @property
    def is_first(self) -> bool:
        return self.embedding is not None

    @property
    def is_last(self) -> bool:
        return self.head is not None

    @property
    def leads(self) -> bool:
        """Whether what comes out is here: not at the other ranks of a group."""
        return self.group is None or self.group.rank == LEADER


class _Loader:
    """Allocates and fills tensors one after the other, and keeps count."""

    def __init__(
        self,
        spec: ModelSpec,
        source: Source,
        dtype: torch.dtype,
        device: torch.device,
        part: RankPart,
        group: Collectives | None,
        nbytes: int,
        progress: Callable[[int, int], None] | None,
        cancelled: Callable[[], bool] | None,
    ) -> None:
        self._spec = spec
        self._own = part.spec(spec)
        self._part = part
        self._group = group
        self._source = source
        self._dtype = dtype
        self._device = device
        self._nbytes = nbytes
        self._progress = progress
        self._cancelled = cancelled
        self._done = 0

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._empty(self._part.cut(self._spec, name, shape).shape(shape))
        self._read(name, shape, tensor)
        return tensor

    def table(self, weight: Tensor) -> Linear:
        """Embedding or head."""
        return linear(weight) if self._group is None else VocabularyLinear(linear(weight), len(weight), self._group)

    def _read(self, name: str, shape: tuple[int, ...], into: Tensor) -> None:
        """Fill `into` with what this rank holds of a tensor."""
        cut = self._part.cut(self._spec, name, shape)
        column = 0 if cut.columns is None else cut.columns.first
        start = 0
        for rows in filter(len, cut.rows):
            part = into[start : start + len(rows)]
            self._source.read(name, shape, part, self._tick, row=rows.first, column=column)
            start += len(rows)
        if cut.padding:
            into[start:].zero_()
            self._tick(into[start:].nbytes)

    def block(self, index: int) -> Block:
        shapes = block_shapes(self._spec)

        def merged(*parts: str) -> Tensor:
            """Tensors of this block, stacked in one of their own: rows of the first, then of the
            second, …"""
            names = [block_name(index, part) for part in parts]
            held = [
                self._part.cut(self._spec, name, shapes[part]).shape(shapes[part])
                for name, part in zip(names, parts, strict=True)
            ]
            sizes = [shape[0] for shape in held]
            tensor = self._empty((sum(sizes), *held[0][1:]))
            for name, part, rows in zip(names, parts, torch.split(tensor, sizes), strict=True):
                self._read(name, shapes[part], rows)
            return tensor

        def layer(*projections: str) -> Linear:
            weight = merged(*(f"{projection}.weight" for projection in projections))
            bias = None
            if f"{projections[0]}.bias" in shapes:
                bias = merged(*(f"{projection}.bias" for projection in projections))
            return linear(weight, bias if bias is not None and len(bias) else None)

        def summed(projection: str) -> Linear:
            product = layer(projection)
            return product if self._group is None else RowParallelLinear(product, self._group)

        def norm(name: str | None) -> Tensor | None:
            return None if name is None else self.as_norm(merged(f"{name}.weight"))

        norms, by_head, by_width = self._spec.norms, self._spec.qk_norm == "head", self._spec.qk_norm == "width"
        return Block(
            attention_norm=norm(norms.attention),
            qkv=layer(*qkv_parts(self._spec)),
            qk_norm=self._head_norms(merged("self_attn.q_norm.weight", "self_attn.k_norm.weight")) if by_head else None,
            q_norm=norm("self_attn.q_norm") if by_width else None,
            k_norm=norm("self_attn.k_norm") if by_width else None,
            o=summed("self_attn.o_proj"),
            attention_out_norm=norm(norms.attention_out),
            mlp_norm=norm(norms.mlp),
            gate_up=layer(*gate_up_parts(self._spec)),
            down=summed("mlp.down_proj"),
            mlp_out_norm=norm(norms.mlp_out),
        )

    def as_norm(self, weight: Tensor) -> Tensor:
        """A norm's weight in the form that `rms_norm` takes."""
        if self._spec.wide_norms:
            weight = weight.float()
        return weight + 1.0 if self._spec.norms_plus_one else weight

    def _empty(self, shape: tuple[int, ...]) -> Tensor:
        try:
            return torch.empty(shape, dtype=self._dtype, device=self._device)
        except RuntimeError as error:
            raise ZrtError(
                "insufficient_memory" if self._device.type == "cpu" else "insufficient_vram",
                f"a tensor {list(shape)} does not fit in the memory of {self._device}, after {self._done} of {self._nbytes} bytes",
            ) from error

    def _head_norms(self, weights: Tensor) -> Tensor:
        """Norm weights of q and of k, [2 x head_dim], laid out for each of their heads."""
        q, k = self.as_norm(weights).chunk(2)
        return torch.cat((q.expand(self._own.num_heads, -1), k.expand(self._own.num_kv_heads, -1)))

    def _tick(self, nbytes: int) -> None:
        self._done += nbytes
        if self._progress is not None:
            self._progress(self._done, self._nbytes)
        if self._cancelled is not None and self._cancelled():
            raise ZrtError("cancelled", f"loading stopped at {self._done} of {self._nbytes} bytes")
