"""A model cut into shards that run one after the other in this process."""

from collections.abc import Hashable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from zrt.runtime.compute.cpu.cpu_forward import cpu_decoder
from zrt.runtime.compute.decoder.shard import Shard
from zrt.runtime.compute.kv.slab_cache import SlabKVCache
from zrt.runtime.compute.turn import BatchStep
from zrt.runtime.compute.weight_sources import open_checkpoint
from zrt.runtime.models.architecture.spec import read_spec


class Pipeline:
    """Shards of one model, chained: they are to each other what stages are, without processes
    between them."""

    def __init__(
        self, folder: Path, cuts: Sequence[tuple[int, int]], dtype: torch.dtype, context: int, budget: int
    ) -> None:
        self.spec = read_spec(folder)
        source = open_checkpoint(folder)
        self.stages = [
            cpu_decoder(
                Shard.load(self.spec, source, cut, dtype=dtype),
                SlabKVCache(self.spec, cut, dtype=dtype, budget=budget, context=context, sessions=8),
            )
            for cut in cuts
        ]

    def open(self, *keys: Hashable) -> None:
        for stage in self.stages:
            for key in keys:
                stage.cache.open(key)

    def forward(self, steps: Sequence[BatchStep], x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage.forward(steps, x)
        return x

    def logits(self, key: Hashable, seq_pos: int, ids: Sequence[int], rope_length: int = 0) -> Tensor:
        """Return the logits [vocab] after the last of `ids`."""
        return self.forward([BatchStep(key, seq_pos, len(ids), rope_length=rope_length)], torch.tensor(ids))[0]

    def greedy(self, key: Hashable, prompt: Sequence[int], tokens: int) -> list[int]:
        return self.generate(key, prompt, tokens)[0]

    def generate(self, key: Hashable, prompt: Sequence[int], tokens: int) -> tuple[list[int], Tensor]:
        """Return the greedy ids, and the logits [tokens, vocab] each was picked from. Like a
        session on a route, the history is run again where its rope changes."""
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

    def difference(self, key: Hashable, ids: Sequence[int], expected: Tensor) -> float:
        """Return the largest difference from the `expected` logits [tokens, vocab], with the text
        taken in two chunks, then token by token."""
        self.open(key)
        rope_length = self.spec.rope_length(len(ids), len(ids))
        worst, start = 0.0, 0
        for stop in (18, 30, *range(31, len(ids) + 1)):
            logits = self.logits(key, start, ids[start:stop], rope_length)
            worst = max(worst, float((logits - expected[stop - 1]).abs().max()))
            start = stop
        return worst
