"""A loaded shard at work, as the executor of a block server runs it: one thread at a time, and
every call blocks.

The executor owns the engine, so the decoder and the KV cache are never touched by two threads.
"""

import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from zrt.runtime.compute.decoder.decoder import Decoder
from zrt.runtime.compute.decoder.shard import Shard
from zrt.runtime.compute.kv.page_pool import PoolStats
from zrt.runtime.compute.kv.session_cache import SessionCache
from zrt.runtime.compute.sampler import GREEDY
from zrt.runtime.compute.shared_rows.channel import Expecting, HandedRows, Rows, joined
from zrt.runtime.compute.tensors import dtype_name
from zrt.runtime.compute.thread_tuner import ThreadTuner
from zrt.runtime.compute.threads import BESIDE_A_GPU, configure_threads
from zrt.runtime.compute.turn import AdmittedSteps, BatchStep, Passing, Picking, TurnResult, Work, pick_tokens
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.header import HandedOver
from zrt.runtime.models.architecture.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class _Unheard:
    """A turn that the device may not have finished yet: the event `over` says when it has."""

    over: torch.cuda.Event
    works: list[Work]


class Holding:
    """The weights and the KV memory of a block server, with the numbers that describe them: the
    bytes and pages in use, and the pages that are free."""

    def __init__(self, shard: Shard, cache: SessionCache) -> None:
        self.shard = shard
        self.cache = cache

    @property
    def spec(self) -> ModelSpec:
        """Return the model as this process computes it."""
        return self.shard.spec

    @property
    def dtype(self) -> str:
        """Return the model's dtype by its name on the wire."""
        return dtype_name(self.shard.dtype)

    @property
    def max_pages(self) -> int:
        """Return the number of full pages of the longest history."""
        return self.cache.context // self.cache.stats().page_tokens

    @property
    def hands_over(self) -> bool:
        """Return whether turns take rows that another process hands over, and hand over their
        own."""
        return False

    def stats(self) -> PoolStats:
        """Return the pages of KV memory by their state."""
        return self.cache.stats()

    @property
    def nbytes(self) -> int:
        """Return the bytes of weights, and of KV pages that are not free."""
        pool = self.stats()
        return self.shard.nbytes + (pool.used + pool.cached) * pool.page_bytes


class Engine(Holding):
    """The shard, KV cache and sampler of one block server."""

    def __init__(self, shard: Shard, cache: SessionCache, decoder: Decoder) -> None:
        super().__init__(shard, cache)
        self._decoder = decoder
        self._rope_lengths: dict[Hashable, int] = {}  # of open sessions
        self._unheard: _Unheard | None = None
        self._team = ThreadTuner()
        self.expecting = Expecting()
        """The rows that the device waits for when a turn is over. To be stopped before the device
        is given any other work."""

    @property
    def hands_over(self) -> bool:
        return self.shard.device.type == "cuda" and self.shard.group is None

    def open(self, key: Hashable, length: int, names: Sequence[int] = (), prompt: int = 0) -> int:
        """Make room for a session whose history has `length` tokens, in pages of these names.
        Returns how many of the tokens are held already.

        The first `prompt` tokens are what the session began with; 0: all tokens.
        """
        self._settle()
        rope_length = self.spec.rope_length(prompt or length, length)
        if key in self.cache:
            self.cache.rewind(key, length if rope_length == self._rope_lengths.get(key) else 0)
        self.cache.open(key, _salted(names, rope_length))
        self._rope_lengths[key] = rope_length
        return self.cache.have(key)

    def have(self, key: Hashable) -> int:
        """Return how many tokens of a session are held, 0 if it is unknown."""
        return self.cache.have(key) if key in self.cache else 0

    def truncate(self, key: Hashable, length: int) -> int:
        """Forget a session's tokens from `length` on. Returns how many are held then. ZrtError
        unknown_session: the session is not open."""
        self._settle()
        self.cache.rewind(key, length)
        return self.cache.have(key)

    def close(self, key: Hashable, names: Sequence[int] | None = None) -> None:
        """End a session; its pages that have a name stay as cache."""
        self._settle()
        rope_length = self._rope_lengths.pop(key, 0)
        self.cache.close(key, None if names is None else _salted(names, rope_length))

    def end(self) -> None:
        """Release the device and the group, before the group ends. After this call the engine may
        only be dropped."""
        self.expecting.stop()
        self._settle()
        self._decoder.end()

    def close_all(self) -> None:
        """End every session; full pages of known names stay as cache."""
        self.expecting.stop()
        self._settle()
        self.cache.close_all()
        self._rope_lengths.clear()

    def turn(self, works: Sequence[Work], threads: int | None = None, passing: Passing | None = None) -> TurnResult:
        """Run the steps as one forward, on at most `threads` threads from now on (fewer beside a
        GPU, or where fewer decode faster); a step that cannot run fails alone.

        Rows that are passed on, or that depend on rows handed over, need not be computed when this
        returns; `stage_lost` is the fault of a step whose rows never came.
        """
        limit = threads or torch.get_num_threads()
        if self.shard.device.type == "cuda":
            limit = min(limit, BESIDE_A_GPU)
        if not self._tries or any(work.n > 1 for work in works):  # a turn with a prompt in it is long enough
            configure_threads(limit)
            return self._turn(works, passing)
        try:
            configure_threads(self._team.size(limit, len(works)))
            started = time.perf_counter()
            result = self._turn(works, passing)
            if all(outcome.fault is None for outcome in result.outcomes):
                self._team.took(time.perf_counter() - started)
        finally:
            configure_threads(limit)
        return result

    @property
    def _tries(self) -> bool:
        """Return whether turns may run on fewer threads where that is faster. Only on a CPU in
        float32, whose products are equal bit by bit on any number of threads, and outside of
        groups, whose turns include the time of the other ranks."""
        return self.shard.device.type == "cpu" and self.shard.dtype == torch.float32 and self.shard.group is None

    def _turn(self, works: Sequence[Work], passing: Passing | None) -> TurnResult:
        """Run the steps that can run; see `turn`."""
        self._settle()
        admitted = self._admit(works)
        output, told, handed = None, None, None
        if admitted.ran:
            output, told = self._forward(works, admitted, passing)
        picked = []
        if output is not None and self.shard.is_last:
            vocab, best = self.spec.vocab_size, self._decoder.best
            picked = pick_tokens(admitted.ran, output, vocab, best, drawn=self._draws)
        if passing is not None and output is not None and not self.shard.is_last:
            handed = passing.outlet.put(output, self._decoder.void)
        output = None if handed is not None else self._to_host(output, admitted.ran)
        lost = self._lost(admitted.ran, told, handed)
        outcomes = admitted.outcomes(works, self.have, lost, picked if self.shard.is_last else None)
        return TurnResult(outcomes, output, handed)

    def _admit(self, works: Sequence[Work]) -> AdmittedSteps:
        """Take the pages of each step that can run, and note the fault of each that cannot."""
        admitted = AdmittedSteps([], [], [], {})
        for index, work in enumerate(works):
            try:
                step = self._admit_step(work)
            except ZrtError as error:
                admitted.faults[index] = error
            else:
                admitted.steps.append(step)
                admitted.ran.append(work)
                admitted.places.append(index)
        return admitted

    def _admit_step(self, work: Work) -> BatchStep:
        """Take the pages of one step, and open its session where that has not been done. ZrtError:
        why the step cannot run."""
        if work.opens and work.seq_pos == 0:
            self.cache.open(work.key)
            self._rope_lengths[work.key] = self.spec.rope_length(work.opens, work.opens)
        step = BatchStep(
            work.key,
            work.seq_pos,
            work.n,
            logits=work.asks,
            rope_length=self._rope_lengths.get(work.key, 0),
        )
        if work.key not in self.cache:
            raise ZrtError("kv_gap", f"this session is not held here, so position {work.seq_pos} leaves a gap")
        self._decoder.admit(step, work.rows)
        return step

    def _forward(
        self, works: Sequence[Work], admitted: AdmittedSteps, passing: Passing | None
    ) -> tuple[Tensor | None, Callable[[], None]]:
        """Run the admitted steps and return their output, None at a rank that does not lead. The
        callable is to be called once the device has been given all work of this turn."""
        ran = admitted.ran
        x, begun = joined([work.rows for work in ran]), None
        told = partial(self._told, ran, x)
        if passing is not None and self.shard.is_last:
            begun = partial(self._begun, passing, admitted.places)
        self.expecting.meet(x)
        output = self._decoder.forward(admitted.steps, x, self._picking(works, ran, begun, told))
        unheard = self._decoder.best is None and (self.shard.is_last or not self.shard.leads)
        if output is not None and output.is_cuda and unheard:  # a turn takes as long as its device needs
            torch.cuda.current_stream(output.device).synchronize()
        return output if self.shard.leads else None, told  # the leader has it

    def _to_host(self, output: Tensor | None, ran: Sequence[Work]) -> Tensor | None:
        """Copy the output that is sent on to CPU memory: in the executor, since the sender must not
        wait for the device."""
        if output is not None and output.is_cuda and (not self.shard.is_last or any(work.logits for work in ran)):
            return output.cpu()
        return output

    def _lost(self, ran: Sequence[Work], told: Callable[[], None] | None, handed: HandedOver | None) -> set[int]:
        """Return the ids of the works whose rows never came. Where rows are handed on, nothing
        waits for the device, and lost rows show in a later turn."""
        waits = self._unheard is None and any(isinstance(work.rows, HandedRows) for work in ran)
        if told is not None and (waits or handed is not None):
            told()
        return set() if handed is not None else {id(work) for work in self._settle()}

    def _begun(self, passing: Passing, ran: list[int], tokens: Tensor) -> None:
        """Pass on where the tokens that follow these works of the turn will lie."""
        handed = passing.outlet.put(tokens, self._decoder.void)
        if handed is not None:
            passing.begun(handed, ran)

    def _told(self, ran: list[Work], x: Rows) -> None:
        """Note that the device has been given all its work of this turn."""
        over = torch.cuda.Event()
        over.record()
        self._unheard = _Unheard(over, ran)
        if all(work.n == 1 for work in ran):
            self.expecting.after(x)

    def _picking(
        self,
        works: Sequence[Work],
        ran: Sequence[Work],
        begun: Callable[[Tensor], None] | None,
        told: Callable[[], None],
    ) -> Picking:
        """Return what is made of the logits: a GPU picks as many of the tokens as it can. All ranks
        of a group must return the same."""
        group = self.shard.group is not None
        alone = all(work.takes_best if group else work.takes_pick for work in works)
        knobs: list[tuple[float, ...]] = []
        if self._draws and self.shard.leads:
            rows = [work for work in ran if work.asks]
            knobs = [GREEDY if work.sampler is None else work.sampler.knobs(work.seq_pos + work.n) for work in rows]
        if all(knob == GREEDY for knob in knobs):
            knobs = []
        rings = alone and begun is not None
        return Picking(alone, knobs, begun if rings else None, told if rings else None)

    @property
    def _draws(self) -> bool:
        """Return whether the device picks the tokens of plain samplers."""
        return self.shard.is_last and self.shard.device.type == "cuda"

    def _settle(self) -> list[Work]:
        """Wait until the device has finished the last turn. Returns the works whose rows never came
        and whose sessions have therefore gone back."""
        unheard, self._unheard = self._unheard, None
        if unheard is None:
            return []
        unheard.over.synchronize()
        lost = [work for work in unheard.works if isinstance(work.rows, HandedRows) and work.rows.void]
        for work in lost:
            if work.key in self.cache:
                self.cache.rewind(work.key, work.seq_pos)
        return lost


def given_back(engines: Iterable[Holding], device: str) -> int:
    """Return the bytes of a device that are free once these engines, all that this process has
    there, are dropped. A GPU's KV pools count in full, the CPU's as far as they have been written
    to."""
    place = torch.device(device)
    return torch.cuda.memory_reserved(place) if place.type == "cuda" else sum(engine.nbytes for engine in engines)


def _salted(names: Sequence[int], rope_length: int) -> list[int]:
    """Return the names of pages made to depend on the rope length: equal tokens rotated for another
    length get other names."""
    salt = rope_length * 0x9E3779B97F4A7C15 % 2**64
    return [name ^ salt for name in names]
