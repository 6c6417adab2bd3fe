"""The rotary embedding of a model, read from its config. Pure: imports no torch; `rope` computes
the embedding.

Source: `modeling_rope_utils` of transformers 5, whose older key names (`rope_scaling`, `type`,
`rope_theta` beside it) are read too.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from zrt.runtime.errors import ZrtError
from zrt.runtime.models.architecture.config_json import Keys

ROPE_TYPES: Final = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
ORIGINAL: Final = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding of a block. `kind` is one of `ROPE_TYPES`; fields of other kinds keep their
    defaults.

    `dim`: how many numbers of a head are rotated, from its first on. `original`: positions the
    model was made for before its reach was stretched. `attention_factor` multiplies cos and sin.
    `reruns`: when a session outgrows `original`, its whole history is run again.
    """

    kind: str
    theta: float
    dim: int
    factor: float = 1.0
    original: int = 0
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    reruns: bool = False

    @property
    def by_length(self) -> bool:
        """Whether a token's rotation depends on the length of the sequence it was run in, not on
        its position alone."""
        return self.kind in ("dynamic", "longrope")

    def reach(self, max_positions: int) -> int:
        """Return the longest sequence, where the config says `max_position_embeddings`."""
        if self.kind in ("linear", "dynamic"):
            return int(max_positions * self.factor)
        if self.kind == "yarn":
            return max(max_positions, int(self.original * self.factor))
        return max_positions


def read_rope(
    rope: Keys,
    config: Keys,
    *,
    theta: float,
    head_dim: int,
    max_positions: int,
    renamed: Mapping[str, str],
    partial: bool,
    original: int | None,
    reruns: bool,
) -> Rope:
    """Return the rope that the table `rope` of `config` describes; an empty table is the default
    rope with base `theta`.

    `renamed`: rope types by the names that a family gives them besides. `partial`: whether the
    family rotates a part of a head where `partial_rotary_factor` says so. `original` overrides the
    table's value. `reruns`: whether the family's longrope is `Rope.reruns`. Errors: `unsupported`
    for an unknown type, `bad_model` for a wrong key.
    """
    said = rope.values.get("rope_type", rope.values.get("type", "default"))
    kind = renamed.get(said, said) if isinstance(said, str) else said
    if kind not in ROPE_TYPES:
        raise ZrtError("unsupported", f"config.json: rope type {said!r} is not one of {', '.join(ROPE_TYPES)}")
    part = rope if "partial_rotary_factor" in rope.values else config
    rotated = part.number("partial_rotary_factor", 1.0, null=1.0)
    if rotated != 1 and not partial:
        raise part.unsupported("partial_rotary_factor", "is not 1; this family rotates whole heads")
    dim = int(head_dim * rotated)
    if dim % 2 or not 2 <= dim <= head_dim:
        raise part.wrong("partial_rotary_factor", f"such that an even part of {head_dim} numbers is rotated")
    return Rope(
        kind=kind,
        theta=rope.number("rope_theta", theta, null=theta),
        dim=dim,
        **_scaling(kind, rope, dim, max_positions, original),
        reruns=reruns and kind == "longrope",
    )


def _scaling(kind: str, rope: Keys, dim: int, max_positions: int, original: int | None) -> dict[str, Any]:
    """Return the fields of `Rope` that the rope type `kind` has."""
    if kind == "default":
        return {}
    if kind == "linear":
        return {"factor": rope.number("factor")}
    if kind == "dynamic":
        if dim == 2:
            raise ZrtError("unsupported", "config.json: a dynamic rope of 2 numbers a head has no base")
        return {"factor": rope.number("factor"), "original": max_positions}
    original = original or rope.size(ORIGINAL, max_positions, null=max_positions)
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if low == high:
            raise rope.wrong("high_freq_factor", "greater than low_freq_factor")
        return {
            "factor": rope.number("factor"),
            "original": original,
            "low_freq_factor": low,
            "high_freq_factor": high,
        }
    factor = rope.number("factor", null=max_positions / original)
    scaled = rope.number_or_none("attention_factor", None, zero=True)
    if kind == "yarn":
        return {
            "factor": factor,
            "original": original,
            "attention_factor": _yarn_attention_factor(rope, factor) if scaled is None else scaled,
            "beta_fast": rope.number("beta_fast", 32.0, null=32.0, zero=True) or 32.0,
            "beta_slow": rope.number("beta_slow", 1.0, null=1.0, zero=True) or 1.0,
            "truncate": rope.flag("truncate", True),
        }
    if scaled is None:
        scaled = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return {
        "factor": factor,
        "original": original,
        "attention_factor": scaled,
        "short_factors": rope.numbers("short_factor", dim // 2),
        "long_factors": rope.numbers("long_factor", dim // 2),
    }


def _yarn_attention_factor(rope: Keys, factor: float) -> float:
    """Return the attention factor of YaRN (arXiv 2309.00071), section 3.4; with `mscale` and
    `mscale_all_dim`, the quotient of the two."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    mscale = rope.number_or_none("mscale", None, zero=True)
    mscale_all_dim = rope.number_or_none("mscale_all_dim", None, zero=True)
    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)
