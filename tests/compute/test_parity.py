"""The decoder computes what transformers' models compute, however the model is cut."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tied": True}),
    "llama, every bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, wide heads": ("llama", {"head_dim": 24}),
    "llama, one kv head, tied": ("llama", {"num_key_value_heads": 1, "tied": True}),
    "llama, as many kv heads as heads": ("llama", {"num_key_value_heads": 4}),
    "llama, odd vocabulary, another theta": ("llama", {"vocab_size": 157, "rope_theta": 500000.0}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tied": True}),
    "qwen2, narrow heads": ("qwen2", {"head_dim": 8}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3, tied, wide heads": ("qwen3", {"head_dim": 32, "tied": True}),
    "qwen3, biases": ("qwen3", {"head_dim": 32, "attention_bias": True}),
}
CUTS = {
    "one": ((0, 3),),
    "two": ((0, 1), (2, 3)),
    "three": ((0, 0), (1, 2), (3, 3)),
    "one block a stage": ((0, 0), (1, 1), (2, 2), (3, 3)),
}
PROMPT = [1, 17, 93, 4, 150, 62, 62, 8, 31, 120, 5]


@pytest.fixture(params=MODELS.values(), ids=MODELS.keys())
def folder(request: pytest.FixtureRequest, make_model: Callable[..., Path]) -> Path:
    family, config = request.param
    return make_model(family, **config)


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
def test_greedy_ids_equal_those_of_generate_over_64_tokens(folder, cuts, pipeline, reference) -> None:
    generated = reference(folder).generate(torch.tensor([PROMPT]), max_new_tokens=64, do_sample=False)
    assert pipeline(folder, cuts).greedy("s", PROMPT, 64) == generated[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
def test_float32_logits_are_within_1e_4(folder, cuts, pipeline, reference) -> None:
    assert _worst_difference(folder, cuts, torch.float32, pipeline, reference)[0] <= 1e-4


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
def test_bfloat16_logits_are_within_2_percent_of_the_greatest(folder, cuts, pipeline, reference) -> None:
    difference, greatest = _worst_difference(folder, cuts, torch.bfloat16, pipeline, reference)
    assert difference <= 2e-2 * greatest


def _worst_difference(folder, cuts, dtype, pipeline, reference) -> tuple[float, float]:
    """Over a prompt taken in two chunks, then ten single tokens: max |Δ| of the logits, and max |logit| of the reference."""
    ids = torch.randint(0, 150, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        expected = reference(folder, dtype)(torch.tensor([ids])).logits[0].float()
    pipe = pipeline(folder, cuts, dtype=dtype)
    pipe.open("s")
    difference, start = 0.0, 0
    for stop in (18, 30, *range(31, 41)):
        logits = pipe.logits("s", start, ids[start:stop])
        difference = max(difference, float((logits - expected[stop - 1]).abs().max()))
        start = stop
    return difference, float(expected.abs().max())
