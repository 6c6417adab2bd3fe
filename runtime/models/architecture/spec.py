"""The features of a decoder, read from a Hugging Face `config.json`. Pure: imports no torch, so a
coordinator may plan with it.

Where a key is absent, the default of transformers' configuration class holds; `families` lists what
each `model_type` adds to that.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypedDict

from zrt.runtime.errors import ZrtError
from zrt.runtime.models.architecture.config_json import Keys, read_config
from zrt.runtime.models.architecture.families import BEFORE, FAMILIES, Family, Norms, Number
from zrt.runtime.models.architecture.rope_spec import Rope, read_rope

ACTIVATIONS: Final[Mapping[str, Literal["silu", "gelu_tanh"]]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """How one block differs from others: `window`, the tokens a token sees, itself included (None:
    all); `rope` (None: no rotation)."""

    window: int | None
    rope: Rope | None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Features of one model. Sizes are counts of numbers, not bytes; `eos_ids` are those of
    config.json alone.

    `blocks` are by global index. `wide_norms`: a norm's weight is applied in float32, before
    rounding; `norms_plus_one`: it is stored as its difference from 1. `qk_norm`: q and k are normed
    head by head, or each over all its heads at once. `fused`: on disk, q, k and v are one tensor,
    and gate and up another. Scales and soft-caps are factors; 1.0 and None mean that there is none.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_blocks: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    tied: bool
    max_positions: int
    eos_ids: tuple[int, ...]
    init_range: float
    blocks: tuple[BlockSpec, ...]
    attention_scale: float
    fused: bool = False
    norms: Norms = BEFORE
    wide_norms: bool = False
    norms_plus_one: bool = False
    qk_norm: Literal["head", "width"] | None = None
    activation: Literal["silu", "gelu_tanh"] = "silu"
    embedding_scale: float = 1.0
    embedding_scale_rounds: bool = False  # the scale is rounded to the model's dtype before it is applied
    residual_scale: float = 1.0
    attention_softcap: float | None = None
    logits_divisor: float = 1.0
    logits_softcap: float | None = None

    @property
    def rope_dim(self) -> int:
        """How many numbers of a head are rotated, the same in every block that rotates."""
        return next((block.rope.dim for block in self.blocks if block.rope is not None), self.head_dim)

    @property
    def rope_switch(self) -> int | None:
        """The number of tokens beyond which a session has to be run again from its first token,
        since all tokens are rotated otherwise; None for most models."""
        ropes = (block.rope for block in self.blocks)
        return next((rope.original for rope in ropes if rope is not None and rope.reruns), None)

    def rope_length(self, prompt: int, history: int) -> int:
        """Return the session length for ropes that depend on it: `rope_length` of the session's
        `turn.BatchStep`s.

        `prompt` and `history` are the session's tokens when it began and now. Keys and values
        computed under one such length cannot serve under another. The length is 0 for most models:
        every token is rotated by its own position alone.

        As in transformers' generation, a prompt is rotated by its whole length, and every later
        token by the length that ends with it, for good; but in a family whose longrope reruns, the
        whole history is rotated by its length, and run again when that changes.
        """
        for block in self.blocks:
            rope = block.rope
            if rope is not None and rope.by_length:
                tokens = history if rope.reruns else prompt
                if tokens <= rope.original:
                    return 0
                return tokens if rope.kind == "dynamic" else rope.original + 1
        return 0


def read_spec(folder: Path) -> ModelSpec:
    """Return the spec of the model in `folder`. Errors: bad_model when config.json is missing or
    wrong, unsupported when zrt cannot run the model."""
    return spec_from_config(read_config(folder))


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec that a config describes. Errors: bad_model for a missing or ill-typed key,
    unsupported for a feature that zrt lacks; both name the key."""
    keys = Keys(config)
    family = _family(keys)
    sizes = _sizes(keys, family)
    max_positions = keys.size("max_position_embeddings", family.max_positions)
    rope, window_rope = _ropes(keys, family, sizes["head_dim"], max_positions)
    return ModelSpec(
        model_type=str(config["model_type"]),
        vocab_size=keys.size("vocab_size"),
        **sizes,
        intermediate_size=keys.size("intermediate_size"),
        norm_eps=keys.number("rms_norm_eps", family.norm_eps),
        qkv_bias=_feature(keys, family.qkv_bias),
        o_bias=_feature(keys, family.o_bias),
        mlp_bias=_feature(keys, family.mlp_bias),
        tied=keys.flag("tie_word_embeddings", family.tied),
        # a gemma3 config counts positions after its rope is stretched, others before
        max_positions=rope.reach(max_positions) if family.window_rope_theta is None else max_positions,
        eos_ids=keys.ids("eos_token_id", family.eos_id),
        init_range=keys.number("initializer_range", 0.02),
        blocks=_blocks(keys, family, sizes["num_blocks"], rope, window_rope),
        **_factors(keys, family, sizes),
        fused=family.fused,
        norms=family.norms,
        wide_norms=family.wide_norms,
        norms_plus_one=family.norms_plus_one,
        qk_norm=family.qk_norm,
        activation=_activation(keys, *family.activation),
    )


def _family(keys: Keys) -> Family:
    """Return the family of the config's `model_type`. Errors: unsupported for a `model_type` that
    zrt does not know, quantised weights, or a feature that zrt runs the family without."""
    model_type = keys.values.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise keys.unsupported("model_type", f"is not one of {', '.join(FAMILIES)}")
    if keys.values.get("quantization_config") is not None:
        raise ZrtError("unsupported", "config.json: quantization_config: quantised weights are not supported")
    for key, values in family.only.items():
        if keys.values.get(key) not in values:
            raise keys.unsupported(key, f"is not supported in {model_type}")
    return family


class _Sizes(TypedDict):
    """Sizes of a spec that depend on each other."""

    hidden_size: int
    num_blocks: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


def _sizes(keys: Keys, family: Family) -> _Sizes:
    """Return hidden size, blocks and heads. Errors: bad_model where they do not fit each other."""
    hidden_size = keys.size("hidden_size")
    num_blocks = keys.size("num_hidden_layers")
    num_heads = keys.size("num_attention_heads")
    num_kv_heads = keys.size("num_key_value_heads", family.kv_heads, null=num_heads)
    head_dim = keys.size("head_dim", family.head_dim, null=hidden_size // num_heads or None)
    if keys.values.get("head_dim") is None and family.head_dim is None and hidden_size % num_heads:
        raise ZrtError("bad_model", f"config.json: hidden_size {hidden_size} is not a multiple of {num_heads} heads")
    if num_heads % num_kv_heads:
        raise ZrtError(
            "bad_model", f"config.json: num_attention_heads {num_heads} is not a multiple of {num_kv_heads} kv heads"
        )
    if head_dim % 2:
        raise ZrtError("bad_model", f"config.json: head_dim {head_dim} is odd; rotary embedding needs pairs")
    return _Sizes(
        hidden_size=hidden_size,
        num_blocks=num_blocks,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )


class _Factors(TypedDict):
    """Scales and soft-caps of a spec."""

    attention_scale: float
    attention_softcap: float | None
    embedding_scale: float
    embedding_scale_rounds: bool
    residual_scale: float
    logits_divisor: float
    logits_softcap: float | None


def _factors(keys: Keys, family: Family, sizes: _Sizes) -> _Factors:
    """Return the scales and soft-caps that the config has for the family's keys."""
    query_scale = _number(keys, family.query_scalar, sizes["head_dim"]) ** -0.5
    root = sizes["hidden_size"] ** 0.5
    return _Factors(
        attention_scale=_number(keys, family.attention_scale, query_scale),
        attention_softcap=_number_or_none(keys, family.attention_softcap),
        embedding_scale=root if family.embedding_root else _number(keys, family.embedding_scale, 1.0),
        embedding_scale_rounds=family.embedding_root,
        residual_scale=_number(keys, family.residual_scale, 1.0),
        logits_divisor=_number(keys, family.logits_divisor, 1.0),
        logits_softcap=_number_or_none(keys, family.logits_softcap),
    )


def _blocks(keys: Keys, family: Family, count: int, rope: Rope, window_rope: Rope) -> tuple[BlockSpec, ...]:
    """Return the spec of each of `count` blocks."""
    return tuple(
        BlockSpec(window, (rope if window is None else window_rope) if rotates else None)
        for window, rotates in zip(family.windows(keys, count), family.rotates(keys, count), strict=True)
    )


def _feature(keys: Keys, answer: bool | str) -> bool:
    """Return a feature's fixed answer, or the value of the config key that it names."""
    return keys.flag(answer) if isinstance(answer, str) else answer


def _number(keys: Keys, asked: Number | None, off: float) -> float:
    """Return the number at the config key that `asked` names, or `off` where the family has no such
    key."""
    return off if asked is None else keys.number(asked.key, asked.absent)


def _number_or_none(keys: Keys, asked: Number | None) -> float | None:
    """Return the number at the config key that `asked` names, or None."""
    return None if asked is None else keys.number_or_none(asked.key, asked.absent)


def _activation(keys: Keys, key: str, absent: str) -> Literal["silu", "gelu_tanh"]:
    said = keys.values.get(key, absent)
    if not isinstance(said, str) or said not in ACTIVATIONS:
        raise keys.unsupported(key, f"is not one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[said]


def _ropes(keys: Keys, family: Family, head_dim: int, max_positions: int) -> tuple[Rope, Rope]:
    """Return the rope of blocks that see all tokens, and that of blocks with a window.
    `rope_scaling`, the older name, wins over `rope_parameters`."""
    older, newer = keys.table("rope_scaling"), keys.table("rope_parameters")
    base = keys.number("rope_theta", family.rope_theta, null=family.rope_theta)

    def read(table: Keys, theta: float) -> Rope:
        return read_rope(
            table,
            keys,
            theta=theta,
            head_dim=head_dim,
            max_positions=max_positions,
            renamed=family.rope_types,
            partial=family.partial_rope,
            reruns=family.longrope_reruns,
            original=family.original_positions
            and keys.size("original_max_position_embeddings", family.original_positions),
        )

    own = family.window_rope_theta
    if own is None:
        table = older if older.values else newer
        if any(isinstance(value, dict) for value in table.values.values()):
            raise ZrtError("unsupported", "config.json: the rope differs by layer; in this family all layers share one")
        rope = read(table, base)
        return rope, rope
    full, sliding = newer.table("full_attention"), newer.table("sliding_attention")
    if newer.values and not full.values and not sliding.values:
        raise keys.wrong("rope_parameters", "an object with full_attention and sliding_attention")
    stretched = Keys(
        {**full.values, **older.values}, "rope_scaling." if older.values else "rope_parameters.full_attention."
    )
    return read(stretched, base), read(sliding, keys.number(own.key, own.absent))
