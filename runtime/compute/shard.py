"""The weights one process holds: a contiguous run of blocks, with the embedding on the first and norm and head on the last."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from zrt.runtime.compute.layout import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    block_name,
    block_shapes,
    end_shapes,
    gate_up_parts,
    qkv_parts,
    shard_bytes,
    shard_shapes,
)
from zrt.runtime.compute.linear import Linear, linear
from zrt.runtime.compute.spec import ModelSpec
from zrt.runtime.compute.weights import Source
from zrt.runtime.errors import ZrtError
from zrt.runtime.tensors import dtype_name


@dataclass(frozen=True, slots=True)
class Block:
    """One decoder layer. The products that share an input are merged: q, k, v rows in `qkv`; gate, up rows in `gate_up`.

    Norm weights are in the shard's dtype, or float32 where `spec.wide_norms`. A norm that the model lacks is None.
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
    """Blocks `first..last` (inclusive, global indices) of a model, ready to compute; `nbytes` counts a shared tensor once."""

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

    @staticmethod
    def load(
        spec: ModelSpec,
        source: Source,
        blocks: tuple[int, int],
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        progress: Callable[[int, int], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> "Shard":
        """Read a shard from `source`, once all its tensors are known to be there. Blocks the calling thread.

        Beyond the shard itself it holds one chunk of `weights.CHUNK_BYTES`.
        `progress(bytes done, bytes in all)` and `cancelled()` are called at least every 8 MiB. Errors: `bad_model`, `cancelled`,
        `insufficient_memory`, `bad_config` for blocks the model does not have.
        """
        first, last = blocks
        if not 0 <= first <= last < spec.num_blocks:
            raise ZrtError("bad_config", f"blocks {first}-{last} are not within this model's 0-{spec.num_blocks - 1}")
        source, spec = source.matched(spec)
        nbytes = shard_bytes(spec, first, last, dtype_name(dtype))
        for name, shape in shard_shapes(spec, first, last).items():
            source.check(name, shape)
        loader = _Loader(spec, source, dtype, torch.device(device), nbytes, progress, cancelled)
        ends = {name: loader.tensor(name, shape) for name, shape in end_shapes(spec, first, last).items()}
        tables = {name: linear(tensor) for name, tensor in ends.items() if tensor.dim() == 2}
        is_last = last == spec.num_blocks - 1
        return Shard(
            spec=spec,
            first=first,
            last=last,
            dtype=dtype,
            device=torch.device(device),
            nbytes=nbytes,
            blocks=tuple(loader.block(index) for index in range(first, last + 1)),
            embedding=tables[EMBEDDING] if first == 0 else None,
            final_norm=loader.as_norm(ends[FINAL_NORM]) if is_last else None,
            head=tables[EMBEDDING if spec.tied else HEAD] if is_last else None,
        )

    @property
    def is_first(self) -> bool:
        return self.embedding is not None

    @property
    def is_last(self) -> bool:
        return self.head is not None


class _Loader:
    """Allocates and fills tensors one after the other, and keeps count."""

    def __init__(
        self,
        spec: ModelSpec,
        source: Source,
        dtype: torch.dtype,
        device: torch.device,
        nbytes: int,
        progress: Callable[[int, int], None] | None,
        cancelled: Callable[[], bool] | None,
    ) -> None:
        self._spec = spec
        self._source = source
        self._dtype = dtype
        self._device = device
        self._nbytes = nbytes
        self._progress = progress
        self._cancelled = cancelled
        self._done = 0

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._empty(shape)
        self._source.read(name, shape, tensor, self._tick)
        return tensor

    def block(self, index: int) -> Block:
        shapes = block_shapes(self._spec)

        def merged(*parts: str) -> Tensor:
            """Tensors of this block, stacked in one of their own: rows of the first, then of the second, …"""
            sizes = [shapes[part][0] for part in parts]
            tensor = self._empty((sum(sizes), *shapes[parts[0]][1:]))
            for part, rows in zip(parts, torch.split(tensor, sizes), strict=True):
                self._source.read(block_name(index, part), shapes[part], rows, self._tick)
            return tensor

        def layer(*projections: str) -> Linear:
            weight = merged(*(f"{projection}.weight" for projection in projections))
            biased = f"{projections[0]}.bias" in shapes
            return linear(weight, merged(*(f"{projection}.bias" for projection in projections)) if biased else None)

        def norm(name: str | None) -> Tensor | None:
            return None if name is None else self.as_norm(merged(f"{name}.weight"))

        norms, by_head, by_width = self._spec.norms, self._spec.qk_norm == "head", self._spec.qk_norm == "width"
        return Block(
            attention_norm=norm(norms.attention),
            qkv=layer(*qkv_parts(self._spec)),
            qk_norm=self._head_norms(merged("self_attn.q_norm.weight", "self_attn.k_norm.weight")) if by_head else None,
            q_norm=norm("self_attn.q_norm") if by_width else None,
            k_norm=norm("self_attn.k_norm") if by_width else None,
            o=layer("self_attn.o_proj"),
            attention_out_norm=norm(norms.attention_out),
            mlp_norm=norm(norms.mlp),
            gate_up=layer(*gate_up_parts(self._spec)),
            down=layer("mlp.down_proj"),
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
                "insufficient_memory",
                f"a tensor {list(shape)} does not fit in the memory of {self._device}, after {self._done} of {self._nbytes} bytes",
            ) from error

    def _head_norms(self, weights: Tensor) -> Tensor:
        """Norm weights of q and of k, [2 x head_dim], laid out for each of their heads."""
        q, k = self.as_norm(weights).chunk(2)
        return torch.cat((q.expand(self._spec.num_heads, -1), k.expand(self._spec.num_kv_heads, -1)))

    def _tick(self, nbytes: int) -> None:
        self._done += nbytes
        if self._progress is not None:
            self._progress(self._done, self._nbytes)
        if self._cancelled is not None and self._cancelled():
            raise ZrtError("cancelled", f"loading stopped at {self._done} of {self._nbytes} bytes")
