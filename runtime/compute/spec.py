"""What a decoder is made of, read from a Hugging Face `config.json`. Pure: imports no torch, so a coordinator may plan with it.

Source: the configuration classes of transformers 5 (`LlamaConfig`, `Qwen2Config`, `Qwen3Config`); where a key is absent, their default
holds. A family is a row of `FAMILIES`: it says which features it always has, which a key of its config turns on, and its defaults.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from zrt.runtime.errors import ZrtError

CONFIG_BYTES_MAX: Final = 16 << 20
ROPE_TYPES: Final = ("default",)
ACTIVATIONS: Final = ("silu", "swish")
DEFAULT_ROPE_THETA: Final = 10_000.0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The features of one model. Sizes are counts of numbers, not bytes; `eos_ids` are those of config.json alone."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_blocks: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    rope_theta: float
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    max_positions: int
    eos_ids: tuple[int, ...]
    init_range: float


@dataclass(frozen=True, slots=True)
class Family:
    """One `model_type`. A feature is a fixed answer, or the name of the config key that answers (absent: off)."""

    kv_heads: int | None  # default of num_key_value_heads; None: as many as heads
    max_positions: int
    eos_id: int | None
    head_dim: int | None = None  # default of head_dim; None: hidden_size / num_attention_heads
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    windows: bool = False  # the family's config may ask for sliding windows


FAMILIES: Final[Mapping[str, Family]] = {
    "llama": Family(
        kv_heads=None,
        max_positions=2048,
        eos_id=2,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "qwen2": Family(kv_heads=32, max_positions=32768, eos_id=None, qkv_bias=True, windows=True),
    "qwen3": Family(
        kv_heads=32,
        max_positions=32768,
        eos_id=None,
        head_dim=128,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        windows=True,
    ),
}


def read_spec(folder: Path) -> ModelSpec:
    """The spec of the model in `folder`. `bad_model` when config.json is missing or wrong, `unsupported` when zrt cannot run it."""
    path = folder / "config.json"
    try:
        with path.open("rb") as file:
            text = file.read(CONFIG_BYTES_MAX + 1)
    except OSError as error:
        raise ZrtError(
            "bad_model", f"cannot read {path}: {error.strerror}; a model folder holds config.json"
        ) from error
    if len(text) > CONFIG_BYTES_MAX:
        raise ZrtError("bad_model", f"{path} is larger than {CONFIG_BYTES_MAX} bytes")
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ZrtError("bad_model", f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ZrtError("bad_model", f"{path} is not a JSON object")
    return spec_from_config(config)


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """The spec a config describes. `bad_model` names a missing or ill-typed key, `unsupported` a feature zrt lacks."""
    keys = _Keys(config)
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ZrtError("unsupported", f"config.json: model_type {model_type!r} is not one of {', '.join(FAMILIES)}")
    activation = config.get("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise ZrtError("unsupported", f"config.json: hidden_act {activation!r} is not one of {', '.join(ACTIVATIONS)}")
    if config.get("quantization_config") is not None:
        raise ZrtError("unsupported", "config.json: quantization_config: quantised weights are not supported")

    hidden_size = keys.size("hidden_size")
    num_blocks = keys.size("num_hidden_layers")
    num_heads = keys.size("num_attention_heads")
    num_kv_heads = keys.size("num_key_value_heads", family.kv_heads, null=num_heads)
    head_dim = keys.size("head_dim", family.head_dim, null=hidden_size // num_heads or None)
    if config.get("head_dim") is None and family.head_dim is None and hidden_size % num_heads:
        raise ZrtError("bad_model", f"config.json: hidden_size {hidden_size} is not a multiple of {num_heads} heads")
    if num_heads % num_kv_heads:
        raise ZrtError(
            "bad_model", f"config.json: num_attention_heads {num_heads} is not a multiple of {num_kv_heads} kv heads"
        )
    if head_dim % 2:
        raise ZrtError("bad_model", f"config.json: head_dim {head_dim} is odd; rotary embedding needs pairs")
    if family.windows:
        _refuse_windows(keys, num_blocks)

    def feature(answer: bool | str) -> bool:
        return keys.flag(answer) if isinstance(answer, str) else answer

    return ModelSpec(
        model_type=str(model_type),
        vocab_size=keys.size("vocab_size"),
        hidden_size=hidden_size,
        num_blocks=num_blocks,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=keys.size("intermediate_size"),
        norm_eps=keys.positive("rms_norm_eps", 1e-6),
        rope_theta=_rope_theta(keys),
        qkv_bias=feature(family.qkv_bias),
        o_bias=feature(family.o_bias),
        mlp_bias=feature(family.mlp_bias),
        qk_norm=family.qk_norm,
        tied=keys.flag("tie_word_embeddings"),
        max_positions=keys.size("max_position_embeddings", family.max_positions),
        eos_ids=keys.ids("eos_token_id", family.eos_id),
        init_range=keys.positive("initializer_range", 0.02),
    )


class _Keys:
    """Typed look-ups in a config; every failure names the key."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self.values = values
        self._prefix = prefix

    def wrong(self, key: str, wanted: str) -> ZrtError:
        if key not in self.values:
            return ZrtError("bad_model", f"config.json: {self._prefix}{key} is missing; it must be {wanted}")
        return ZrtError("bad_model", f"config.json: {self._prefix}{key} is {self.values[key]!r}; it must be {wanted}")

    def size(self, key: str, absent: int | None = None, null: int | None = None) -> int:
        """A whole number from 1 on. `absent` stands in for a missing key, `null` for a null value (or where `absent` is None)."""
        value = self.values.get(key, absent)
        if value is None:
            value = null
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(key, "a whole number from 1 on")
        return value

    def positive(self, key: str, absent: float) -> float:
        value = self.values.get(key, absent)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.wrong(key, "a number above 0")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.values.get(key, False)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def ids(self, key: str, absent: int | None) -> tuple[int, ...]:
        value = self.values.get(key, absent)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(id_, int) and not isinstance(id_, bool) for id_ in ids):
            raise self.wrong(key, "a token id or a list of token ids")
        return tuple(ids)

    def table(self, key: str) -> Mapping[str, Any]:
        value = self.values.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return value


def _rope_theta(keys: _Keys) -> float:
    """The rope base. Older files keep it beside `rope_scaling`, newer ones in `rope_parameters`; `rope_scaling` wins, as in transformers."""
    name = "rope_scaling" if keys.table("rope_scaling") else "rope_parameters"
    rope = keys.table(name)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ZrtError("unsupported", f"config.json: rope type {kind!r} is not one of {', '.join(ROPE_TYPES)}")
    if any(isinstance(value, dict) for value in rope.values()):
        raise ZrtError("unsupported", f"config.json: {name} differs by layer; one rope for all layers is supported")
    if rope.get("partial_rotary_factor", keys.values.get("partial_rotary_factor", 1.0)) not in (None, 1.0):
        raise ZrtError("unsupported", "config.json: partial_rotary_factor other than 1 is not supported")
    if rope.get("rope_theta") is not None:
        return _Keys(rope, f"{name}.").positive("rope_theta", DEFAULT_ROPE_THETA)
    return keys.positive("rope_theta", DEFAULT_ROPE_THETA)


def _refuse_windows(keys: _Keys, num_blocks: int) -> None:
    """Sliding-window layers are refused: `layer_types` says which they are, or the three older keys do."""
    layer_types = keys.values.get("layer_types")
    if layer_types is not None:
        windowed = not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types)
    else:
        windowed = (
            keys.flag("use_sliding_window")
            and keys.values.get("sliding_window", 4096) is not None
            and num_blocks > keys.values.get("max_window_layers", 28)
        )
    if windowed:
        raise ZrtError("unsupported", "config.json: sliding-window attention is not supported; full attention is")
