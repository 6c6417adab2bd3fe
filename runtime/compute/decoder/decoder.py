"""The entrance to a shard's forward: the checks of a turn that every device needs, and the cache
kept consistent whether the turn succeeds or fails."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from zrt.runtime.compute.decoder.shard import Shard
from zrt.runtime.compute.kv.page_pool import session_name
from zrt.runtime.compute.kv.session_cache import SessionCache
from zrt.runtime.compute.shared_rows.channel import HandedRows, Rows
from zrt.runtime.compute.turn import LOGITS, BatchStep, Picking
from zrt.runtime.errors import ZrtError
from zrt.runtime.formatting import counted


class Forward(Protocol):
    """The forward of a shard on one kind of device: cpu_forward.py, gpu_forward.py."""

    @property
    def best(self) -> Tensor | None:
        """The tokens that the device picked from the last forward's logits, None where it picked
        none: float64 [2, rows], the greatest logit of each row, and the token picked."""

    @property
    def void(self) -> Tensor | None:
        """Whether rows that were handed over to the last forward are void, None where no rows were
        handed over: int32 on the device, not all 0 if some are void."""

    def run(self, steps: Sequence[BatchStep], x: Rows, picking: Picking) -> Tensor:
        """Compute one admitted turn, and return what `Decoder.forward` returns."""

    def end(self) -> None:
        """Release whatever holds a group's operations, before the group ends."""


class Decoder:
    """A shard, its cache and its forward. Not thread-safe: one executor uses it."""

    def __init__(self, shard: Shard, cache: SessionCache, forward: Forward) -> None:
        self.shard = shard
        self.cache = cache
        self._device = forward
        self._rope_switch = shard.spec.rope_switch

    @property
    def best(self) -> Tensor | None:
        """The tokens that the device picked in the last forward (see `Forward.best`)."""
        return self._device.best

    @property
    def void(self) -> Tensor | None:
        """Whether the last forward's input is void (see `Forward.void`)."""
        return self._device.void

    def end(self) -> None:
        """Release whatever holds a group's operations, before the group ends."""
        self._device.end()

    def admit(self, step: BatchStep, x: Tensor | HandedRows) -> None:
        """Check one step and its input, and take the pages it needs; where it starts before the end
        of the session's history, go back first.

        Idempotent; on error nothing has changed. Errors: `unknown_session`; `kv_gap` when the step
        starts beyond the tokens held, or takes the session beyond `ModelSpec.rope_switch` without
        having been told so; `context_exceeded`; `kv_full`; `bad_request` for input of the wrong
        shape, dtype or vocabulary; `stage_lost` for rows that never come.
        """
        self._check_input((step,), x)
        self._take_pages(step)

    @torch.inference_mode()
    def forward(self, steps: Sequence[BatchStep], x: Rows, picking: Picking = LOGITS) -> Tensor:
        """Compute one turn: rows of `x` and of the result lie in the order of `steps`, `n` each.

        `x`: token ids int64 [rows] on the first stage, else hidden states [rows, hidden] in the
        shard's dtype; it is not written to. Returns hidden states [rows, hidden], or on the last
        stage logits float32 [steps that want logits, vocab]. The result is the caller's: no later
        forward touches it, except on a GPU, where it is valid until the next forward, and where
        `best` says what was picked from it. On error every session is as it was, except that a
        session that had to go back has gone back. Errors: those of `admit`, and `bad_request` for
        two steps of one session.
        """
        self._check_input(steps, x)
        try:
            for step in steps:
                self._take_pages(step)
            result = self._device.run(steps, x, picking)
        except BaseException:
            for step in steps:
                if step.key in self.cache:
                    self.cache.rewind(step.key, self.cache.have(step.key))
            raise
        for step in steps:
            self.cache.commit(step.key, step.seq_pos + step.n)
        return result

    def _take_pages(self, step: BatchStep) -> None:
        """Reserve the pages of one step; where it starts before the end of the session's history,
        go back first."""
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
        """Raise ZrtError bad_request or stage_lost unless the steps are possible and `x` is their
        input."""
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
            return  # values that lie on a device are not known here
        if self.shard.is_first and not 0 <= min(ids := x.tolist()) <= max(ids) < spec.vocab_size:
            raise ZrtError("bad_request", f"a token id is outside the vocabulary of {spec.vocab_size}")
