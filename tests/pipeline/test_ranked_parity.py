"""Generation by stages that are split over ranks, in processes of their own, equals transformers'
own."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support.references import reference, through_stages
from support.tiny_models import LONG_PROMPT, MODELS

TOKENS = 64
TWELVE = {"hidden_size": 96, "num_attention_heads": 12, "head_dim": 16, "intermediate_size": 96, "vocab_size": 157}
LAYOUTS = {  # ranks of each stage, and kv heads
    "2": ((2,), 6),
    "2 share a kv head": ((2,), 1),
    "3": ((3,), 6),
    "3 share a kv head": ((3,), 1),
    "4": ((4,), 4),
    "4 share two kv heads": ((4,), 2),
    "2, 1": ((2, 1), 2),
    "1, 3": ((1, 3), 3),
    "3, 2": ((3, 2), 6),
    "4, 2": ((4, 2), 2),
}


@pytest.mark.matrix("tied")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
async def test_greedy_ids_and_logits_equal_transformers_at_every_size(
    make_model: Callable[..., Path], tied: bool, family: str, layout: str
) -> None:
    """With an odd vocabulary and a prompt in chunks."""
    tp, kv_heads = LAYOUTS[layout]
    folder = make_model(family, tied=tied, eos_token_id=None, num_key_value_heads=kv_heads, **TWELVE)
    await compare(folder, tp)


@pytest.mark.chaos
@pytest.mark.parametrize("tp", [(2,), (4, 2)], ids=["2", "4, 2"])
@pytest.mark.parametrize(
    "name",
    [
        "mistral",
        "smollm3-windows",
        "olmo2-biases",
        "granite",
        "phi3",
        "gemma2",
        "gemma3",
        "qwen2-windows",
        "llama-yarn",
    ],
)
async def test_every_family_equals_transformers(make_model: Callable[..., Path], name: str, tp: Sequence[int]) -> None:
    await compare(make_model(MODELS[name].family, eos_token_id=None, **MODELS[name].config), tp)


async def compare(folder: Path, tp: Sequence[int]) -> None:
    wanted_ids, wanted = reference(folder, LONG_PROMPT, TOKENS)
    ids, logits = await through_stages(folder, [None] * len(tp), LONG_PROMPT, TOKENS, tp=tp, limits_chunk=18)
    assert ids == wanted_ids
    assert (logits - wanted).abs().max() <= 1e-4
