"""The forward of one shard over a ragged batch.

Order of casts follows transformers' models, so that float32 agrees to 1e-4 and bfloat16 to
rounding: norms in float32, cos and sin in the model's dtype, every other operation rounded to the
model's dtype. What a model lacks costs it no operation.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from zrt.runtime.compute.decoder.attention import AttentionSpec, RaggedAttention
from zrt.runtime.compute.decoder.elementwise import gate_, rms_norm
from zrt.runtime.compute.decoder.linear import Linear
from zrt.runtime.compute.decoder.rope import rotary, rotate_
from zrt.runtime.compute.decoder.shard import Block, Shard
from zrt.runtime.compute.decoder.tp_linear import NormsOverRanks
from zrt.runtime.compute.decoder.workspace import Views, Workspace
from zrt.runtime.compute.kv.page_pool import session_name
from zrt.runtime.compute.kv.session_cache import SessionCache
from zrt.runtime.compute.kv.slab_cache import SlabKVCache
from zrt.runtime.compute.shared_rows.channel import HandedRows, Rows
from zrt.runtime.compute.turn import LOGITS, BatchStep, Picking
from zrt.runtime.errors import ZrtError
from zrt.runtime.formatting import counted


class Decoder:
    """A shard and its cache. Not thread-safe: one executor uses it."""

    def __init__(self, shard: Shard, cache: SessionCache) -> None:
        self.shard = shard
        self.cache = cache
        self.best: Tensor | None = None
        """Of the last forward's logits, where a device has picked: float64 [2, rows], the greatest
        of each row, and the token picked."""
        self.void: Tensor | None = None
        """Of the last forward's input, where rows were handed over: int32 on the device, not all 0
        if some are void."""
        spec = shard.spec
        blocks = spec.blocks[shard.first : shard.last + 1]
        ropes = list(dict.fromkeys(block.rope for block in blocks if block.rope is not None))
        self._rotaries = [rotary(rope, cache.context, shard.dtype) for rope in ropes]
        self._rotary_of = [None if block.rope is None else ropes.index(block.rope) for block in blocks]
        self._rope_switch = spec.rope_switch
        windows = tuple(block.window for block in blocks)
        self._attention = AttentionSpec(windows, spec.attention_scale, spec.attention_softcap)
        self._eps = torch.tensor([spec.norm_eps])
        self._wide_norms = None if shard.group is None else NormsOverRanks(spec, shard.group, shard.device)
        self._workspace = Workspace(spec, shard.dtype, shard.device)
        self._is_silu = spec.activation == "silu"
        self._residual_scale = spec.residual_scale
        scale = spec.embedding_scale
        self._embedding_scale = float(torch.tensor(scale).to(shard.dtype)) if spec.embedding_scale_rounds else scale

    def end(self) -> None:
        """Let go of what holds a group's operations, before the group ends."""

    def admit(self, step: BatchStep, x: Tensor | HandedRows) -> None:
        """Check one step and its input, and take the pages it needs, going back first where it
        starts before the end.

        Idempotent; on error nothing has changed. Errors: `unknown_session`; `kv_gap` when it starts
        beyond the tokens held, or takes the session beyond `ModelSpec.rope_switch` without having
        been told so; `context_exceeded`; `kv_full`; `bad_request` for input of the wrong shape,
        dtype or vocabulary; `stage_lost` for rows that never come.
        """
        self._check_input((step,), x)
        self._take_pages(step)

    @torch.inference_mode()
    def forward(self, steps: Sequence[BatchStep], x: Rows, picking: Picking = LOGITS) -> Tensor:
        """Run one turn. Rows of `x` and of the result lie in the order of `steps`, `n` rows each.

        `x`: token ids int64 [rows] on the first stage, else hidden states [rows, hidden] in the
        shard's dtype; it is not written to. Returns hidden states [rows, hidden], or on the last
        stage logits float32 [steps that want logits, vocab]. The result is the caller's: no later
        forward touches it, save on a GPU, where it is good until the next, and where `best` says
        what was picked from it. On error every session is as it was, save that one that had to go
        back has gone back. Errors: those of `admit`, and `bad_request` for two steps of one
        session.
        """
        self._check_input(steps, x)
        try:
            for step in steps:
                self._take_pages(step)
            result = self._run(steps, x, picking)
        except BaseException:
            for step in steps:
                if step.key in self.cache:
                    self.cache.rewind(step.key, self.cache.have(step.key))
            raise
        for step in steps:
            self.cache.commit(step.key, step.seq_pos + step.n)
        return result

    def _run(self, steps: Sequence[BatchStep], x: Rows, picking: Picking) -> Tensor:
        assert isinstance(x, Tensor)
        shard = self.shard
        views = self._workspace.views(len(x))
        if shard.embedding is None:
            views.hidden.copy_(x)
        else:
            shard.embedding.rows(x, views.hidden)
            if self._embedding_scale != 1:
                views.hidden.mul_(self._embedding_scale)
        if shard.blocks:
            self._blocks(steps, views)
        return views.hidden.clone() if shard.head is None else self._logits(steps, views.hidden)

    def _blocks(self, steps: Sequence[BatchStep], views: Views) -> None:
        """All blocks, in place on `views.hidden`."""
        assert isinstance(self.cache, SlabKVCache)
        positions = torch.tensor(
            [position for step in steps for position in range(step.seq_pos, step.seq_pos + step.n)]
        )
        lengths = positions + 1
        if any(step.rope_length for step in steps):
            known = torch.tensor([step.rope_length for step in steps for _ in range(step.n)])
            lengths = torch.maximum(lengths, known)
        angles = [rotary.at(positions, lengths) for rotary in self._rotaries]
        attention = RaggedAttention(self._attention, self.cache, steps, positions, views)
        for index, block in enumerate(self.shard.blocks):
            which = self._rotary_of[index]
            self._block(index, block, views, None if which is None else angles[which], attention)

    def _block(
        self, index: int, block: Block, views: Views, angles: tuple[Tensor, Tensor] | None, attention: RaggedAttention
    ) -> None:
        """One block, in place on `views.hidden`. `angles` are cos and sin, None where it rotates
        nothing."""
        block.qkv.write(self._normed(block.attention_norm, views), views.qkv)
        if block.qk_norm is not None:
            rms_norm(views.qk, block.qk_norm, self._eps, views.qk, views.qk_scale)
        if block.q_norm is not None and block.k_norm is not None:
            if self._wide_norms is not None:
                self._wide_norms(views.q, block.q_norm, views.k, block.k_norm)
            else:
                rms_norm(views.q, block.q_norm, self._eps, views.q, views.scale)
                rms_norm(views.k, block.k_norm, self._eps, views.k, views.scale)
        if angles is not None:
            rotate_(views.rotated, views.rotated_halves, views.swapped, *angles)
        attention(index)
        self._add(block.o, views.attended, block.attention_out_norm, views)
        block.gate_up.write(self._normed(block.mlp_norm, views), views.gate_up)
        gate_(views.gate, views.up, self._is_silu)
        self._add(block.down, views.gate, block.mlp_out_norm, views)

    def _normed(self, norm: Tensor | None, views: Views) -> Tensor:
        """The residual stream as the next product takes it."""
        if norm is None:
            return views.hidden
        rms_norm(views.hidden, norm, self._eps, views.normed, views.scale)
        return views.normed

    def _add(self, product: Linear, x: Tensor, norm: Tensor | None, views: Views) -> None:
        """Add a product to the residual stream, normed and scaled where the model does that."""
        scale = self._residual_scale
        if norm is None and scale == 1:
            product.add(x, views.hidden)
            return
        product.write(x, views.normed)
        if norm is not None:
            rms_norm(views.normed, norm, self._eps, views.normed, views.scale)
        if scale != 1:
            views.normed.mul_(scale)
        views.hidden.add_(views.normed)

    def _logits(self, steps: Sequence[BatchStep], hidden: Tensor) -> Tensor:
        shard = self.shard
        assert shard.final_norm is not None
        assert shard.head is not None
        rows, end = [], 0
        for step in steps:
            end += step.n
            if step.logits:
                rows.append(end - 1)
        logits = torch.empty(len(rows), shard.spec.vocab_size, dtype=shard.dtype)
        if rows:
            last = hidden[rows]
            rms_norm(last, shard.final_norm, self._eps, last, torch.empty(len(rows), 1))
            shard.head.write(last, logits)
        return self._final(logits)

    def _final(self, logits: Tensor) -> Tensor:
        """Of the head's output, which is written over: divided and capped where the model has it
        so, in float32."""
        spec = self.shard.spec
        if spec.logits_divisor != 1:
            logits.div_(spec.logits_divisor)
        if spec.logits_softcap is not None:
            logits.div_(spec.logits_softcap).tanh_().mul_(spec.logits_softcap)
        return logits.float()

    def _take_pages(self, step: BatchStep) -> None:
        have = self.cache.have(step.key)
        if step.seq_pos > have:
            raise ZrtError(
                "kv_gap",
                f"session {session_name(step.key)} holds {counted(have, 'token')}; a step at {step.seq_pos} leaves a gap",
            )
        switch = self._rope_switch
        if switch is not None and max(step.seq_pos, step.rope_length) <= switch < step.seq_pos + step.n:
            raise ZrtError(
                "kv_gap",
                f"session {session_name(step.key)} outgrows {switch} tokens, where this model's rope changes: it holds 0 tokens of a longer one",
            )
        self.cache.reserve(step.key, step.seq_pos + step.n)
        if step.seq_pos < have:
            self.cache.rewind(step.key, step.seq_pos)
            self.cache.reserve(step.key, step.seq_pos + step.n)

    def _check_input(self, steps: Sequence[BatchStep], x: Rows) -> None:
        spec, rows = self.shard.spec, sum(step.n for step in steps)
        if not steps or len({step.key for step in steps}) != len(steps):
            raise ZrtError("bad_request", "a batch holds at least one step, and one step a session")
        for step in steps:
            if step.n < 1 or step.seq_pos < 0:
                raise ZrtError(
                    "bad_request",
                    f"session {session_name(step.key)}: a step of {counted(step.n, 'token')} at position {step.seq_pos}",
                )
        shape = (rows,) if self.shard.is_first else (rows, spec.hidden_size)
        dtype = torch.int64 if self.shard.is_first else self.shard.dtype
        if tuple(x.shape) != shape or x.dtype != dtype:
            raise ZrtError("bad_request", f"input is {x.dtype} {list(x.shape)}; these steps need {dtype} {list(shape)}")
        if isinstance(x, HandedRows) and x.broken:
            raise ZrtError("stage_lost", "the stage before is gone, and the rows it was to hand over with it")
        if not isinstance(x, Tensor):
            return  # a device says what they are
        if self.shard.is_first and not 0 <= min(ids := x.tolist()) <= max(ids) < spec.vocab_size:
            raise ZrtError("bad_request", f"a token id is outside the vocabulary of {spec.vocab_size}")
