"""Which tensors a model's checkpoint holds, their shapes, and the bytes they take: pure arithmetic,
for loading and for planning.

Names are those of the Hugging Face checkpoints (`model.layers.N.self_attn.q_proj.weight`, …); a
matrix is stored `[out, in]`. In the checkpoint of a base model, saved without its head, they lack
`model.`.
"""

from typing import Final

from zrt.runtime.models.architecture.spec import ModelSpec
from zrt.runtime.models.checkpoint.formats.registry import item_bytes
from zrt.runtime.models.checkpoint.formats.weight_format import WeightFormat

PAGE_TOKENS: Final = 16
"""Tokens of one page of KV memory."""
EMBEDDING: Final = "model.embed_tokens.weight"
FINAL_NORM: Final = "model.norm.weight"
HEAD: Final = "lm_head.weight"

BASE: Final = "model."
"""The part of a name that stands for the base model, in every family."""

Shapes = dict[str, tuple[int, ...]]


def other_name(name: str) -> str:
    """Return the name that a tensor has in a checkpoint whose names differ in `BASE`: without it,
    or with it. As transformers does, either is taken where the checkpoint has one of them."""
    return name.removeprefix(BASE) if name.startswith(BASE) else BASE + name


def block_name(block: int, part: str) -> str:
    """Return the full name of a block's tensor; `block` is the global index, `part` a key of
    `block_shapes`."""
    return f"model.layers.{block}.{part}"


def qkv_parts(spec: ModelSpec) -> tuple[str, ...]:
    """Return the projections that make q, k and v, in the order of their rows."""
    return ("self_attn.qkv_proj",) if spec.fused else ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def gate_up_parts(spec: ModelSpec) -> tuple[str, ...]:
    """Return the projections that make gate and up, in the order of their rows."""
    return ("mlp.gate_up_proj",) if spec.fused else ("mlp.gate_proj", "mlp.up_proj")


def block_shapes(spec: ModelSpec) -> Shapes:
    """Return the shape of every tensor of one block, by its name within the block. All blocks are
    alike."""
    q, kv, hidden, inner = (
        spec.num_heads * spec.head_dim,
        spec.num_kv_heads * spec.head_dim,
        spec.hidden_size,
        spec.intermediate_size,
    )
    shapes: Shapes = {f"{norm}.weight": (hidden,) for norm in spec.norms if norm is not None}
    for names, rows, bias in (
        (qkv_parts(spec), (q + 2 * kv,) if spec.fused else (q, kv, kv), spec.qkv_bias),
        (gate_up_parts(spec), (2 * inner,) if spec.fused else (inner, inner), spec.mlp_bias),
    ):
        for name, count in zip(names, rows, strict=True):
            shapes |= _projection(name, (count, hidden), bias)
    shapes |= _projection("self_attn.o_proj", (hidden, q), spec.o_bias)
    shapes |= _projection("mlp.down_proj", (hidden, inner), spec.mlp_bias)
    if spec.qk_norm:
        widths = (spec.head_dim, spec.head_dim) if spec.qk_norm == "head" else (q, kv)
        shapes |= {"self_attn.q_norm.weight": widths[:1], "self_attn.k_norm.weight": widths[1:]}
    return shapes


def _projection(name: str, shape: tuple[int, int], bias: bool) -> Shapes:
    return {f"{name}.weight": shape} | ({f"{name}.bias": shape[:1]} if bias else {})


def end_shapes(spec: ModelSpec, embedding: bool, head: bool) -> Shapes:
    """Return the shapes of the tensors at the model's ends that are asked for: the embedding, and
    norm and head. A tied pair is one tensor."""
    matrix = (spec.vocab_size, spec.hidden_size)
    shapes: Shapes = {}
    if embedding:
        shapes[EMBEDDING] = matrix
    if head:
        shapes[FINAL_NORM] = (spec.hidden_size,)
        shapes[EMBEDDING if spec.tied else HEAD] = matrix
    return shapes


def held_ends(spec: ModelSpec, first: int, last: int) -> tuple[bool, bool]:
    """Return whether blocks `first..last` come with the embedding, and whether with norm and
    head."""
    return first == 0, last == spec.num_blocks - 1


def shard_shapes(spec: ModelSpec, first: int, last: int) -> Shapes:
    """Return the shape of every tensor of a shard with blocks `first..last`, by its full name."""
    return end_shapes(spec, *held_ends(spec, first, last)) | blocks_shapes(spec, first, last)


def blocks_shapes(spec: ModelSpec, first: int, last: int) -> Shapes:
    """Return the shape of every tensor of blocks `first..last` (none where last is before first),
    by its full name."""
    shapes = block_shapes(spec)
    return {block_name(block, part): shape for block in range(first, last + 1) for part, shape in shapes.items()}


def block_bytes(spec: ModelSpec, weights: WeightFormat) -> int:
    """Return the bytes of one block's weights."""
    return _bytes(block_shapes(spec), weights)


def embedding_bytes(spec: ModelSpec, weights: WeightFormat) -> int:
    """Return the bytes of the first stage's embedding."""
    return weights.nbytes((spec.vocab_size, spec.hidden_size))


def head_bytes(spec: ModelSpec, weights: WeightFormat) -> int:
    """Return the bytes of the last stage's final norm and head; a tied head counts in full, since a
    stage without the embedding holds its own."""
    return weights.nbytes((spec.hidden_size,)) + weights.nbytes((spec.vocab_size, spec.hidden_size))


def shard_bytes(spec: ModelSpec, first: int, last: int, weights: WeightFormat) -> int:
    """Return the bytes of a shard with blocks `first..last` (inclusive): the value of
    `Shard.nbytes` once loaded."""
    return _bytes(shard_shapes(spec, first, last), weights)


def ends_bytes(spec: ModelSpec, embedding: bool, head: bool, weights: WeightFormat) -> int:
    """Return the bytes of the model's ends alone."""
    return _bytes(end_shapes(spec, embedding, head), weights)


def kv_token_bytes(spec: ModelSpec, dtype: str) -> int:
    """Return the bytes of one token's keys and values in one block, in this dtype."""
    return 2 * spec.num_kv_heads * spec.head_dim * item_bytes(dtype)


def _bytes(shapes: Shapes, weights: WeightFormat) -> int:
    return sum(map(weights.nbytes, shapes.values()))
