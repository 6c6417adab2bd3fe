"""Helpers of the compute tests: a model cut into shards that run one after the other in this process, and transformers' own model."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from zrt.runtime.compute.batch import Step
from zrt.runtime.compute.decoder import Decoder
from zrt.runtime.compute.kv_cache import KVCache
from zrt.runtime.compute.shard import Shard
from zrt.runtime.compute.spec import read_spec
from zrt.runtime.compute.threads import configure_threads
from zrt.runtime.compute.weights import open_checkpoint


class Pipeline:
    """Shards of one model, chained: what stages are to each other, without processes between them."""

    def __init__(
        self, folder: Path, cuts: Sequence[tuple[int, int]], dtype: torch.dtype, context: int, budget: int
    ) -> None:
        self.spec = read_spec(folder)
        source = open_checkpoint(folder)
        self.stages = [
            Decoder(
                Shard.load(self.spec, source, cut, dtype=dtype),
                KVCache(self.spec, cut, dtype=dtype, budget=budget, context=context, sessions=8),
            )
            for cut in cuts
        ]

    def open(self, *keys: Hashable) -> None:
        for stage in self.stages:
            for key in keys:
                stage.cache.open(key)

    def forward(self, steps: Sequence[Step], x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage.forward(steps, x)
        return x

    def logits(self, key: Hashable, seq_pos: int, ids: Sequence[int], rope_length: int = 0) -> Tensor:
        """[vocab], after the last of `ids`."""
        return self.forward([Step(key, seq_pos, len(ids), rope_length=rope_length)], torch.tensor(ids))[0]

    def greedy(self, key: Hashable, prompt: Sequence[int], tokens: int) -> list[int]:
        return self.generate(key, prompt, tokens)[0]

    def generate(self, key: Hashable, prompt: Sequence[int], tokens: int) -> tuple[list[int], Tensor]:
        """Greedy ids, and the logits [tokens, vocab] each was picked from. As a session on a route, it is run again where its rope changes."""
        self.open(key)
        ids, seen, start = list(prompt), [], 0
        rope_length = self.spec.rope_length(len(prompt), len(prompt))
        while len(ids) < len(prompt) + tokens:
            before, rope_length = rope_length, self.spec.rope_length(len(prompt), len(ids))
            if rope_length != before:
                start = 0
            seen.append(self.logits(key, start, ids[start:], rope_length))
            start = len(ids)
            ids.append(int(seen[-1].argmax()))
        return ids[len(prompt) :], torch.stack(seen)


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
