"""Keys of generation_config.json that zrt takes for harmless change no answer of transformers."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from zrt.runtime.models.architecture.generation_config import HARMLESS

PROMPT = torch.tensor([[3, 14, 15, 92, 65, 35, 89, 14, 15, 92]])
VALUES: dict[str, Any] = {
    "transformers_version": "4.1.0",
    "_from_model_config": True,
    "_commit_hash": "abc",
    "early_stopping": True,
    "length_penalty": 0.2,
    "num_beam_groups": 1,
    "diversity_penalty": 0.5,
    "use_cache": False,
    "cache_config": {},
    "max_cache_len": 64,
    "compile_config": None,
    "disable_compile": True,
    "low_memory": True,
    "prefill_chunk_size": 3,
    "continuous_batching_config": None,
    "output_attentions": True,
    "output_hidden_states": True,
    "output_scores": True,
    "output_logits": True,
    "return_dict_in_generate": True,
    "renormalize_logits": True,
    "pad_token_id": 9,
    "bos_token_id": 9,
    "decoder_start_token_id": 9,
    "num_assistant_tokens": 3,
    "num_assistant_tokens_schedule": "heuristic",
    "assistant_confidence_threshold": 0.9,
    "prompt_lookup_num_tokens": 3,
    "max_matching_ngram_size": 3,
    "assistant_early_exit": None,
    "assistant_lookbehind": 3,
    "target_lookbehind": 3,
    "speculation_type": "dflash",
    "use_mtp": False,
}
"""A value of each that is not its neutral one, where the model and the machine can do it: an early
exit and multi-token prediction are of certain models, compiling and continuous batching have no
outcome of their own."""


@pytest.fixture(scope="module")
def model(make_model: Callable[..., Path]) -> Any:
    return AutoModelForCausalLM.from_pretrained(make_model("llama"), attn_implementation="eager")


def answer(model: Any, **said: Any) -> list[int]:
    torch.manual_seed(0)
    said = {"max_new_tokens": 8, "pad_token_id": 0, "eos_token_id": [], "do_sample": True, "top_k": 40} | said
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        out = model.generate(PROMPT, generation_config=GenerationConfig.from_dict(said))
    ids: list[int] = (out if isinstance(out, torch.Tensor) else out.sequences)[0, PROMPT.shape[1] :].tolist()
    return ids


@pytest.fixture(scope="module")
def usual(model: Any) -> list[int]:
    return answer(model)


def test_every_harmless_key_is_tried() -> None:
    assert set(VALUES) == HARMLESS


@pytest.mark.parametrize("key", sorted(HARMLESS))
def test_a_harmless_key_changes_no_answer(model: Any, usual: list[int], key: str) -> None:
    if key == "prompt_lookup_num_tokens":  # it draws in another order
        greedy = {"do_sample": False, "top_k": None}
        assert answer(model, **greedy, **{key: VALUES[key]}) == answer(model, **greedy)
    else:
        assert answer(model, **{key: VALUES[key]}) == usual


@pytest.mark.parametrize(("key", "value"), [("top_h", 0.05), ("no_repeat_ngram_size", 1), ("typical_p", 0.2)])
def test_a_key_that_is_said_changes_one(model: Any, usual: list[int], key: str, value: object) -> None:
    assert answer(model, **{key: value}) != usual
