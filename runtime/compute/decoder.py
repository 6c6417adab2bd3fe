"""The forward of one shard over a ragged batch.

Order of casts follows transformers' models, so that float32 agrees to 1e-4 and bfloat16 to rounding: norms in float32, cos and sin in the
model's dtype, every other operation rounded to the model's dtype.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from zrt.runtime.compute.attention import RaggedAttention
from zrt.runtime.compute.batch import Step
from zrt.runtime.compute.kv_cache import KVCache
from zrt.runtime.compute.rope import RotaryTable
from zrt.runtime.compute.shard import Block, Shard
from zrt.runtime.errors import ZrtError


class Decoder:
    """A shard and its cache. Not thread-safe: one lane uses it."""

    def __init__(self, shard: Shard, cache: KVCache) -> None:
        if shard.device.type != "cpu":
            raise ZrtError("unsupported", f"device {shard.device} is not supported; cpu is")
        self.shard = shard
        self.cache = cache
        self._rope = RotaryTable(shard.spec, cache.context, shard.dtype)

    def admit(self, step: Step) -> None:
        """Take the pages a step needs, going back first where it starts before the end. Idempotent; on error nothing has changed.

        Errors: `unknown_session`; `kv_gap` when it starts beyond the tokens held; `context_exceeded`; `kv_full`; `bad_request`.
        """
        self._check(step)
        have = self.cache.have(step.key)
        self.cache.reserve(step.key, step.seq_pos + step.n)
        if step.seq_pos < have:
            self.cache.rewind(step.key, step.seq_pos)
            self.cache.reserve(step.key, step.seq_pos + step.n)

    @torch.inference_mode()
    def forward(self, steps: Sequence[Step], x: Tensor) -> Tensor:
        """Run one turn. Rows of `x` and of the result lie in the order of `steps`, `n` rows each.

        `x`: token ids int64 [rows] on the first stage, else hidden states [rows, hidden] in the shard's dtype; it is not written to.
        Returns hidden states [rows, hidden], or on the last stage logits float32 [steps that want logits, vocab]. The result is the
        caller's: no later forward touches it. On error every session is as it was, save that one that had to go back has gone back.
        Errors: those of `admit`, and `bad_request` for input of the wrong shape, dtype or vocabulary, or two steps of one session.
        """
        self._check_input(steps, x)
        for step in steps:
            self._check(step)
        try:
            for step in steps:
                self.admit(step)
            result = self._run(steps, x)
        except BaseException:
            for step in steps:
                self.cache.rewind(step.key, self.cache.have(step.key))
            raise
        for step in steps:
            self.cache.commit(step.key, step.seq_pos + step.n)
        return result

    def _run(self, steps: Sequence[Step], x: Tensor) -> Tensor:
        shard = self.shard
        positions = torch.tensor([position for step in steps for position in range(step.seq_pos, step.seq_pos + step.n)])
        cos, sin = self._rope.at(positions)
        attention = RaggedAttention(shard.spec, self.cache, steps, positions)
        hidden = x.clone() if shard.embedding is None else functional.embedding(x, shard.embedding)
        for index, block in enumerate(shard.blocks):
            self._block(index, block, hidden, cos, sin, attention)
        return hidden if shard.head is None else self._logits(steps, hidden)

    def _block(self, index: int, block: Block, hidden: Tensor, cos: Tensor, sin: Tensor, attention: RaggedAttention) -> None:
        """One block, in place on hidden [rows, hidden]."""
        spec = self.shard.spec
        qkv = block.qkv(rms_norm(hidden, block.attention_norm, spec.norm_eps))
        heads = qkv.unflatten(1, (-1, spec.head_dim))
        qk = heads[:, : spec.num_heads + spec.num_kv_heads]
        if block.qk_norm is not None:
            qk.copy_(rms_norm(qk, block.qk_norm, spec.norm_eps))
        self._rope.rotate_(qk, cos, sin)
        hidden.add_(block.o(attention(index, heads)))
        gate, up = block.gate_up(rms_norm(hidden, block.mlp_norm, spec.norm_eps)).chunk(2, dim=1)
        hidden.add_(block.down(functional.silu(gate, inplace=True).mul_(up)))

    def _logits(self, steps: Sequence[Step], hidden: Tensor) -> Tensor:
        shard = self.shard
        assert shard.final_norm is not None
        assert shard.head is not None
        rows, end = [], 0
        for step in steps:
            end += step.n
            if step.logits:
                rows.append(end - 1)
        if not rows:
            return torch.empty(0, shard.spec.vocab_size)
        last = hidden if len(rows) == len(hidden) else hidden[rows]
        return shard.head(rms_norm(last, shard.final_norm, shard.spec.norm_eps)).float()

    def _check(self, step: Step) -> None:
        if step.n < 1 or step.seq_pos < 0:
            raise ZrtError("bad_request", f"session {step.key!r}: a step of {step.n} tokens at position {step.seq_pos}")
        have = self.cache.have(step.key)
        if step.seq_pos > have:
            raise ZrtError("kv_gap", f"session {step.key!r} holds {have} tokens; a step at {step.seq_pos} leaves a gap")

    def _check_input(self, steps: Sequence[Step], x: Tensor) -> None:
        spec, rows = self.shard.spec, sum(step.n for step in steps)
        if not steps or len({step.key for step in steps}) != len(steps):
            raise ZrtError("bad_request", "a batch holds at least one step, and one step a session")
        shape = (rows,) if self.shard.is_first else (rows, spec.hidden_size)
        dtype = torch.int64 if self.shard.is_first else self.shard.dtype
        if tuple(x.shape) != shape or x.dtype != dtype:
            raise ZrtError("bad_request", f"input is {x.dtype} {list(x.shape)}; these steps need {dtype} {list(shape)}")
        if self.shard.is_first and (int(x.min()) < 0 or int(x.max()) >= spec.vocab_size):
            raise ZrtError("bad_request", f"a token id is outside the vocabulary of {spec.vocab_size}")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm over the last dimension, in float32, rounded to the dtype of `x` before the weight is applied."""
    if x.dtype == torch.float32:
        return functional.rms_norm(x, x.shape[-1:], eps=eps).mul_(weight)
    return functional.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype).mul_(weight)
