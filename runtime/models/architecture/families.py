"""Model families: what each `model_type` always has, which keys of its config turn something on,
and the defaults of absent keys.

Source: the configuration and model classes of transformers 5. All families run in one decoder; a
row says how a family differs, and what the row does not mention is as in llama. Pure: imports no
torch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

from zrt.runtime.models.architecture.config_json import Keys
from zrt.runtime.models.architecture.layer_patterns import (
    Window,
    all_blocks,
    all_but_every_nth,
    blocks_without_rope,
    every_other,
    full_attention,
    last_blocks,
    one_window,
    some_blocks,
)


class Norms(NamedTuple):
    """Norms of a block, by the names of their tensors: before attention, after attention, before
    the MLP, after the MLP. None: the block has no such norm."""

    attention: str | None
    attention_out: str | None
    mlp: str | None
    mlp_out: str | None


BEFORE: Final = Norms("input_layernorm", None, "post_attention_layernorm", None)
AFTER: Final = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
AROUND: Final = Norms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)


class Number(NamedTuple):
    """A number from the config: its key, and its value where the key is absent (None: off)."""

    key: str
    absent: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One `model_type`. A feature is a fixed answer, or the name of the config key that answers
    (absent: off)."""

    max_positions: int
    eos_id: int | None
    kv_heads: int | None = None  # None: as many as heads
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    norm_eps: float = 1e-6
    tied: bool = False
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    fused: bool = False  # on disk, q, k and v are one tensor, and so are gate and up
    norms: Norms = BEFORE
    wide_norms: bool = False  # the norm's weight is applied in float32, before rounding
    norms_plus_one: bool = False  # the norm's weight is kept as its difference from 1
    qk_norm: Literal["head", "width"] | None = None  # q and k are normed head by head, or over all heads at once
    activation: tuple[str, str] = ("hidden_act", "silu")  # the config's key, and the value where it is absent
    windows: Callable[[Keys, int], tuple[Window, ...]] = full_attention
    rotates: Callable[[Keys, int], tuple[bool, ...]] = all_blocks
    rope_theta: float = 10_000.0
    window_rope_theta: Number | None = None  # blocks with a window have a default rope with a base of their own
    rope_types: Mapping[str, str] = field(default_factory=dict)  # other names of rope types
    partial_rope: bool = False
    longrope_reruns: bool = False  # a history that outgrows its short factors is run again with the long ones
    original_positions: int | None = None  # default of an original_max_position_embeddings outside the rope's table
    embedding_scale: Number | None = None
    embedding_root: bool = False  # embeddings are scaled by sqrt(hidden_size), rounded to the model's dtype
    residual_scale: Number | None = None
    attention_scale: Number | None = None  # the factor itself
    query_scalar: Number | None = None  # the factor is its inverse square root
    attention_softcap: Number | None = None
    logits_divisor: Number | None = None
    logits_softcap: Number | None = None
    only: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # keys that must be absent or one of these values


FAMILIES: Final[Mapping[str, Family]] = {
    "llama": Family(
        max_positions=2048,
        eos_id=2,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "mistral": Family(max_positions=131_072, eos_id=2, kv_heads=8, windows=one_window(4096)),
    "qwen2": Family(max_positions=32_768, eos_id=None, kv_heads=32, qkv_bias=True, windows=last_blocks),
    "qwen3": Family(
        max_positions=32_768,
        eos_id=None,
        kv_heads=32,
        head_dim=128,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm="head",
        windows=last_blocks,
    ),
    "smollm3": Family(
        max_positions=32_768,
        eos_id=128_001,
        kv_heads=4,
        tied=True,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        windows=blocks_without_rope,
        rotates=some_blocks,
        rope_theta=2_000_000.0,
    ),
    "olmo2": Family(
        max_positions=2048,
        eos_id=50_279,
        norm_eps=1e-5,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        norms=AFTER,
        wide_norms=True,
        qk_norm="width",
    ),
    "granite": Family(
        max_positions=2048,
        eos_id=2,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        embedding_scale=Number("embedding_multiplier", 1.0),
        residual_scale=Number("residual_multiplier", 1.0),
        attention_scale=Number("attention_multiplier", 1.0),
        logits_divisor=Number("logits_scaling", 1.0),
    ),
    "phi3": Family(
        max_positions=4096,
        eos_id=32_000,
        norm_eps=1e-5,
        fused=True,
        windows=one_window(None),
        rope_types={"su": "longrope", "yarn": "longrope"},
        partial_rope=True,
        longrope_reruns=True,
        original_positions=4096,
    ),
    "gemma2": Family(
        max_positions=8192,
        eos_id=1,
        kv_heads=4,
        head_dim=256,
        tied=True,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        norms=AROUND,
        wide_norms=True,
        norms_plus_one=True,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        windows=every_other,
        embedding_root=True,
        query_scalar=Number("query_pre_attn_scalar", 256.0),
        attention_softcap=Number("attn_logit_softcapping", 50.0),
        logits_softcap=Number("final_logit_softcapping", 30.0),
        only={"use_bidirectional_attention": (None, False)},
    ),
    "gemma3_text": Family(
        max_positions=131_072,
        eos_id=1,
        kv_heads=4,
        head_dim=256,
        tied=True,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        norms=AROUND,
        wide_norms=True,
        norms_plus_one=True,
        qk_norm="head",
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        windows=all_but_every_nth,
        rope_theta=1_000_000.0,
        window_rope_theta=Number("rope_local_base_freq", 10_000.0),
        embedding_root=True,
        query_scalar=Number("query_pre_attn_scalar", 256.0),
        logits_softcap=Number("final_logit_softcapping", None),
        only={"use_bidirectional_attention": (None, False), "attn_logit_softcapping": (None,)},
    ),
}
