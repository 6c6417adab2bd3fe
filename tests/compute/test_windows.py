"""Sliding windows, and ropes that depend on the length of the sequence: however a history comes,
its numbers are the same."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.tiny_models import MODELS, ORIGINAL, WINDOW

from zrt.runtime.compute.engine import Engine
from zrt.runtime.compute.turn import BatchStep, Work
from zrt.runtime.errors import ZrtError

WINDOWED = ["mistral", "qwen2-windows", "smollm3-windows", "gemma2", "gemma3"]
BY_LENGTH = ["llama-dynamic", "llama-longrope", "phi3-longrope"]
TOKENS = 52
EDGES = [1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 2 * WINDOW + 1, TOKENS - 1]


@pytest.fixture
def folder(name: str, make_model: Callable[..., Path]) -> Path:
    return make_model(MODELS[name].family, **MODELS[name].config)


def _ids(length: int, seed: int = 1) -> list[int]:
    return torch.randint(0, 150, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("name", WINDOWED + BY_LENGTH)
def test_a_prompt_in_two_chunks_equals_the_prompt_in_one(name, folder, pipeline) -> None:
    pipe, ids = pipeline(folder), _ids(TOKENS)
    rope_length = pipe.spec.rope_length(TOKENS, TOKENS)
    pipe.open("whole", "chunks")
    whole = pipe.logits("whole", 0, ids, rope_length)
    for edge in EDGES:
        pipe.logits("chunks", 0, ids[:edge], rope_length)
        chunks = pipe.logits("chunks", edge, ids[edge:], rope_length)
        torch.testing.assert_close(chunks, whole, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", WINDOWED)
def test_going_back_and_over_a_window_again_gives_the_same(name, folder, pipeline) -> None:
    pipe, ids = pipeline(folder), _ids(TOKENS)
    pipe.open("s")
    pipe.logits("s", 0, ids[:-1])
    last = pipe.logits("s", TOKENS - 1, ids[-1:])
    for start in EDGES:
        torch.testing.assert_close(pipe.logits("s", start, ids[start:]), last, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", WINDOWED)
def test_sessions_in_a_batch_keep_to_their_own_windows(name, folder, pipeline) -> None:
    pipe = pipeline(folder)
    texts = {key: _ids(TOKENS, seed) for seed, key in enumerate("abc")}
    pipe.open(*"abc", "alone")
    done = dict.fromkeys(texts, 0)
    for counts in ((3, 30, 40), (20, 1, 1), (1, 9, 1), (1, 1, 1)):
        steps = [BatchStep(key, done[key], n) for key, n in zip(texts, counts, strict=True)]
        parts = [texts[step.key][step.seq_pos : step.seq_pos + step.n] for step in steps]
        logits = pipe.forward(steps, torch.tensor([token for part in parts for token in part]))
        for row, step in enumerate(steps):
            done[step.key] += step.n
            alone = pipe.logits("alone", 0, texts[step.key][: done[step.key]])
            torch.testing.assert_close(logits[row], alone, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["mistral", "phi3"])
@pytest.mark.parametrize("tokens", [1, 5])
def test_keys_outside_the_window_are_not_read(name, tokens, folder, pipeline) -> None:
    pipe, ids = pipeline(folder), _ids(TOKENS)
    (stage,) = pipe.stages
    pipe.open("s")
    pipe.logits("s", 0, ids[:40])
    expected = pipe.logits("s", 40, ids[40 : 40 + tokens])
    stage.cache.slab[stage.cache.row("s"), ..., : 41 - WINDOW, :] = float("nan")
    assert torch.equal(pipe.logits("s", 40, ids[40 : 40 + tokens]), expected)


@pytest.mark.parametrize("name", BY_LENGTH)
@pytest.mark.parametrize("prompt", [9, ORIGINAL + 8])
def test_a_replay_of_a_history_goes_on_as_the_first_run_would(name, prompt, folder, pipeline) -> None:
    pipe, ids = pipeline(folder), _ids(prompt)
    tokens, logits = pipe.generate("first", ids, 40)
    history = (ids + tokens)[:-1]
    rope_length = pipe.spec.rope_length(prompt, len(history))
    pipe.open("replayed")
    for start in range(0, len(history), 13):
        replayed = pipe.logits("replayed", start, history[start : start + 13], rope_length)
    torch.testing.assert_close(replayed, logits[-1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["phi3-longrope"])
@pytest.mark.parametrize("start", [0, 9, ORIGINAL])
def test_a_session_that_outgrows_its_rope_has_to_be_run_again(name, start, folder, pipeline) -> None:
    pipe, ids = pipeline(folder), _ids(TOKENS)
    (stage,) = pipe.stages
    pipe.open("s")
    pipe.logits("s", 0, ids[:ORIGINAL])
    before = stage.cache.have("s"), stage.cache.stats()
    with pytest.raises(ZrtError, match="outgrows 32 tokens") as caught:
        pipe.logits("s", start, ids[start : ORIGINAL + 1])
    assert caught.value.kind == "kv_gap"
    assert (stage.cache.have("s"), stage.cache.stats()) == before
    pipe.logits("s", 0, ids[: ORIGINAL + 1], pipe.spec.rope_length(5, ORIGINAL + 1))
    pipe.logits("s", ORIGINAL + 1, ids[ORIGINAL + 1 :], pipe.spec.rope_length(5, ORIGINAL + 1))


@pytest.mark.parametrize("name", BY_LENGTH)
def test_a_session_that_nobody_opened_is_rotated_by_its_first_request(name, folder, pipeline) -> None:
    """However the request is cut into steps."""
    pipe, ids = pipeline(folder), _ids(TOKENS)
    pipe.open("s")
    expected = pipe.logits("s", 0, ids, pipe.spec.rope_length(TOKENS, TOKENS))
    (stage,) = pipeline(folder).stages
    engine = Engine(stage.shard, stage.cache, stage)
    engine.turn([Work("bare", 0, 20, torch.tensor(ids[:20]), opens=TOKENS)])
    result = engine.turn([Work("bare", 20, TOKENS - 20, torch.tensor(ids[20:]), logits=True, opens=TOKENS - 20)])
    torch.testing.assert_close(result.output[0], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", BY_LENGTH)
def test_pages_of_an_equal_history_serve_only_where_it_is_rotated_alike(name, folder, pipeline) -> None:
    (stage,) = pipeline(folder).stages
    engine, ids, names = Engine(stage.shard, stage.cache, stage), _ids(TOKENS), [11, 12, 13]

    def begun(key: str, tokens: int) -> int:
        have = engine.open(key, tokens, names[: tokens // 16], tokens)
        engine.turn([Work(key, have, tokens - have, torch.tensor(ids[have:tokens]))])
        engine.close(key, names[: tokens // 16])
        return have

    assert begun("first", 31) == 0
    assert begun("again", 31) == 16
    assert begun("longer", TOKENS) == 0  # beyond what the rope was made for
    assert begun("longer again", TOKENS) == 48
