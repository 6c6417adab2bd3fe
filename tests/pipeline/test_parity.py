"""Generation through 1 to 4 stages equals transformers' own."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.clusters import local_cluster
from support.references import reference, through_stages
from support.tiny_models import LONG_PROMPT, MODELS, SHORT_PROMPT

PROMPT = [5, 17, 99, 3, 42, 42, 7, 120]
TOKENS = 64
STAGES: dict[int, list[str | None]] = {
    1: [None],
    2: ["0-2", "3"],
    3: ["0", "1-2", "3"],
    4: ["0", "1", "2", "3"],
}


@pytest.mark.matrix("stages")
@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"head_dim": 24}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 32}),
    ],
    ids=["llama", "llama-biases", "llama-head-dim", "qwen2", "qwen3"],
)
async def test_greedy_ids_and_logits_equal_transformers(
    make_model: Callable[..., Path], family: str, config: dict[str, object], tied: bool, stages: int
) -> None:
    folder = make_model(family, tied=tied, **config)
    wanted_ids, wanted = reference(folder, PROMPT, TOKENS)
    ids, logits = await through_stages(folder, STAGES[stages], PROMPT, TOKENS)
    assert ids == wanted_ids
    assert (logits - wanted).abs().max() <= 1e-4


@pytest.mark.matrix("name")
@pytest.mark.parametrize(("stages", "tied"), [(1, True), (2, False), (4, True)], ids=["1-tied", "2-untied", "4-tied"])
@pytest.mark.parametrize(
    "name",
    ["mistral", "smollm3-windows", "olmo2", "granite", "phi3", "gemma2", "gemma3", "qwen2-windows", "llama-yarn"],
)
async def test_every_family_equals_transformers_with_a_prompt_in_chunks(
    make_model: Callable[..., Path], name: str, stages: int, tied: bool
) -> None:
    """The prompt is longer than windows, and than what ropes were made for; chunks end within
    windows and beyond."""
    folder = make_model(MODELS[name].family, tied=tied, eos_token_id=None, **MODELS[name].config)
    wanted_ids, wanted = reference(folder, LONG_PROMPT, TOKENS)
    ids, logits = await through_stages(folder, STAGES[stages], LONG_PROMPT, TOKENS, limits_chunk=18)
    assert ids == wanted_ids
    assert (logits - wanted).abs().max() <= 1e-4


@pytest.mark.matrix("name")
@pytest.mark.parametrize("prompt", [SHORT_PROMPT, LONG_PROMPT], ids=["outgrown midway", "outgrown by the prompt"])
@pytest.mark.parametrize("name", ["llama-dynamic", "llama-longrope", "phi3-longrope"])
async def test_ropes_that_depend_on_the_length_equal_transformers_as_it_grows(
    make_model: Callable[..., Path], name: str, prompt: list[int]
) -> None:
    folder = make_model(MODELS[name].family, eos_token_id=None, **MODELS[name].config)
    wanted_ids, _ = reference(folder, prompt, TOKENS)
    async with local_cluster(folder, STAGES[3], limits_chunk=18) as cluster:
        assert await cluster.greedy(prompt, TOKENS) == wanted_ids
        assert await cluster.greedy(prompt, TOKENS) == wanted_ids  # what the first left in the caches may serve
        longer = (prompt + wanted_ids)[: len(prompt) + 32]
        assert (
            await cluster.greedy(longer, 16) == reference(folder, longer, 16)[0]
        )  # but not where it is rotated otherwise


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
async def test_bfloat16_stays_close_to_transformers(make_model: Callable[..., Path], family: str, stages: int) -> None:
    """Compared at the first token, before a near tie could lead the two apart."""
    folder = make_model(family)
    _, wanted = reference(folder, PROMPT, 1, "bfloat16")
    _, logits = await through_stages(folder, STAGES[stages], PROMPT, 1, "bfloat16")
    assert (logits - wanted).abs().max() <= 2e-2 * wanted.abs().max()


async def test_the_same_seed_gives_the_same_tokens_through_any_cut(make_model: Callable[..., Path]) -> None:
    folder = make_model("llama")
    request = {"token_ids": PROMPT, "max_tokens": 40, "temperature": 1.0, "top_p": 0.95, "seed": 1234}
    sampled = []
    for stages in (1, 2, 3):
        async with local_cluster(folder, STAGES[stages]) as cluster:
            sampled.append((await cluster.generate(**request))[1])
            other = (await cluster.generate(**(request | {"seed": 1235})))[1]
            assert other != sampled[-1]
    assert sampled[0] == sampled[1] == sampled[2]


async def test_random_weights_are_the_same_model_through_any_cut(make_model: Callable[..., Path]) -> None:
    folder = make_model("qwen3", tied=True)
    outputs = []
    for stages in (1, 4):
        async with local_cluster(folder, STAGES[stages], model_weights="random") as cluster:
            outputs.append(await cluster.greedy(PROMPT, 24))
    assert outputs[0] == outputs[1]
    assert outputs[0] != reference(folder, PROMPT, 24)[0]
