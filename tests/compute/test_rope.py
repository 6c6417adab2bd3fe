"""Angles are those of transformers, of every rope type and however it is written in a config."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from zrt.runtime.compute.decoder.rope import inverse_frequencies, rotary
from zrt.runtime.models.architecture.rope_spec import ROPE_TYPES, Rope
from zrt.runtime.models.architecture.spec import spec_from_config

SIZES = {
    "vocab_size": 300,
    "hidden_size": 256,
    "intermediate_size": 200,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + pair / 7 for pair in range(32)],
    "long_factor": [1.5 + pair for pair in range(32)],
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("llama", {"rope_type": "linear", "factor": 4.0}),
    "linear, by an older name": ("mistral", {"type": "linear", "factor": 2}),
    "dynamic": ("qwen2", {"rope_type": "dynamic", "factor": 2.5}),
    "llama3": ("llama", LLAMA3 | {"original_max_position_embeddings": 256, "rope_theta": 5e5}),
    "llama3, no original": ("llama", LLAMA3),
    "yarn": ("qwen3", YARN),
    "yarn, untruncated": ("qwen2", YARN | {"truncate": False}),
    "yarn, betas": ("qwen2", YARN | {"beta_fast": 8, "beta_slow": 2, "rope_theta": 1e6}),
    "yarn, attention factor": ("olmo2", YARN | {"attention_factor": 1.7}),
    "yarn, mscale": ("granite", YARN | {"mscale": 0.707, "mscale_all_dim": 0.5}),
    "yarn, mscale alone": ("granite", YARN | {"mscale": 0.707}),
    "yarn, no factor": ("llama", YARN | {"factor": None}),
    "yarn, factor below 1": ("llama", YARN | {"factor": 0.5}),
    "longrope": ("llama", LONG | {"original_max_position_embeddings": 512}),
    "longrope, factor": ("llama", LONG | {"original_max_position_embeddings": 512, "factor": 16.0}),
    "longrope, attention factor": (
        "smollm3",
        LONG | {"original_max_position_embeddings": 512, "attention_factor": 1.2},
    ),
    "longrope of phi3": ("phi3", LONG | {"original_max_position_embeddings": 512}),
}


@pytest.mark.parametrize("length", [1, 512, 513, 2048, 2049, 5000])
@pytest.mark.parametrize(("family", "table"), ROPES.values(), ids=ROPES.keys())
def test_inverse_frequencies_equal_those_of_transformers(family, table, length) -> None:
    reference = AutoConfig.for_model(family, **SIZES, head_dim=64, rope_parameters=dict(table))
    kind = reference.rope_parameters["rope_type"]
    wanted, attention_factor = ROPE_INIT_FUNCTIONS[kind](reference, device=torch.device("cpu"), seq_len=length)
    rope = _rope({"model_type": family, "head_dim": 64, "rope_scaling": table})
    assert rope.kind == kind
    torch.testing.assert_close(inverse_frequencies(rope, length), wanted, rtol=1e-6, atol=0)
    assert rope.attention_factor == pytest.approx(attention_factor, rel=1e-12)


def test_the_default_rope_is_that_of_the_paper() -> None:
    rope = _rope({"model_type": "llama", "rope_theta": 5e5})
    wanted = torch.tensor([5e5 ** (-2 * pair / 64) for pair in range(32)], dtype=torch.float64)
    torch.testing.assert_close(inverse_frequencies(rope).double(), wanted, rtol=1e-6, atol=0)


def test_every_rope_type_is_compared() -> None:
    assert {rope.get("rope_type", rope.get("type")) for _, rope in ROPES.values()} | {"default"} == set(ROPE_TYPES)


POSITIONS = torch.arange(0, 700, 7)


@pytest.mark.parametrize("kind", ["default", "dynamic", "longrope"])
@pytest.mark.parametrize("length", [0, 600, 900], ids=["by position", "600 tokens", "900 tokens"])
def test_a_token_is_rotated_by_the_length_of_its_sequence(kind, length) -> None:
    rope = _rope(
        {"model_type": "llama", "max_position_embeddings": 512, "rope_scaling": LONG | {"rope_type": kind, "factor": 4}}
    )
    lengths = (POSITIONS + 1).clamp(min=length)
    cos, sin = rotary(rope, 1024, torch.float32).at(POSITIONS, lengths)
    for row, (position, tokens) in enumerate(zip(POSITIONS.tolist(), lengths.tolist(), strict=True)):
        angles = position * inverse_frequencies(rope, tokens)
        factor = rope.attention_factor
        torch.testing.assert_close(cos[row, 0], torch.cat((angles, angles)).cos() * factor, rtol=0, atol=1e-6)
        torch.testing.assert_close(sin[row, 0], torch.cat((-angles, angles)).sin() * factor, rtol=0, atol=1e-6)


def test_a_session_of_a_dynamic_rope_is_rotated_by_the_length_of_its_prompt() -> None:
    spec = spec_from_config(SIZES | {"model_type": "llama", "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}})
    assert [spec.rope_length(prompt, 5000) for prompt in (5, 2048, 2049, 3000)] == [0, 0, 2049, 3000]
    assert spec.rope_switch is None


def test_a_session_of_a_longrope_is_rotated_by_the_length_of_its_prompt() -> None:
    spec = spec_from_config(
        SIZES | {"model_type": "llama", "rope_scaling": LONG | {"original_max_position_embeddings": 512}}
    )
    assert [spec.rope_length(prompt, 2000) for prompt in (5, 512, 513, 1500)] == [0, 0, 513, 513]
    assert spec.rope_switch is None


def test_a_session_of_phi3s_longrope_is_rotated_by_its_length_and_run_again_where_that_turns() -> None:
    spec = spec_from_config(
        SIZES | {"model_type": "phi3", "rope_scaling": LONG, "original_max_position_embeddings": 512}
    )
    assert [spec.rope_length(5, history) for history in (5, 512, 513, 1500)] == [0, 0, 513, 513]
    assert spec.rope_switch == 512


def test_no_length_matters_to_other_ropes() -> None:
    spec = spec_from_config(SIZES | {"model_type": "llama", "rope_scaling": YARN})
    assert spec.rope_length(1800, 2000) == 0
    assert spec.rope_switch is None


REACH = {
    "default": ({}, 2048),
    "linear": ({"rope_type": "linear", "factor": 4.0}, 8192),
    "dynamic": ({"rope_type": "dynamic", "factor": 2.5}, 5120),
    "llama3": (LLAMA3, 2048),
    "yarn": (YARN | {"factor": 8.0}, 4096),
    "yarn of a config that says its reach": (YARN, 2048),
    "longrope": (LONG, 2048),
}


@pytest.mark.parametrize(("table", "positions"), REACH.values(), ids=REACH.keys())
def test_a_stretched_rope_reaches_further_than_max_position_embeddings(table, positions) -> None:
    spec = spec_from_config(SIZES | {"model_type": "llama", "rope_scaling": table})
    assert spec.max_positions == positions


def _rope(config: dict[str, Any]) -> Rope:
    rope = spec_from_config(SIZES | config).blocks[0].rope
    assert rope is not None
    return rope
