"""The blocks over a batch with prompts in it as a CUDA graph: captured once for a size, replayed
for every batch that fits the size.

A forward of several tokens is some five hundred kernels, and launching them one by one takes a host
as long as the device needs for a thousand tokens; the ranks of a group also wait for the slowest of
their hosts.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from zrt.runtime.compute.cuda.eager_forward import EagerForward
from zrt.runtime.compute.cuda.inputs import Buffers, Inputs, Size
from zrt.runtime.compute.decoder.workspace import Views
from zrt.runtime.compute.shared_rows.channel import Rows
from zrt.runtime.compute.turn import BatchStep

TOKENS_ALONE: Final = (32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
TOKENS_BESIDE: Final = (64, 128, 256, 512, 1024)
"""Rows of prompts that graphs are captured for: TOKENS_ALONE with prompts alone, TOKENS_BESIDE with
sessions that decode in the same turn."""
SESSIONS_BESIDE: Final = (16, 64, 256)
"""Sessions that decode beside prompts, up to the most that may be open."""
PROMPTS: Final = 16
"""The most prompts in one batch."""


def sizes(context: int, sessions: int) -> list[Size]:
    """Return the sizes of the graphs of a decoder, the smallest first."""
    prompts = min(PROMPTS, sessions)
    found = [Size(tokens, prompts, 0) for tokens in _up_to(context * prompts, TOKENS_ALONE)]
    if sessions > 1:
        for tokens in _up_to(context * prompts, TOKENS_BESIDE):
            found += [Size(tokens, prompts, beside) for beside in _up_to(sessions - 1, SESSIONS_BESIDE)]
    return sorted(found, key=lambda size: size.rows)


def _up_to(most: int, numbers: Iterable[int]) -> Iterator[int]:
    """Yield those of rising numbers that are below `most`, and then `most` itself if there is a
    greater number."""
    for number in numbers:
        yield min(number, most)
        if number >= most:
            return


class PromptGraph:
    """The blocks of batches that `size` holds. All prompt graphs of a decoder work in the same
    buffers: one batch runs at a time."""

    def __init__(self, eager: EagerForward, size: Size, views: Views, buffers: Buffers) -> None:
        self.size = size
        self._eager = eager
        self._views = views
        self._inputs = eager.inputs(size, buffers)
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, pool: Any) -> Any:
        """Capture the blocks, and return the pool of memory to be used by the next graph."""
        self._inputs.fill((), torch.empty(0))
        self._inputs.send()
        # Compiles what is not compiled yet, and lets libraries make their plans.
        self._eager.blocks(self._inputs, self._views)
        torch.cuda.current_stream(self._eager.shard.device).synchronize()
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._eager.blocks(self._inputs, self._views)
        return self._graph.pool()

    def launch(self, steps: Sequence[BatchStep], x: Rows) -> tuple[Inputs, Tensor]:
        """Start the blocks of a batch; return its inputs and its hidden states [rows, hidden],
        valid until the next launch."""
        self._inputs.fill(steps, x)
        self._inputs.send()
        self._graph.replay()
        return self._inputs, self._views.hidden[: len(x)]

    def end(self) -> None:
        """Free the graph."""
        self._graph.reset()
