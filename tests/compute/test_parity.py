"""The decoder computes what transformers' models compute, for every family and however the model is
cut."""

from typing import Any

import pytest
import torch
from support.tiny_models import LONG_PROMPT, MODELS, SHORT_PROMPT
from torch import Tensor

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
