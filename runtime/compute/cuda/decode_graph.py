"""The forward of several sessions' next tokens as a CUDA graph: captured once for a number of rows,
replayed for each token."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zrt.runtime.compute.cuda import launch
from zrt.runtime.compute.cuda.batch_sampler import Knobs, draw
from zrt.runtime.compute.cuda.inputs import Size
from zrt.runtime.compute.decoder.tp_linear import LEADER
from zrt.runtime.compute.decoder.workspace import Views
from zrt.runtime.compute.shared_rows.channel import Rows
from zrt.runtime.compute.turn import BatchStep

if TYPE_CHECKING:
    from zrt.runtime.compute.cuda.gpu_decoder import GpuDecoder


class Graph:
    """The forward of `size` sessions' next tokens, captured once and replayed."""

    def __init__(self, decoder: "GpuDecoder", size: int, views: Views) -> None:
        self._decoder = decoder
        self._views = views
        self._inputs = decoder.inputs(Size(0, 0, size))
        self._graph = torch.cuda.CUDAGraph()
        self._picked = torch.empty(2, size, dtype=torch.float64, pin_memory=True)
        self._heard = torch.cuda.Event()
        self._best: Tensor | None = None
        self._knobs: Knobs | None = None
        self._draw = torch.cuda.CUDAGraph()
        self._drawn: Tensor | None = None
        self._said: Tensor | None = None
        self.result: Tensor
        """Hidden states or logits of the last launch, until the next."""

    def capture(self, pool: Any) -> Any:
        """Returns the pool of memory to be used by the next."""
        self._inputs.fill((), torch.empty(0))
        self._inputs.send()
        self._forward()  # compiles what was not yet, and lets libraries make their plans
        torch.cuda.current_stream(self._decoder.shard.device).synchronize()
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self.result = self._forward()
        shard = self._decoder.shard
        if shard.is_last and shard.leads:
            knobs = self._knobs = Knobs(len(self.result), shard.device)
            knobs.send(())
            draw(self.result, knobs.on_device)
            torch.cuda.current_stream(shard.device).synchronize()
            with torch.cuda.graph(self._draw, pool=self._graph.pool(), capture_error_mode="thread_local"):
                self._drawn = draw(self.result, knobs.on_device)
        return self._graph.pool()

    @property
    def void(self) -> Tensor | None:
        """Inputs.void of the last launch."""
        return self._inputs.void

    def launch(self, steps: Sequence[BatchStep], x: Rows) -> None:
        self._inputs.fill(steps, x)
        self._inputs.send()
        self._graph.replay()

    def pick(self, knobs: Sequence[tuple[float, ...]]) -> None:
        """Have the device pick from the last launch's logits: as `knobs` say for each of the first
        rows, or the best."""
        self._said = self._best
        if knobs:
            assert self._knobs is not None
            self._knobs.send(knobs)
            self._draw.replay()
            self._said = self._drawn

    def launch_next(self, steps: Sequence[BatchStep]) -> None:
        """Again, for the tokens that are picked from the last launch."""
        assert self._said is not None
        self._inputs.fill(steps, torch.zeros(len(steps), dtype=torch.int64))
        self._inputs.send()
        self._inputs.ids[: len(steps)].copy_(self._said[1, : len(steps)])
        self._graph.replay()

    def tokens(self, count: int) -> Tensor:
        """int64 [count] on the device: the tokens picked, once it has them."""
        assert self._said is not None
        return self._said[1, :count].to(torch.int64)

    def ask(self) -> None:
        """Have the device say what it picked when it has that."""
        assert self._said is not None
        count = self._said.shape[1]
        self._picked[:, :count].copy_(self._said, non_blocking=True)
        self._heard.record()

    def said(self, count: int) -> Tensor:
        """What was asked for last: float64 [2, count] on the CPU, the greatest logits and the
        tokens picked."""
        self._heard.synchronize()
        return self._picked[:, :count].clone()

    def _forward(self) -> Tensor:
        self._decoder.blocks(self._inputs, self._views)
        if self._decoder.shard.head is None:
            return self._views.hidden
        logits = self._decoder.logits(self._views.hidden)
        group = self._decoder.shard.group
        if group is None or group.rank == LEADER:
            self._best = launch.best(logits)
        else:
            self._best = torch.empty(2, len(logits), dtype=torch.float64, device=logits.device)
        if group is not None:
            group.broadcast(self._best)
        return logits

    def end(self) -> None:
        self._graph.reset()
        if self._drawn is not None:
            self._draw.reset()
