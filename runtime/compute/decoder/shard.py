"""The weights that one process holds: a contiguous run of blocks, with the embedding on the first
and norm and head on the last."""

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
from zrt.runtime.models.checkpoint.formats.registry import format_of
from zrt.runtime.models.checkpoint.layout import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    Shapes,
    block_name,
    block_shapes,
    blocks_shapes,
    embedding_bytes,
    end_shapes,
    gate_up_parts,
    held_ends,
    qkv_parts,
)
from zrt.runtime.models.checkpoint.split import RankPart, part_bytes


@dataclass(frozen=True, slots=True)
class Block:
    """The weights of one decoder layer. The products that share an input are merged: q, k, v rows
    in `qkv`; gate, up rows in `gate_up`.

    Norm weights are in the shard's dtype, or float32 where `spec.wide_norms`. A norm that the model
    lacks is None.
    """

    attention_norm: Tensor | None  # [hidden]
    qkv: Linear
    qk_norm: Tensor | None  # [heads + kv heads, head_dim], the norm weight of each q and k head
    q_norm: Tensor | None  # [heads x head_dim], where q is normed over all its heads at once
    k_norm: Tensor | None  # [kv heads x head_dim], where k is normed over all its heads at once
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

    With a `group` the shard is one rank's part of the blocks: `spec` is the model as that rank
    computes it, and embedding and head are split by vocabulary.
    """

    spec: ModelSpec
    first: int
    last: int
    dtype: torch.dtype
    device: torch.device
    nbytes: int
    blocks: tuple[Block, ...]
    embedding: Linear | None  # [vocab, hidden], on the first stage, for its rows
    final_norm: Tensor | None  # [hidden], on the last stage, in the dtype of the blocks' norms
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

        `ends` says whether embedding and head are part of the shard, by default with the model's
        first and last block; where it is given, there may be no blocks, and `last` is `first - 1`
        then. `table` is the embedding or head of another shard on this device: where the two are
        tied it also serves this shard, which neither reads nor counts it. For a shard that is split
        over a `group`, only the part that this rank computes with is read. Beyond the shard itself
        one chunk of `weight_sources.CHUNK_BYTES` is held. `progress(bytes done, bytes in all)` and
        `cancelled()` are called at least every 8 MiB. Errors: `bad_model`, `cancelled`,
        `insufficient_memory`, `bad_config` for blocks the model does not have.
        """
        first, last = blocks
        _check_blocks(spec, first, last, least=first if ends is None else first - 1)
        source, spec = source.matched(spec)
        ends = held_ends(spec, first, last) if ends is None else ends
        part = RankPart() if group is None else RankPart(group.rank, group.world)
        own, at_ends = part.spec(spec), end_shapes(spec, *ends)
        for name, shape in (at_ends | blocks_shapes(spec, first, last)).items():
            source.check(name, shape)
        weights = format_of(dtype_name(dtype))
        nbytes = part_bytes(spec, part, first, last, weights, ends)
        if table is not None and spec.tied and at_ends.pop(EMBEDDING, None) is not None:
            nbytes -= embedding_bytes(spec, weights)
        meter = _Meter(nbytes, progress, cancelled)
        loader = _Loader(spec, source, dtype, torch.device(device), part, group, meter)
        tables, final_norm = loader.ends(at_ends, table)
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
            final_norm=final_norm,
            head=tables[EMBEDDING if spec.tied else HEAD] if is_last else None,
            group=group,
        )

    @property
    def is_first(self) -> bool:
        """Return whether the input is token ids, not hidden states."""
        return self.embedding is not None

    @property
    def is_last(self) -> bool:
        """Return whether the output is logits, not hidden states."""
        return self.head is not None

    @property
    def leads(self) -> bool:
        """Return whether the output is in this process: it is not at the other ranks of a group."""
        return self.group is None or self.group.rank == LEADER


def _check_blocks(spec: ModelSpec, first: int, last: int, least: int) -> None:
    """Raise ZrtError bad_config unless blocks `first..last` are the model's, and `last` is at least
    `least`."""
    if not first >= 0 or not least <= last < spec.num_blocks:
        raise ZrtError("bad_config", f"blocks {first}-{last} are not within this model's 0-{spec.num_blocks - 1}")


class _Meter:
    """The bytes that are loaded, of `nbytes` in all; it reports progress to the caller of the load,
    who may cancel."""

    def __init__(
        self,
        nbytes: int,
        progress: Callable[[int, int], None] | None,
        cancelled: Callable[[], bool] | None,
    ) -> None:
        self._done = 0
        self._nbytes = nbytes
        self._progress = progress
        self._cancelled = cancelled

    def tick(self, nbytes: int) -> None:
        """Count `nbytes` bytes more. ZrtError cancelled."""
        self._done += nbytes
        if self._progress is not None:
            self._progress(self._done, self._nbytes)
        if self._cancelled is not None and self._cancelled():
            raise ZrtError("cancelled", f"loading stopped at {self}")

    def __str__(self) -> str:
        return f"{self._done} of {self._nbytes} bytes"


class _Loader:
    """A loader that allocates and fills tensors one after the other."""

    def __init__(
        self,
        spec: ModelSpec,
        source: Source,
        dtype: torch.dtype,
        device: torch.device,
        part: RankPart,
        group: Collectives | None,
        meter: _Meter,
    ) -> None:
        self._spec = spec
        self._own = part.spec(spec)
        self._shapes = block_shapes(spec)
        self._part = part
        self._group = group
        self._source = source
        self._dtype = dtype
        self._device = device
        self._meter = meter

    def ends(self, stored: Shapes, shared: Linear | None) -> tuple[dict[str, Linear], Tensor | None]:
        """Read these tensors at the model's ends: the tables by name, and the final norm's weight
        if it is among them. Where the embedding is not, `shared` stands for it."""
        tensors = {name: self._tensor(name, shape) for name, shape in stored.items()}
        tables = {name: self._table(tensor) for name, tensor in tensors.items() if tensor.dim() == 2}
        if shared is not None:
            tables.setdefault(EMBEDDING, shared)
        return tables, self._as_norm(tensors[FINAL_NORM]) if FINAL_NORM in tensors else None

    def block(self, index: int) -> Block:
        """Read the block of this global index."""
        norms, by_width = self._spec.norms, self._spec.qk_norm == "width"
        return Block(
            attention_norm=self._norm(index, norms.attention),
            qkv=self._linear(index, *qkv_parts(self._spec)),
            qk_norm=self._head_norms(index) if self._spec.qk_norm == "head" else None,
            q_norm=self._norm(index, "self_attn.q_norm" if by_width else None),
            k_norm=self._norm(index, "self_attn.k_norm" if by_width else None),
            o=self._summed(index, "self_attn.o_proj"),
            attention_out_norm=self._norm(index, norms.attention_out),
            mlp_norm=self._norm(index, norms.mlp),
            gate_up=self._linear(index, *gate_up_parts(self._spec)),
            down=self._summed(index, "mlp.down_proj"),
            mlp_out_norm=self._norm(index, norms.mlp_out),
        )

    def _table(self, weight: Tensor) -> Linear:
        """Return an embedding or head with this rank's rows of it."""
        return linear(weight) if self._group is None else VocabularyLinear(linear(weight), len(weight), self._group)

    def _linear(self, index: int, *projections: str) -> Linear:
        """Read projections of a block that share an input, as one."""
        weight = self._merged(index, *(f"{projection}.weight" for projection in projections))
        bias = None
        if f"{projections[0]}.bias" in self._shapes:
            bias = self._merged(index, *(f"{projection}.bias" for projection in projections))
        return linear(weight, bias if bias is not None and len(bias) else None)

    def _summed(self, index: int, projection: str) -> Linear:
        """Read a projection of a block for which each rank computes a summand."""
        product = self._linear(index, projection)
        return product if self._group is None else RowParallelLinear(product, self._group)

    def _norm(self, index: int, name: str | None) -> Tensor | None:
        """Read the weight of a block's norm; None for a norm that the model lacks."""
        return None if name is None else self._as_norm(self._merged(index, f"{name}.weight"))

    def _head_norms(self, index: int) -> Tensor:
        """Read a block's norm weights of q and of k, laid out for each of their heads: [heads + kv
        heads, head_dim]."""
        weights = self._merged(index, "self_attn.q_norm.weight", "self_attn.k_norm.weight")
        q, k = self._as_norm(weights).chunk(2)
        return torch.cat((q.expand(self._own.num_heads, -1), k.expand(self._own.num_kv_heads, -1)))

    def _as_norm(self, weight: Tensor) -> Tensor:
        """Return a norm's weight in the form that `rms_norm` takes."""
        if self._spec.wide_norms:
            weight = weight.float()
        return weight + 1.0 if self._spec.norms_plus_one else weight

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Read this rank's part of a tensor that is stored in this shape."""
        tensor = self._empty(self._part.cut(self._spec, name, shape).shape(shape))
        self._read(name, shape, tensor)
        return tensor

    def _merged(self, index: int, *parts: str) -> Tensor:
        """Read tensors of a block into one tensor: rows of the first, then of the second, …"""
        names, shapes = [block_name(index, part) for part in parts], [self._shapes[part] for part in parts]
        held = [self._part.cut(self._spec, name, shape).shape(shape) for name, shape in zip(names, shapes, strict=True)]
        sizes = [shape[0] for shape in held]
        tensor = self._empty((sum(sizes), *held[0][1:]))
        for name, shape, rows in zip(names, shapes, torch.split(tensor, sizes), strict=True):
            self._read(name, shape, rows)
        return tensor

    def _empty(self, shape: tuple[int, ...]) -> Tensor:
        """Allocate a tensor in the shard's dtype. ZrtError insufficient_memory or
        insufficient_vram."""
        try:
            return torch.empty(shape, dtype=self._dtype, device=self._device)
        except RuntimeError as error:
            raise ZrtError(
                "insufficient_memory" if self._device.type == "cpu" else "insufficient_vram",
                f"a tensor {list(shape)} does not fit in the memory of {self._device}, after {self._meter}",
            ) from error

    def _read(self, name: str, shape: tuple[int, ...], into: Tensor) -> None:
        """Fill `into` with this rank's part of a tensor."""
        cut = self._part.cut(self._spec, name, shape)
        start = 0
        for rows, columns in cut.stored_parts(shape):
            part = into[start : start + len(rows)]
            self._source.read(name, shape, part, self._meter.tick, row=rows.start, column=columns.start)
            start += len(rows)
        if cut.padding:
            into[start:].zero_()
            self._meter.tick(into[start:].nbytes)
