"""The decoder computes what transformers' models compute, for every family and however the model is
cut."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_models import LONG_PROMPT, MODELS, SHORT_PROMPT
from torch import Tensor
from transformers import AutoModel

from zrt.runtime.models.architecture.families import FAMILIES
from zrt.runtime.models.checkpoint.report import inspect

TOKENS = 64
TEXT = torch.randint(3, 150, (40,), generator=torch.Generator().manual_seed(1)).tolist()
CUTS = {
    "one stage": ((0, 3),),
    "two stages": ((0, 1), (2, 3)),
    "four stages": ((0, 0), (1, 1), (2, 2), (3, 3)),
}
PROMPTS = {
    (name, length): prompt
    for name, tiny in MODELS.items()
    for length, prompt in (("short", SHORT_PROMPT), ("long", LONG_PROMPT))
    if length == "short" or tiny.stretched
}


@pytest.mark.matrix("name")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("name", "prompt"), [(name, prompt) for (name, _), prompt in PROMPTS.items()], ids=map("-".join, PROMPTS)
)
def test_greedy_ids_equal_those_of_generate_over_64_tokens(name, prompt, tied, make_model, pipeline, generated) -> None:
    folder = make_model(MODELS[name].family, tied=tied, **MODELS[name].config)
    wanted_ids, wanted = generated(folder, prompt)
    for cuts in CUTS.values():
        ids, logits = pipeline(folder, cuts).generate("s", prompt, TOKENS)
        assert ids == wanted_ids
        assert (logits - wanted).abs().max() <= 1e-4


def without_head(folder: Path, to: Path, files: int) -> Path:
    """Save the base model alone, as transformers does: the names lack `model.`."""
    model = AutoModel.from_pretrained(folder)
    size = sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
    model.save_pretrained(to, max_shard_size=size + 1 if files == 1 else size // files)
    return to


def with_everything_in_the_base(folder: Path, to: Path, files: int) -> Path:
    """Save all tensors of a model with a head as if they belonged to its base model."""
    shutil.copytree(folder, to, dirs_exist_ok=True)
    for file in to.glob("*.safetensors"):
        tensors = {name if name.startswith("model.") else f"model.{name}": it for name, it in load_file(file).items()}
        save_file(tensors, file, {"format": "pt"})
    return to


def with_no_base_at_all(folder: Path, to: Path, files: int) -> Path:
    """Save a model with a head, the base model's names without `model.`."""
    shutil.copytree(folder, to, dirs_exist_ok=True)
    for file in to.glob("*.safetensors"):
        save_file({name.removeprefix("model."): it for name, it in load_file(file).items()}, file, {"format": "pt"})
    return to


@pytest.mark.matrix("family")
@pytest.mark.parametrize(
    ("save", "tied", "files"),
    [
        (without_head, True, 1),
        (without_head, True, 3),
        (with_no_base_at_all, False, 1),
        (with_everything_in_the_base, False, 1),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_named_as_a_base_models_is_loaded_as_transformers_loads_it(
    family, save, tied, files, make_model, pipeline, reference, tmp_path
) -> None:
    folder = save(make_model(family, tied=tied), tmp_path, files)
    assert inspect(folder).usable
    assert pipeline(folder, CUTS["two stages"]).difference("s", TEXT, _logits(reference(folder))) <= 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_chunks_and_single_tokens_give_the_logits_of_one_forward(name, make_model, pipeline, reference) -> None:
    folder = make_model(MODELS[name].family, **MODELS[name].config)
    expected = _logits(reference(folder))
    assert pipeline(folder, CUTS["two stages"]).difference("s", TEXT, expected) <= 1e-4


@pytest.mark.matrix("name")
@pytest.mark.parametrize("cuts", [CUTS["one stage"], CUTS["four stages"]], ids=["one stage", "four stages"])
@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_logits_are_within_2_percent_of_the_greatest(name, cuts, make_model, pipeline, reference) -> None:
    folder = make_model(MODELS[name].family, **MODELS[name].config)
    expected = _logits(reference(folder, torch.bfloat16))
    difference = pipeline(folder, cuts, dtype=torch.bfloat16).difference("s", TEXT, expected)
    assert difference <= 2e-2 * expected.abs().max()


def _logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([TEXT])).logits[0].float()
