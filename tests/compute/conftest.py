"""Helpers of the compute tests: models cut into shards, and transformers' own models."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.chained import Pipeline
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from zrt.runtime.compute.threads import configure_threads

GENERATED = 64
"""Tokens that transformers' own `generate` is asked for."""


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny products are faster on one thread, and other processes share the machine."""
    before = torch.get_num_threads()
    configure_threads(1)
    yield
    configure_threads(before)


@pytest.fixture(scope="session")
def pipeline() -> Callable[..., Pipeline]:
    def cut(
        folder: Path,
        cuts: Sequence[tuple[int, int]] = ((0, 3),),
        *,
        dtype: torch.dtype = torch.float32,
        context: int = 256,
        budget: int = 1 << 24,
    ) -> Pipeline:
        return Pipeline(folder, cuts, dtype, context, budget)

    return cut


@pytest.fixture(scope="session")
def reference() -> Callable[..., PreTrainedModel]:
    """transformers' model of a folder, which never stops at an end-of-sequence token."""

    def load(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        model.generation_config.eos_token_id = None
        return model

    return load


@pytest.fixture(scope="session")
def generated(reference: Callable[..., Any]) -> Callable[[Path, Sequence[int]], tuple[list[int], Tensor]]:
    """Greedy ids of transformers' own `generate`, and the logits [tokens, vocab] each was picked
    from."""
    known: dict[tuple[Path, int], tuple[list[int], Tensor]] = {}

    def generate(folder: Path, prompt: Sequence[int]) -> tuple[list[int], Tensor]:
        key = (folder, len(prompt))
        if key not in known:
            out = reference(folder).generate(
                torch.tensor([prompt]),
                max_new_tokens=GENERATED,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
            known[key] = out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits)
        return known[key]

    return generate
