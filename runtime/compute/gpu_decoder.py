"""The forward of one shard over a ragged batch on a GPU.

Sessions' keys and values lie in pages. Steps of one token go through the paged attention kernel; longer ones gather their pages and use torch's
own attention. What a forward needs from the host travels in one copy. Batches of single tokens replay a CUDA graph, captured at load for a
few sizes; a smaller batch is padded with rows that write to a spare page. At one row the products are kernels that read weights as fast as
memory gives them, with norms, gate and residual inside, where the model's blocks are of the plain kind.
"""

import gc
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from zrt.runtime.compute import gpu_kernels
from zrt.runtime.compute.attention import capped_attention
from zrt.runtime.compute.batch import Step
from zrt.runtime.compute.decoder import Decoder
from zrt.runtime.compute.gpu_inputs import Inputs
from zrt.runtime.compute.gpu_kernels import Heads, Product
from zrt.runtime.compute.linear import DenseLinear, Linear
from zrt.runtime.compute.paged_cache import PagedKVCache
from zrt.runtime.compute.parallel import LEADER, RowParallelLinear, VocabularyLinear
from zrt.runtime.compute.shard import Block, Shard
from zrt.runtime.compute.workspace import Views, Workspace
from zrt.runtime.errors import ZrtError

GRAPH_SIZES: Final = (1, 2, 4, *range(8, 65, 8), *range(80, 257, 16))
"""Rows of the batches that graphs are captured for, up to the sessions there may be."""

WARM_UP_ROWS: Final = 512


class GpuDecoder(Decoder):
    """A shard and its paged cache on one CUDA device. Not thread-safe: one lane uses it."""

    def __init__(self, shard: Shard, cache: PagedKVCache, sessions: int) -> None:
        super().__init__(shard, cache)
        self.pages = cache
        spec, device = shard.spec, shard.device
        self._sessions = sessions
        self._norm_eps = spec.norm_eps
        self._heads = Heads(spec, self._attention, cache.page_tokens, device)
        self._kv = [tuple(block.unbind(0)) for block in cache.pool.unbind(0)]
        self._graphs: dict[int, _Graph] = {}
        self._before: list[tuple[Hashable, int, int]] | None = None
        """Sessions of the last replay, where they would go on, and the length of their rope."""
        self._ahead: tuple[list[int], list[int]] | None = None
        """If that replay's graph has been launched again, for the tokens picked in it: those tokens, and the pages they were written to."""
        self._plain = _plain_products(shard)
        self._plain_head = _plain_head(shard)

    @property
    def is_plain(self) -> bool:
        """Whether one row goes through the kernels of one row."""
        return self._plain is not None

    @torch.inference_mode()
    def capture(self, tick: Callable[[], None] | None = None) -> None:
        """Capture the graphs of all batch sizes, the greatest first, in one pool of memory. `tick` is called after each."""
        sizes = [size for size in GRAPH_SIZES if size < self._sessions]
        sizes.append(min((size for size in GRAPH_SIZES if size >= self._sessions), default=GRAPH_SIZES[-1]))
        workspace = Workspace(self.shard.spec, self.shard.dtype, self.shard.device)
        pool = None
        with _no_collection():
            for size in reversed(sizes):
                graph = _Graph(self, size, workspace.views(size))
                pool = graph.capture(pool)
                self._graphs[size] = graph
                if tick is not None:
                    tick()
        self._warm_up()

    def end(self) -> None:
        """Free the graphs: a group can end only when none holds its operations any more."""
        self._before, self._ahead = None, None
        torch.cuda.current_stream(self.shard.device).synchronize()
        for graph in self._graphs.values():
            graph.end()
        self._graphs.clear()

    def _warm_up(self) -> None:
        """Run a prompt in two chunks, so that the first one that is asked for does not wait for kernels to be compiled and loaded."""
        stats, shard = self.pages.stats(), self.shard
        rows = min(WARM_UP_ROWS, self.pages.context // 2, stats.total * stats.page_tokens // 2)
        if self._rope_switch is not None:
            rows = min(rows, self._rope_switch // 2)
        x = torch.zeros(rows, dtype=torch.int64)
        if not shard.is_first:
            x = torch.zeros(rows, shard.spec.hidden_size, dtype=shard.dtype)
        self.pages.open(self)
        for start in (0, rows):
            self.forward([Step(self, start, rows)], x)
        self.pages.close(self)
        torch.cuda.current_stream(shard.device).synchronize()

    def _run(self, steps: Sequence[Step], x: Tensor, only_best: bool) -> Tensor:
        self.best = None
        try:
            if all(step.n == 1 and (step.logits or not self.shard.is_last) for step in steps):
                size = min((size for size in self._graphs if size >= len(steps)), default=None)
                if size is not None:
                    return self._replay(self._graphs[size], steps, x, only_best)
            self._before, self._ahead = None, None
            return self._eager(steps, x)
        except torch.cuda.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            raise ZrtError(
                "insufficient_vram", f"{self.shard.device} has no memory left for a turn of {len(x)} tokens"
            ) from error

    def _replay(self, graph: "_Graph", steps: Sequence[Step], x: Tensor, only_best: bool) -> Tensor:
        """Decode. Where the same sessions go on as they did before, and only their best tokens are asked for, their next tokens are begun at
        once: the device goes from token to token while the host still says what they were."""
        before, self._before = self._before, [(step.key, step.seq_pos + 1, step.rope_length) for step in steps]
        ahead, self._ahead = self._ahead, None
        goes_on = before == [(step.key, step.seq_pos, step.rope_length) for step in steps]
        if not (goes_on and ahead is not None and ahead == (x.tolist(), self._places(steps, 0))):
            graph.launch(steps, x)
        if not self.shard.is_last:
            return graph.result[: len(steps)]
        graph.ask_best()
        next_begun = goes_on and only_best and self.shard.is_first and self._reserve_next(steps)
        if next_begun:
            graph.launch_next([Step(step.key, step.seq_pos + 1, 1, rope_length=step.rope_length) for step in steps])
        self.best = graph.best(len(steps))
        if next_begun:
            self._ahead = [int(token) for token in self.best[1].tolist()], self._places(steps, 1)
        return graph.result[: len(steps)]

    def _places(self, steps: Sequence[Step], later: int) -> list[int]:
        """The page of each step's token, or of one so many tokens later."""
        page = self.pages.page_tokens
        return [int(self.pages.table(step.key)[(step.seq_pos + later) // page]) for step in steps]

    def _reserve_next(self, steps: Sequence[Step]) -> bool:
        """Whether there is room for the token after each step's, and memory to spare."""
        if self.pages.stats().free <= 2 * len(steps):
            return False
        try:
            for step in steps:
                self.pages.reserve(step.key, step.seq_pos + 2)
        except ZrtError:
            return False
        return True

    def _eager(self, steps: Sequence[Step], x: Tensor) -> Tensor:
        inputs = self.inputs(len(x), sum(step.n == 1 for step in steps))
        inputs.fill(steps, x)
        inputs.send()
        views = self._workspace.views(len(x))
        prompts, start = [], 0
        for step in steps:
            if step.n > 1:
                prompts.append(_Prompt(self, step, views, start))
            start += step.n
        self.blocks(inputs, views, prompts)
        if self.shard.head is None:
            return views.hidden.clone()
        rows, end = [], 0
        for step in steps:
            end += step.n
            if step.logits:
                rows.append(end - 1)
        return self.logits(views.hidden[torch.tensor(rows, dtype=torch.int64, device=self.shard.device)])

    def inputs(self, rows: int, singles: int) -> Inputs:
        """Buffers for a batch of so many rows, of which so many are sessions' single tokens."""
        return Inputs(self.shard, self.pages, self._rotaries, rows, singles)

    def blocks(self, inputs: Inputs, views: Views, prompts: "Sequence[_Prompt]" = ()) -> None:
        """All blocks, from the tokens or hidden states of `inputs` to `views.hidden`. Touches the device alone."""
        embedding = self.shard.embedding
        if embedding is None:
            views.hidden.copy_(inputs.hidden)
        else:
            embedding.rows(inputs.ids, views.hidden)
            if self._embedding_scale != 1:
                views.hidden.mul_(self._embedding_scale)
        fused = self._plain is not None and len(views.hidden) == 1
        for index, block in enumerate(self.shard.blocks):
            if fused:
                self._fused_block(index, block, inputs, views)
            else:
                self._whole_block(index, block, inputs, views, prompts)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [rows, vocab] of hidden states [rows, hidden], which are written over."""
        shard = self.shard
        assert shard.final_norm is not None
        assert shard.head is not None
        logits = torch.empty(len(hidden), shard.spec.vocab_size, dtype=shard.dtype, device=hidden.device)
        if len(hidden) == 1 and self._plain_head is not None:
            weight, shape = self._plain_head
            own = logits if shard.group is None else logits.new_empty(1, len(weight))
            gpu_kernels.one_row_product(hidden, weight, own, norm=shard.final_norm, eps=self._norm_eps, shape=shape)
            if isinstance(shard.head, VocabularyLinear):
                shard.head.collect(own, logits)
        elif len(hidden):
            gpu_kernels.norm_rows(hidden, shard.final_norm, self._norm_eps, hidden)
            shard.head.write(hidden, logits)
        if shard.spec.logits_divisor != 1:
            logits.div_(shard.spec.logits_divisor)
        if shard.spec.logits_softcap is not None:
            logits.div_(shard.spec.logits_softcap).tanh_().mul_(shard.spec.logits_softcap)
        return logits.float()

    def _attend(
        self, index: int, block: Block, inputs: Inputs, views: Views, prompts: "Sequence[_Prompt]" = ()
    ) -> None:
        which = self._rotary_of[index]
        angles = None if which is None else inputs.angles[which]
        kv = self._kv[index]
        self._heads.place(views.qkv, block.qk_norm, self._norm_eps, angles, inputs.slots, kv)
        if len(inputs.rows):
            tables, lengths = inputs.tables, inputs.lengths
            self._heads.attend(index, views.qkv, kv, tables, lengths, inputs.rows, views.attended)
        for prompt in prompts:
            prompt.attend(index, kv)

    def _fused_block(self, index: int, block: Block, inputs: Inputs, views: Views) -> None:
        assert self._plain is not None
        plain, hidden, eps = self._plain[index], views.hidden, self._norm_eps
        product = gpu_kernels.one_row_product
        product(hidden, plain.qkv, views.qkv, norm=block.attention_norm, eps=eps, shape=plain.by_hidden)
        self._attend(index, block, inputs, views)
        self._add_row(views.attended, plain.o, plain.by_heads, views)
        gated = views.gate_up[:, : plain.down.shape[1]]
        product(hidden, plain.gate_up, gated, norm=block.mlp_norm, eps=eps, gate=True, shape=plain.by_hidden_gated)
        self._add_row(gated, plain.down, plain.by_width, views)

    def _add_row(self, x: Tensor, weight: Tensor, shape: Product, views: Views) -> None:
        """One row's product, of which a group's ranks each have a summand, added to the residual stream."""
        group = self.shard.group
        if group is None:
            gpu_kernels.one_row_product(x, weight, views.hidden, add=True, shape=shape)
            return
        gpu_kernels.one_row_product(x, weight, views.normed, shape=shape)
        group.all_reduce(views.normed)
        views.hidden.add_(views.normed)

    def _whole_block(
        self, index: int, block: Block, inputs: Inputs, views: Views, prompts: "Sequence[_Prompt]"
    ) -> None:
        block.qkv.write(self._normed(block.attention_norm, views), views.qkv)
        if block.q_norm is not None and block.k_norm is not None:
            if self._wide_norms is not None:
                self._wide_norms(views.q, block.q_norm, views.k, block.k_norm)
            else:
                gpu_kernels.norm_rows(views.q, block.q_norm, self._norm_eps, views.q)
                gpu_kernels.norm_rows(views.k, block.k_norm, self._norm_eps, views.k)
        self._attend(index, block, inputs, views, prompts)
        self._add(block.o, views.attended, block.attention_out_norm, views)
        block.gate_up.write(self._normed(block.mlp_norm, views), views.gate_up)
        gpu_kernels.gate_rows(views.gate_up, self._is_silu)
        self._add(block.down, views.gate, block.mlp_out_norm, views)

    def _normed(self, norm: Tensor | None, views: Views) -> Tensor:
        if norm is None:
            return views.hidden
        gpu_kernels.norm_rows(views.hidden, norm, self._norm_eps, views.normed)
        return views.normed

    def _add(self, product: Linear, x: Tensor, norm: Tensor | None, views: Views) -> None:
        scale = self._residual_scale
        if norm is None and scale == 1 and self.shard.group is None:
            product.add(x, views.hidden)
            return
        product.write(x, views.normed)
        if norm is not None:
            gpu_kernels.norm_rows(views.normed, norm, self._norm_eps, views.normed)
        if scale != 1:
            views.normed.mul_(scale)
        views.hidden.add_(views.normed)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Graphs of an engine that is gone must not be freed while others are captured: CUDA permits that to nobody meanwhile."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Graph:
    """The forward of `size` sessions' next tokens, captured once and replayed."""

    def __init__(self, decoder: GpuDecoder, size: int, views: Views) -> None:
        self._decoder = decoder
        self._views = views
        self._inputs = decoder.inputs(size, size)
        self._graph = torch.cuda.CUDAGraph()
        self._picked = torch.empty(2, size, dtype=torch.float64, pin_memory=True)
        self._heard = torch.cuda.Event()
        self._best: Tensor | None = None
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
        return self._graph.pool()

    def launch(self, steps: Sequence[Step], x: Tensor) -> None:
        self._inputs.fill(steps, x)
        self._inputs.send()
        self._graph.replay()

    def launch_next(self, steps: Sequence[Step]) -> None:
        """Again, for the tokens that the last launch picks."""
        assert self._best is not None
        self._inputs.fill(steps, torch.zeros(len(steps), dtype=torch.int64))
        self._inputs.send()
        self._inputs.ids.copy_(self._best[1])
        self._graph.replay()

    def ask_best(self) -> None:
        """Have the device say the last launch's best tokens when it has them."""
        assert self._best is not None
        self._picked.copy_(self._best, non_blocking=True)
        self._heard.record()

    def best(self, count: int) -> Tensor:
        """What was asked for last: float64 [2, count] on the CPU, the greatest logits and their tokens."""
        self._heard.synchronize()
        return self._picked[:, :count].clone()

    def _forward(self) -> Tensor:
        self._decoder.blocks(self._inputs, self._views)
        if self._decoder.shard.head is None:
            return self._views.hidden
        logits = self._decoder.logits(self._views.hidden)
        group = self._decoder.shard.group
        if group is None or group.rank == LEADER:
            self._best = gpu_kernels.best(logits)
        else:
            self._best = torch.empty(2, len(logits), dtype=torch.float64, device=logits.device)
        if group is not None:
            group.broadcast(self._best)
        return logits

    def end(self) -> None:
        self._graph.reset()


class _Prompt:
    """A step of several tokens: its part of the batch, and the pages of its history."""

    def __init__(self, decoder: GpuDecoder, step: Step, views: Views, start: int) -> None:
        spec, cache = decoder.shard.spec, decoder.pages
        device = decoder.shard.device
        self._total = step.seq_pos + step.n
        count = -(-self._total // cache.page_tokens)
        self._pages = torch.from_numpy(cache.table(step.key)[:count]).to(device)
        rows = slice(start, start + step.n)
        heads = (step.n, spec.num_heads, spec.head_dim)
        self._queries = views.q[rows].view(heads).transpose(0, 1)[None]  # [1, heads, n, head_dim]
        self._out = views.attended[rows].view(heads)
        self._group = spec.num_heads // spec.num_kv_heads
        self._attention = decoder._attention
        self._masks: dict[int | None, Tensor | None] = {}
        for window in set(self._attention.windows):
            hides = window is not None and window < self._total
            if step.seq_pos == 0 and not hides and self._attention.softcap is None:
                self._masks[window] = None
                continue
            token = torch.arange(step.seq_pos, self._total, device=device)[:, None]
            seen = torch.arange(self._total, device=device)[None, :]
            hidden = seen > token
            if window is not None:
                hidden |= seen <= token - window
            self._masks[window] = torch.zeros(hidden.shape, dtype=decoder.shard.dtype, device=device).masked_fill_(
                hidden, float("-inf")
            )

    def attend(self, index: int, kv: Sequence[Tensor]) -> None:
        mask = self._masks[self._attention.windows[index]]
        keys, values = (self._history(part) for part in kv)
        scale, softcap = self._attention.scale, self._attention.softcap
        if softcap is None:
            out = scaled_dot_product_attention(
                self._queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale
            )
        else:
            out = capped_attention(self._queries, keys, values, mask, scale, softcap)
        self._out.copy_(out[0].transpose(0, 1))

    def _history(self, part: Tensor) -> Tensor:
        """Keys or values [1, heads, tokens, head_dim], those of each kv head repeated for its query heads."""
        held = part.index_select(0, self._pages).flatten(0, 1)[: self._total]  # [tokens, kv heads, head_dim]
        return held.transpose(0, 1).repeat_interleave(self._group, dim=0)[None]


class _PlainBlock:
    """The weights of a block that has no bias and nothing but the norms before attention and MLP, and the shapes of its products at one row."""

    def __init__(self, block: Block) -> None:
        self.qkv = _weight(block.qkv)
        self.o = _weight(block.o)
        self.gate_up = _weight(block.gate_up)
        self.down = _weight(block.down)
        self.by_hidden = _shape(self.qkv)
        self.by_hidden_gated = _shape(self.gate_up, gate=True)
        self.by_heads = _shape(self.o)
        self.by_width = _shape(self.down)


class _NotPlain(Exception):
    pass


def _plain_products(shard: Shard) -> "list[_PlainBlock] | None":
    """The blocks' weights for the kernels of one row; None where the shard is of another kind."""
    spec = shard.spec
    if spec.activation != "silu" or spec.residual_scale != 1 or spec.qk_norm == "width":
        return None
    for block in shard.blocks:
        norms = (block.attention_out_norm, block.mlp_out_norm)
        if any(norm is not None for norm in norms) or block.attention_norm is None or block.mlp_norm is None:
            return None
    try:
        return [_PlainBlock(block) for block in shard.blocks]
    except _NotPlain:
        return None


def _plain_head(shard: Shard) -> tuple[Tensor, Product] | None:
    """Likewise of the head."""
    if shard.head is None:
        return None
    try:
        weight = _weight(shard.head)
        return weight, _shape(weight)
    except _NotPlain:
        return None


def _weight(linear: Linear) -> Tensor:
    """A weight without bias, of a rank the rank's own part."""
    if isinstance(linear, RowParallelLinear):
        linear = linear.product
    elif isinstance(linear, VocabularyLinear):
        linear = linear.own
    if not isinstance(linear, DenseLinear) or linear.bias is not None:
        raise _NotPlain
    return linear.weight


def _shape(weight: Tensor, *, gate: bool = False) -> Product:
    shape = gpu_kernels.shape_of(weight.shape[1])
    if shape is None or weight.shape[0] % (shape.rows * (2 if gate else 1)):
        raise _NotPlain
    return shape
