"""A loaded shard at work: what the executor of a block server runs. One thread at a time; every
call blocks.

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
from zrt.runtime.compute.sampler import GREEDY, Picked, pick
from zrt.runtime.compute.shared_rows.channel import Expecting, HandedRows, Rows, joined
from zrt.runtime.compute.tensors import dtype_name
from zrt.runtime.compute.thread_tuner import ThreadTuner
from zrt.runtime.compute.threads import BESIDE_A_GPU, configure_threads
from zrt.runtime.compute.turn import BatchStep, Outcome, Passing, Picking, TurnResult, Work
from zrt.runtime.errors import ZrtError
from zrt.runtime.models.architecture.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class _Unheard:
    """A turn that the device may not have come to yet: `over` once it has."""

    over: torch.cuda.Event
    works: list[Work]


class Holding:
    """What a block server holds, for those that ask what it takes and gives, and what there is room
    for."""

    def __init__(self, shard: Shard, cache: SessionCache) -> None:
        self.shard = shard
        self.cache = cache

    @property
    def spec(self) -> ModelSpec:
        return self.shard.spec

    @property
    def dtype(self) -> str:
        """The model's dtype by its name on the wire."""
        return dtype_name(self.shard.dtype)

    @property
    def max_pages(self) -> int:
        """Full pages of the longest history."""
        return self.cache.context // self.cache.stats().page_tokens

    @property
    def hands_over(self) -> bool:
        """Whether turns take rows that others hand over, and hand theirs over."""
        return False

    def stats(self) -> PoolStats:
        return self.cache.stats()

    @property
    def nbytes(self) -> int:
        """Weights and KV pages that are not free."""
        pool = self.stats()
        return self.shard.nbytes + (pool.used + pool.cached) * pool.page_bytes


class Engine(Holding):
    """Shard, KV cache and sampler of one block server."""

    def __init__(self, shard: Shard, cache: SessionCache, decoder: Decoder) -> None:
        super().__init__(shard, cache)
        self._decoder = decoder
        self._rope_lengths: dict[Hashable, int] = {}  # of open sessions
        self._unheard: _Unheard | None = None
        self._team = ThreadTuner()
        self.expecting = Expecting()
        """What the device waits for when a turn is over. Whatever else has it do something is to
        stop that first."""

    @property
    def hands_over(self) -> bool:
        return self.shard.device.type == "cuda" and self.shard.group is None

    def open(self, key: Hashable, length: int, names: Sequence[int] = (), prompt: int = 0) -> int:
        """Make room for a session whose history has `length` tokens, in pages of these names; how
        many of them are held already.

        Its first `prompt` tokens are what it began with; 0: all of them.
        """
        self._settle()
        rope_length = self.spec.rope_length(prompt or length, length)
        if key in self.cache:
            self.cache.rewind(key, length if rope_length == self._rope_lengths.get(key) else 0)
        self.cache.open(key, _salted(names, rope_length))
        self._rope_lengths[key] = rope_length
        return self.cache.have(key)

    def have(self, key: Hashable) -> int:
        """Tokens held of a session, 0 if it is unknown."""
        return self.cache.have(key) if key in self.cache else 0

    def truncate(self, key: Hashable, length: int) -> int:
        """Hold at most so many tokens of a session; how many those are. `unknown_session` if it is
        not open."""
        self._settle()
        self.cache.rewind(key, length)
        return self.cache.have(key)

    def close(self, key: Hashable, names: Sequence[int] | None = None) -> None:
        """End a session; what has a name stays as cache."""
        self._settle()
        rope_length = self._rope_lengths.pop(key, 0)
        self.cache.close(key, None if names is None else _salted(names, rope_length))

    def end(self) -> None:
        """Before the group ends that it computes with. Only to be dropped afterwards."""
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
        """Run the steps as one forward, on at most so many threads from now on (fewer beside a GPU,
        or where fewer decode faster); a step that cannot run fails alone.

        What is passed on, or begins with rows handed over, need not be computed when this returns;
        `stage_lost` is the fault of a step whose rows never came.
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
        """Whether turns may go on fewer threads where that is faster. In float32 products are the
        same bit by bit on any number; in a group, others' time is in ours."""
        return self.shard.device.type == "cpu" and self.shard.dtype == torch.float32 and self.shard.group is None

    def _turn(self, works: Sequence[Work], passing: Passing | None) -> TurnResult:
        self._settle()
        steps: list[BatchStep] = []
        faults: dict[int, ZrtError] = {}
        for index, work in enumerate(works):
            try:
                if work.opens and work.seq_pos == 0:
                    self.cache.open(work.key)
                    self._rope_lengths[work.key] = self.spec.rope_length(work.opens, work.opens)
                step = BatchStep(
                    work.key,
                    work.seq_pos,
                    work.n,
                    logits=work.sampler is not None or work.logits,
                    rope_length=self._rope_lengths.get(work.key, 0),
                )
                if work.key not in self.cache:
                    raise ZrtError("kv_gap", f"this session is not held here, so position {work.seq_pos} leaves a gap")
                self._decoder.admit(step, work.rows)
            except ZrtError as error:
                faults[index] = error
            else:
                steps.append(step)
        ran = [work for index, work in enumerate(works) if index not in faults]
        output, told = None, None
        if ran:
            x, begun = joined([work.rows for work in ran]), None
            told = partial(self._told, ran, x)
            if passing is not None and self.shard.is_last:
                begun = partial(self._begun, passing, [index for index in range(len(works)) if index not in faults])
            self.expecting.meet(x)
            output = self._decoder.forward(steps, x, self._picking(works, ran, begun, told))
        unheard = self._decoder.best is None and (self.shard.is_last or not self.shard.leads)
        if output is not None and output.is_cuda and unheard:  # a turn takes as long as its device needs
            torch.cuda.current_stream(output.device).synchronize()
        if not self.shard.leads:
            output = None  # the leader has it
        picked = iter(self._pick(ran, output))
        handed = None
        if passing is not None and output is not None and not self.shard.is_last:
            handed = passing.outlet.put(output, self._decoder.void)
        if handed is not None:
            output = None
        if output is not None and output.is_cuda and (not self.shard.is_last or any(work.logits for work in ran)):
            output = output.cpu()  # here, since whoever sends it must not wait for the device
        waits = self._unheard is None and any(isinstance(work.rows, HandedRows) for work in ran)
        if told is not None and (waits or handed is not None):
            told()
        lost = set() if handed is not None else {id(work) for work in self._settle()}
        outcomes = []
        row = 0
        for index, work in enumerate(works):
            if index in faults:
                outcomes.append(Outcome(self.have(work.key), faults[index]))
                continue
            rows = (1 if work.sampler or work.logits else 0) if self.shard.is_last else work.n
            token = next(picked) if work.sampler and self.shard.is_last else None
            if id(work) in lost:
                outcomes.append(Outcome(self.have(work.key), _never_came()))
            else:
                outcomes.append(Outcome(work.seq_pos + work.n, None, row if rows else -1, token))
            row += rows
        return TurnResult(outcomes, output, handed)

    def _begun(self, passing: Passing, ran: list[int], tokens: Tensor) -> None:
        handed = passing.outlet.put(tokens, self._decoder.void)
        if handed is not None:
            passing.begun(handed, ran)

    def _told(self, ran: list[Work], x: Rows) -> None:
        """The device knows all that it has to do for this turn."""
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
        """What is made of the logits: on a GPU as much as it can pick itself. All ranks of a group
        must say the same here."""
        group = self.shard.group is not None
        alone = all(work.takes_best if group else work.takes_pick for work in works)
        knobs: list[tuple[float, ...]] = []
        if self._draws and self.shard.leads:
            rows = [work for work in ran if work.sampler or work.logits]
            knobs = [GREEDY if work.sampler is None else work.sampler.knobs(work.seq_pos + work.n) for work in rows]
        if all(knob == GREEDY for knob in knobs):
            knobs = []
        rings = alone and begun is not None
        return Picking(alone, knobs, begun if rings else None, told if rings else None)

    @property
    def _draws(self) -> bool:
        """Whether the device picks the tokens of plain samplers."""
        return self.shard.is_last and self.shard.device.type == "cuda"

    def _settle(self) -> list[Work]:
        """Wait until the device has done the last turn; its works whose rows never came, and whose
        sessions have gone back therefore."""
        unheard, self._unheard = self._unheard, None
        if unheard is None:
            return []
        unheard.over.synchronize()
        lost = [work for work in unheard.works if isinstance(work.rows, HandedRows) and work.rows.void]
        for work in lost:
            if work.key in self.cache:
                self.cache.rewind(work.key, work.seq_pos)
        return lost

    def _pick(self, ran: Sequence[Work], output: Tensor | None) -> list[Picked | ZrtError]:
        if not self.shard.is_last or output is None:
            return []
        asking = [work for work in ran if work.sampler or work.logits]
        rows = [row for row, work in enumerate(asking) if work.sampler]
        if not rows:
            return []
        samplers = [work.sampler for work in asking if work.sampler]
        positions = [work.seq_pos + work.n for work in asking if work.sampler]
        logits = output[:, : self.spec.vocab_size]  # a head may be padded
        if len(rows) == len(asking):
            return pick(logits, samplers, positions, self._decoder.best, drawn=self._draws)
        return pick(logits[rows], samplers, positions)


def given_back(engines: Iterable[Holding], device: str) -> int:
    """Bytes of a device that are free once these engines, all that this process has there, are
    dropped. A GPU's KV pools are taken whole; those of the CPU as far as they have been written
    to."""
    place = torch.device(device)
    return torch.cuda.memory_reserved(place) if place.type == "cuda" else sum(engine.nbytes for engine in engines)


def _never_came() -> ZrtError:
    return ZrtError("stage_lost", "the stage before is gone, and the rows it was to hand over with it")


def _salted(names: Sequence[int], rope_length: int) -> list[int]:
    """Names of pages, by what they hold: equal tokens rotated by another length are other
    numbers."""
    salt = rope_length * 0x9E3779B97F4A7C15 % 2**64
    return [name ^ salt for name in names]
