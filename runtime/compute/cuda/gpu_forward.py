"""The forward of one shard over a ragged batch on a GPU.

Sessions' keys and values lie in pages. The data that a forward needs from the host travels in one
copy. A batch replays a CUDA graph, captured at load for a few sizes; a smaller batch is padded with
rows that write to a spare page, and a batch that no graph holds is launched kernel by kernel
(eager_forward.py).
"""

import gc
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from zrt.runtime.compute.cuda.batch_sampler import Knobs, best, draw
from zrt.runtime.compute.cuda.decode_graph import DecodeGraph
from zrt.runtime.compute.cuda.eager_forward import EagerForward
from zrt.runtime.compute.cuda.inputs import Buffers, Size
from zrt.runtime.compute.cuda.prompt_graph import PromptGraph, sizes
from zrt.runtime.compute.cuda.tuning import Tuning
from zrt.runtime.compute.decoder.shard import Shard
from zrt.runtime.compute.kv.paged_cache import PagedKVCache
from zrt.runtime.compute.shared_rows.channel import Rows
from zrt.runtime.compute.turn import BatchStep, Picking
from zrt.runtime.errors import ZrtError
from zrt.runtime.formatting import counted

GRAPH_SIZES: Final = (1, 2, 4, *range(8, 65, 8), *range(80, 257, 16))
"""Rows of the batches that graphs are captured for, up to the most sessions that may be open."""


class GpuForward:
    """The forward of a shard with keys and values in the pages of `cache`, for at most `sessions`
    sessions: graphs where they hold the batch, else kernel by kernel."""

    def __init__(self, shard: Shard, cache: PagedKVCache, sessions: int) -> None:
        self.shard = shard
        self.pages = cache
        self.best: Tensor | None = None
        self.void: Tensor | None = None
        self._sessions = sessions
        self._eager = EagerForward(shard, cache)
        self._graphs: dict[int, DecodeGraph] = {}
        self._prompt_graphs: list[PromptGraph] = []
        self._before: list[tuple[Hashable, int, int]] | None = None
        """Sessions of the last replay, the positions where they would go on, and the length of
        their rope."""
        self._ahead: tuple[list[int], list[int]] | None = None
        """The tokens picked in the last replay, and the pages they were written to, if its graph
        has been launched again for them."""

    @property
    def is_plain(self) -> bool:
        """Whether one row goes through the kernels of one row."""
        return self._eager.is_plain

    @property
    def has_begun_next(self) -> bool:
        """Whether the device already computes the tokens that follow, before it is asked to."""
        return self._ahead is not None

    @torch.inference_mode()
    def capture(self, tuned: Path | None = None, tick: Callable[[int, int], None] | None = None) -> None:
        """Capture the graphs of all batch sizes, the greatest first, in one pool of memory, once
        the products have the shapes that suit the card: the shapes found are kept in the folder
        `tuned`. `tick(graphs captured, graphs in all)` is called before and after each."""
        with _no_collection():
            if tuned is not None:
                self._eager.tune(Tuning(tuned, torch.cuda.get_device_name(self.shard.device)))
            try:
                self._capture(tick)
            except BaseException:
                self._end_graphs()  # the operations of a group that they hold would keep it from ending
                raise

    def _capture(self, tick: Callable[[int, int], None] | None) -> None:
        singles = [size for size in GRAPH_SIZES if size < self._sessions]
        singles += [size for size in GRAPH_SIZES if size >= self._sessions][:1]
        prompts = sizes(self.pages.context, self._sessions)
        workspace = self._eager.workspace
        workspace.views(max(singles[-1], prompts[-1].rows))  # the largest first, so that the buffers never move
        nbytes = max(map(self._eager.input_bytes, prompts))
        buffers, pool = Buffers(nbytes, self.shard.device), None
        total = len(prompts) + len(singles)
        for done, size in enumerate(reversed(prompts)):
            if tick is not None:
                tick(done, total)
            prompt_graph = PromptGraph(self._eager, size, workspace.views(size.rows), buffers)
            self._prompt_graphs.insert(0, prompt_graph)
            pool = prompt_graph.capture(pool)
        for done, rows in enumerate(reversed(singles), len(prompts)):
            if tick is not None:
                tick(done, total)
            graph = self._graphs[rows] = DecodeGraph(self._eager, rows, workspace.views(rows))
            pool = graph.capture(pool)
        if tick is not None:
            tick(total, total)

    def end(self) -> None:
        """Free the graphs once the device is done: a group can end only when no graph holds its
        operations any more."""
        self._before, self._ahead = None, None
        torch.cuda.current_stream(self.shard.device).synchronize()
        self._end_graphs()

    def _end_graphs(self) -> None:
        for graph in self._graphs.values():
            graph.end()
        for prompt_graph in self._prompt_graphs:
            prompt_graph.end()
        self._graphs.clear()
        self._prompt_graphs.clear()

    def run(self, steps: Sequence[BatchStep], x: Rows, picking: Picking) -> Tensor:
        """Compute one turn, as `Decoder.forward`. ZrtError insufficient_vram: the device has no
        memory left for the turn."""
        self.best = self.void = None
        try:
            if all(step.n == 1 and (step.logits or not self.shard.is_last) for step in steps):
                size = min((size for size in self._graphs if size >= len(steps)), default=None)
                if size is not None:
                    return self._replay(self._graphs[size], steps, x, picking)
            self._before, self._ahead = None, None
            return self._mixed(steps, x, picking)
        except torch.cuda.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            raise ZrtError(
                "insufficient_vram", f"{self.shard.device} has no memory left for a turn of {counted(len(x), 'token')}"
            ) from error

    def _replay(self, graph: DecodeGraph, steps: Sequence[BatchStep], x: Rows, picking: Picking) -> Tensor:
        """Compute the next token of each session.

        Where the same sessions go on as they did before, and only their tokens are asked for, their
        next tokens are begun at once: the device goes from token to token while the host still
        delivers the previous ones. Where another stage begins the next tokens, it is told at once.
        """
        before, self._before = self._before, [(step.key, step.seq_pos + 1, step.rope_length) for step in steps]
        ahead, self._ahead = self._ahead, None
        goes_on = before == [(step.key, step.seq_pos, step.rope_length) for step in steps]
        is_begun = (
            goes_on and ahead is not None and isinstance(x, Tensor) and ahead == (x.tolist(), self._places(steps, 0))
        )
        if not is_begun:
            graph.launch(steps, x)
            self.void = graph.void
        if not self.shard.is_last:
            return graph.result[: len(steps)]
        graph.pick(picking.draw)
        if picking.alone and picking.begun is not None:
            picking.begun(graph.tokens(len(steps)))  # first: a stage that is told may trust that they went on
        graph.ask()
        if picking.asked is not None:
            picking.asked()
        next_begun = goes_on and picking.alone and self.shard.is_first and self._reserve_next(steps)
        if next_begun:
            graph.launch_next(
                [BatchStep(step.key, step.seq_pos + 1, 1, rope_length=step.rope_length) for step in steps]
            )
        self.best = graph.said(len(steps))
        if next_begun:
            self._ahead = [int(token) for token in self.best[1].tolist()], self._places(steps, 1)
        return graph.result[: len(steps)]

    def _places(self, steps: Sequence[BatchStep], later: int) -> list[int]:
        """Return the page of each step's token, or of the token `later` tokens after it."""
        page = self.pages.page_tokens
        return [int(self.pages.table(step.key)[(step.seq_pos + later) // page]) for step in steps]

    def _reserve_next(self, steps: Sequence[BatchStep]) -> bool:
        """Reserve room for the token after each step's; return whether there is any, with memory to
        spare."""
        if self.pages.stats().free <= 2 * len(steps):
            return False
        try:
            for step in steps:
                self.pages.reserve(step.key, step.seq_pos + 2)
        except ZrtError:
            return False
        return True

    def _mixed(self, steps: Sequence[BatchStep], x: Rows, picking: Picking) -> Tensor:
        """Compute a batch with steps of several tokens, or of one whose logits are not asked for,
        or of more sessions than there are graphs for."""
        size = Size.of(steps)
        graph = next((graph for graph in self._prompt_graphs if graph.size.holds(size)), None)
        if graph is not None:
            inputs, hidden = graph.launch(steps, x)
        else:
            inputs, views = self._eager.inputs(size), self._eager.workspace.views(len(x))
            inputs.fill(steps, x)
            inputs.send()
            self._eager.blocks(inputs, views)
            hidden = views.hidden
        self.void = inputs.void
        if self.shard.head is None:
            return hidden
        logits = self._eager.logits(hidden[inputs.asked])
        if len(logits) and self.shard.leads:
            if picking.draw:
                knobs = Knobs(len(logits), logits.device)
                knobs.send(picking.draw)
                self.best = draw(logits, knobs.on_device)
            else:
                self.best = best(logits)
        return logits


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep graphs of a dropped engine from being freed while others are captured: CUDA does not
    permit any thread to free a graph during a capture."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
