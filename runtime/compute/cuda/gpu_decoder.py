"""The forward of one shard over a ragged batch on a GPU.

Sessions' keys and values lie in pages. Steps of one token go through one paged attention kernel,
longer ones through another. What a forward needs from the host travels in one copy. A batch replays
a CUDA graph, captured at load for a few sizes; a smaller batch is padded with rows that write to a
spare page, and one that no graph holds is launched kernel by kernel. At one row the products are
kernels that read weights as fast as memory gives them, with norms, gate and residual inside, where
the model's blocks are of the plain kind.
"""

import gc
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from zrt.runtime.compute.cuda import launch
from zrt.runtime.compute.cuda.batch_sampler import Knobs, draw
from zrt.runtime.compute.cuda.decode_graph import Graph
from zrt.runtime.compute.cuda.inputs import Buffers, Inputs, Size
from zrt.runtime.compute.cuda.launch import Heads
from zrt.runtime.compute.cuda.one_row import PlainBlocks, PlainHead
from zrt.runtime.compute.cuda.prompt_graph import PromptGraph, sizes
from zrt.runtime.compute.cuda.tuning import Tuning
from zrt.runtime.compute.decoder.decoder import Decoder
from zrt.runtime.compute.decoder.linear import Linear
from zrt.runtime.compute.decoder.shard import Block, Shard
from zrt.runtime.compute.decoder.workspace import Views
from zrt.runtime.compute.kv.paged_cache import PagedKVCache
from zrt.runtime.compute.shared_rows.channel import Rows
from zrt.runtime.compute.turn import BatchStep, Picking
from zrt.runtime.errors import ZrtError
from zrt.runtime.formatting import counted

GRAPH_SIZES: Final = (1, 2, 4, *range(8, 65, 8), *range(80, 257, 16))
"""Rows of the batches that graphs are captured for, up to the sessions there may be."""


class GpuDecoder(Decoder):
    """A shard and its paged cache on one CUDA device. Not thread-safe: one executor uses it."""

    def __init__(self, shard: Shard, cache: PagedKVCache, sessions: int) -> None:
        super().__init__(shard, cache)
        self.pages = cache
        spec, device = shard.spec, shard.device
        self._sessions = sessions
        self._norm_eps = spec.norm_eps
        self._heads = Heads(spec, self._attention, cache.page_tokens, device)
        self._kv = [tuple(block.unbind(0)) for block in cache.pool.unbind(0)]
        self._graphs: dict[int, Graph] = {}
        self._prompt_graphs: list[PromptGraph] = []
        self._before: list[tuple[Hashable, int, int]] | None = None
        """Sessions of the last replay, where they would go on, and the length of their rope."""
        self._ahead: tuple[list[int], list[int]] | None = None
        """If that replay's graph has been launched again, for the tokens picked in it: those
        tokens, and the pages they were written to."""
        self._plain = PlainBlocks.of(shard)
        self._plain_head = PlainHead.of(shard)

    @property
    def is_plain(self) -> bool:
        """Whether one row goes through the kernels of one row."""
        return self._plain is not None

    @torch.inference_mode()
    def capture(self, tuned: Path | None = None, tick: Callable[[int, int], None] | None = None) -> None:
        """Capture the graphs of all batch sizes, the greatest first, in one pool of memory, once
        the products have the shapes that suit the card: what was found is kept in the folder
        `tuned`. `tick(graphs captured, graphs in all)` is called before and after each."""
        with _no_collection():
            if tuned is not None:
                self._tune(Tuning(tuned, torch.cuda.get_device_name(self.shard.device)))
            try:
                self._capture(tick)
            except BaseException:
                self._end_graphs()  # what they hold of a group would keep it from ending
                raise

    def _capture(self, tick: Callable[[int, int], None] | None) -> None:
        singles = [size for size in GRAPH_SIZES if size < self._sessions]
        singles += [size for size in GRAPH_SIZES if size >= self._sessions][:1]
        prompts = sizes(self.pages.context, self._sessions)
        self._workspace.views(max(singles[-1], prompts[-1].rows))  # no later ones take the place of these
        nbytes = max(Inputs.nbytes(self.shard, self.pages, self._rotaries, size) for size in prompts)
        buffers, pool = Buffers(nbytes, self.shard.device), None
        total = len(prompts) + len(singles)
        for done, size in enumerate(reversed(prompts)):
            if tick is not None:
                tick(done, total)
            prompt_graph = PromptGraph(self, size, self._workspace.views(size.rows), buffers)
            self._prompt_graphs.insert(0, prompt_graph)
            pool = prompt_graph.capture(pool)
        for done, rows in enumerate(reversed(singles), len(prompts)):
            if tick is not None:
                tick(done, total)
            graph = self._graphs[rows] = Graph(self, rows, self._workspace.views(rows))
            pool = graph.capture(pool)
        if tick is not None:
            tick(total, total)

    def _tune(self, tuning: Tuning) -> None:
        if self._plain is not None:
            self._plain.tune(tuning)
        if self._plain_head is not None:
            self._plain_head.tune(tuning)

    def end(self) -> None:
        """Free the graphs: a group can end only when none holds its operations any more."""
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

    def _run(self, steps: Sequence[BatchStep], x: Rows, picking: Picking) -> Tensor:
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

    def _replay(self, graph: Graph, steps: Sequence[BatchStep], x: Rows, picking: Picking) -> Tensor:
        """Decode. Where the same sessions go on as they did before, and nothing but their tokens is
        asked for, their next tokens are begun at once: the device goes from token to token while
        the host still says what they were. Where another stage begins them, it is told at once.
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
            picking.begun(graph.tokens(len(steps)))  # first: whoever hears of them may trust that they went on
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
        """The page of each step's token, or of one so many tokens later."""
        page = self.pages.page_tokens
        return [int(self.pages.table(step.key)[(step.seq_pos + later) // page]) for step in steps]

    def _reserve_next(self, steps: Sequence[BatchStep]) -> bool:
        """Whether there is room for the token after each step's, and memory to spare."""
        if self.pages.stats().free <= 2 * len(steps):
            return False
        try:
            for step in steps:
                self.pages.reserve(step.key, step.seq_pos + 2)
        except ZrtError:
            return False
        return True

    def _mixed(self, steps: Sequence[BatchStep], x: Rows, picking: Picking) -> Tensor:
        """A batch with steps of several tokens, or of one whose logits nobody wants, or of more
        sessions than there are graphs for."""
        size = Size.of(steps)
        graph = next((graph for graph in self._prompt_graphs if graph.size.holds(size)), None)
        if graph is not None:
            inputs, hidden = graph.launch(steps, x)
        else:
            inputs, views = self.inputs(size), self._workspace.views(len(x))
            inputs.fill(steps, x)
            inputs.send()
            self.blocks(inputs, views)
            hidden = views.hidden
        self.void = inputs.void
        if self.shard.head is None:
            return hidden
        logits = self.logits(hidden[inputs.asked])
        if len(logits) and self.shard.leads:
            if picking.draw:
                knobs = Knobs(len(logits), logits.device)
                knobs.send(picking.draw)
                self.best = draw(logits, knobs.on_device)
            else:
                self.best = launch.best(logits)
        return logits

    def inputs(self, size: Size, buffers: Buffers | None = None) -> Inputs:
        """For batches that `size` holds."""
        return Inputs(self.shard, self.pages, self._rotaries, size, buffers)

    def blocks(self, inputs: Inputs, views: Views) -> None:
        """All blocks, from the tokens or hidden states of `inputs` to `views.hidden`. Touches the
        device alone."""
        embedding = self.shard.embedding
        if embedding is None:
            views.hidden.copy_(inputs.hidden)
        else:
            embedding.rows(inputs.ids, views.hidden)
            if self._embedding_scale != 1:
                views.hidden.mul_(self._embedding_scale)
        plain = self._plain if len(views.hidden) == 1 else None
        for index, block in enumerate(self.shard.blocks):
            if plain is not None:
                plain.run(index, views, partial(self._attend, index, block, inputs, views))
            else:
                self._whole_block(index, block, inputs, views)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [rows, vocab] of hidden states [rows, hidden], which are written over."""
        shard = self.shard
        assert shard.final_norm is not None
        assert shard.head is not None
        logits = torch.empty(len(hidden), shard.spec.vocab_size, dtype=shard.dtype, device=hidden.device)
        if len(hidden) == 1 and self._plain_head is not None:
            self._plain_head.write(hidden, logits)
        elif len(hidden):
            launch.norm_rows(hidden, shard.final_norm, self._norm_eps, hidden)
            shard.head.write(hidden, logits)
        return self._final(logits)

    def _attend(self, index: int, block: Block, inputs: Inputs, views: Views) -> None:
        which = self._rotary_of[index]
        angles = None if which is None else inputs.angles[which]
        kv = self._kv[index]
        self._heads.place(views.qkv, block.qk_norm, self._norm_eps, angles, inputs.slots, kv)
        tiles = len(inputs.tiles) > 0
        if len(inputs.rows):
            where = inputs.tables, inputs.lengths, inputs.rows
            self._heads.attend(index, views.qkv, kv, *where, views.attended, mixed=tiles)
        if tiles:
            prompts = inputs.prompt_tables, inputs.tiles, inputs.prompt_rows
            self._heads.attend_prompts(index, views.qkv, kv, *prompts, views.attended)

    def _whole_block(self, index: int, block: Block, inputs: Inputs, views: Views) -> None:
        block.qkv.write(self._normed(block.attention_norm, views), views.qkv)
        if block.q_norm is not None and block.k_norm is not None:
            if self._wide_norms is not None:
                self._wide_norms(views.q, block.q_norm, views.k, block.k_norm)
            else:
                launch.norm_rows(views.q, block.q_norm, self._norm_eps, views.q)
                launch.norm_rows(views.k, block.k_norm, self._norm_eps, views.k)
        self._attend(index, block, inputs, views)
        self._add(block.o, views.attended, block.attention_out_norm, views)
        block.gate_up.write(self._normed(block.mlp_norm, views), views.gate_up)
        launch.gate_rows(views.gate_up, self._is_silu)
        self._add(block.down, views.gate, block.mlp_out_norm, views)

    def _normed(self, norm: Tensor | None, views: Views) -> Tensor:
        if norm is None:
            return views.hidden
        launch.norm_rows(views.hidden, norm, self._norm_eps, views.normed)
        return views.normed

    def _add(self, product: Linear, x: Tensor, norm: Tensor | None, views: Views) -> None:
        scale = self._residual_scale
        if norm is None and scale == 1 and self.shard.group is None:
            product.add(x, views.hidden)
            return
        product.write(x, views.normed)
        if norm is not None:
            launch.norm_rows(views.normed, norm, self._norm_eps, views.normed)
        if scale != 1:
            views.normed.mul_(scale)
        views.hidden.add_(views.normed)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Graphs of an engine that is gone must not be freed while others are captured: CUDA permits
    that to nobody meanwhile."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
