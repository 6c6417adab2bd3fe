"""The forward of several sessions' next tokens as a CUDA graph: captured once for a number of rows,
replayed for each token."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zrt.runtime.compute.cuda.batch_sampler import Knobs, best, draw
from zrt.runtime.compute.cuda.eager_forward import EagerForward
from zrt.runtime.compute.cuda.inputs import Size
from zrt.runtime.compute.decoder.tp_linear import LEADER
from zrt.runtime.compute.decoder.workspace import Views
from zrt.runtime.compute.shared_rows.channel import Rows
from zrt.runtime.compute.turn import BatchStep


class DecodeGraph:
    """The forward of `size` sessions' next tokens, captured once and replayed."""

    def __init__(self, eager: EagerForward, size: int, views: Views) -> None:
        self._eager = eager
        self._shard = eager.shard
        self._views = views
        self._inputs = eager.inputs(Size(0, 0, size))
        self._graph = torch.cuda.CUDAGraph()
        self._picked = torch.empty(2, size, dtype=torch.float64, pin_memory=True)
        self._heard = torch.cuda.Event()
        self._best: Tensor | None = None
        self._knobs: Knobs | None = None
        self._draw = torch.cuda.CUDAGraph()
        self._drawn: Tensor | None = None
        self._said: Tensor | None = None
        self.result: Tensor
        """Hidden states or logits of the last launch, valid until the next."""

    def capture(self, pool: Any) -> Any:
        """Capture the forward, and return the pool of memory to be used by the next graph."""
        self._inputs.fill((), torch.empty(0))
        self._inputs.send()
        self._forward()  # compiles what is not compiled yet, and lets libraries make their plans
        torch.cuda.current_stream(self._shard.device).synchronize()
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self.result = self._forward()
        shard = self._shard
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
        """Whether rows handed over to the last launch are void (see `Inputs.void`)."""
        return self._inputs.void

    def launch(self, steps: Sequence[BatchStep], x: Rows) -> None:
        """Start the forward of at most `size` sessions' tokens into `result`."""
        self._inputs.fill(steps, x)
        self._inputs.send()
        self._graph.replay()

    def pick(self, knobs: Sequence[tuple[float, ...]]) -> None:
        """Have the device pick from the last launch's logits: by `knobs` for each of the first
        rows, or the best token of each row if there are none."""
        self._said = self._best
        if knobs:
            assert self._knobs is not None
            self._knobs.send(knobs)
            self._draw.replay()
            self._said = self._drawn

    def launch_next(self, steps: Sequence[BatchStep]) -> None:
        """Start the forward of the tokens picked from the last launch, before the host knows
        them."""
        assert self._said is not None
        self._inputs.fill(steps, torch.zeros(len(steps), dtype=torch.int64))
        self._inputs.send()
        self._inputs.device.x[: len(steps)].copy_(self._said[1, : len(steps)])
        self._graph.replay()

    def tokens(self, count: int) -> Tensor:
        """Return the tokens picked, int64 [count] on the device, which may not know them yet."""
        assert self._said is not None
        return self._said[1, :count].to(torch.int64)

    def ask(self) -> None:
        """Start to copy the picked tokens to the host."""
        assert self._said is not None
        count = self._said.shape[1]
        self._picked[:, :count].copy_(self._said, non_blocking=True)
        self._heard.record()

    def said(self, count: int) -> Tensor:
        """Wait for the copy that `ask` started last, and return it: float64 [2, count] on the CPU,
        the greatest logits and the tokens picked."""
        self._heard.synchronize()
        return self._picked[:, :count].clone()

    def _forward(self) -> Tensor:
        """Launch the forward: hidden states, or logits float32 [size, vocab] whose best tokens are
        picked with them."""
        self._eager.blocks(self._inputs, self._views)
        if self._shard.head is None:
            return self._views.hidden
        logits = self._eager.logits(self._views.hidden)
        group = self._shard.group
        if group is None or group.rank == LEADER:
            self._best = best(logits)
        else:
            self._best = torch.empty(2, len(logits), dtype=torch.float64, device=logits.device)
        if group is not None:
            group.broadcast(self._best)
        return logits

    def end(self) -> None:
        """Free the graphs."""
        self._graph.reset()
        if self._drawn is not None:
            self._draw.reset()
