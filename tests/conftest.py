"""What every room's tests may ask for: tiny random models on disk, made by transformers itself."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zrt.runtime.models import resolve

os.environ.setdefault("HF_HUB_OFFLINE", "1")

TINY = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The folder of the demo model, fetched and converted if the cache lacks it."""
    return resolve("smollm2-135m")


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`make_model(family, *, tied=False, seed=0, dtype="float32", files=1, **config)`: the folder of a tiny random model.

    `family` is a `model_type`; `config` overrides the keys of `TINY`; `files` > 1 writes indexed shards. Weights are random
    everywhere (norms around 1, biases away from 0), so that no part of a model can be left out unnoticed. Equal arguments, equal folder.
    """
    made: dict[str, Path] = {}

    def make(
        family: str, *, tied: bool = False, seed: int = 0, dtype: str = "float32", files: int = 1, **config: Any
    ) -> Path:
        key = repr((family, tied, seed, dtype, files, sorted(config.items())))
        if key not in made:
            made[key] = tmp_path_factory.mktemp(family)
            _save_model(made[key], family, TINY | {"tie_word_embeddings": tied} | config, seed, dtype, files)
        return made[key]

    return make


def _save_model(folder: Path, family: str, config: dict[str, Any], seed: int, dtype: str, files: int) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config))
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                center = float(
                    parameter.detach().mean()
                )  # what the family starts from: 1, or 0 where 1 is added to the weight
                torch.nn.init.uniform_(parameter, center - 0.2, center + 0.2)
            elif name.endswith("bias"):
                torch.nn.init.uniform_(parameter, -0.2, 0.2)
    model.to(getattr(torch, dtype))
    size = sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
    model.save_pretrained(folder, max_shard_size=size + 1 if files == 1 else size // files)
