"""Helpers of the compute tests: models cut into shards, and transformers' own models."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from chained import Pipeline
from transformers import AutoModelForCausalLM, PreTrainedModel

from zrt.runtime.compute.threads import configure_threads


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
