"""A model's identity is another exactly where transformers computes other numbers from its
config."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from zrt.runtime.models.architecture.spec import read_spec
from zrt.runtime.models.checkpoint.identity import config_parts

PROMPT = [5 + 7 * token * token % 143 for token in range(24)]
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
EDITS: dict[str, tuple[str, dict[str, Any]]] = {
    "norm eps": ("llama", {"rms_norm_eps": 0.05}),
    "rope base": ("llama", {"rope_parameters": _ROPE | {"rope_theta": 500.0}}),
    "rope type": ("llama", {"rope_parameters": _ROPE | {"rope_type": "linear", "factor": 4.0}}),
    "activation": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "window": ("mistral", {"sliding_window": 5}),
    "embedding scale": ("granite", {"embedding_multiplier": 3.5}),
    "residual scale": ("granite", {"residual_multiplier": 0.5}),
    "attention scale": ("granite", {"attention_multiplier": 0.5}),
    "logits scale": ("granite", {"logits_scaling": 3.0}),
    "soft-cap": ("gemma2", {"final_logit_softcapping": 2.0}),
    "attention soft-cap": ("gemma2", {"attn_logit_softcapping": 0.5}),
    "query scale": ("gemma2", {"query_pre_attn_scalar": 8}),
    "end of text": ("llama", {"eos_token_id": 7}),
    "positions": ("llama", {"max_position_embeddings": 1024}),
    "version": ("llama", {"transformers_version": "4.0.0"}),
    "drawn": ("llama", {"initializer_range": 0.5}),
    "trained with": ("llama", {"attention_dropout": 0.5, "use_cache": False}),
    "the same in other words": ("llama", {"rope_theta": 10000.0}),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_identity_is_another_where_the_numbers_are(
    make_model: Callable[..., Path], tmp_path: Path, edit: str
) -> None:
    family, keys = EDITS[edit]
    folder = make_model(family)
    edited = shutil.copytree(folder, tmp_path / "edited")
    config = json.loads((folder / "config.json").read_text())
    (edited / "config.json").write_text(json.dumps(config | keys))
    other = not torch.equal(logits(folder), logits(edited))
    assert other == (config_parts(read_spec(folder), random=False) != config_parts(read_spec(edited), random=False))


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        out: torch.Tensor = model(torch.tensor([PROMPT])).logits
    return out
