"""A block server as master: a stage whose runs of blocks are computed in turn, some in its own
executor, some by layer workers.

Each run that is lent is one Batch with the hidden states of the turn, and one hop. A step that a
run cannot take is left out of the runs behind it; the runs before it go back when the step comes
again (the step rule). A worker that is gone, or says what it should not, ends the whole: its KV is
lost, so the layers are given out anew (lending.py), and the sessions are replayed.

Embedding, norm and head stay here. Where the blocks beside them are lent they are runs of their
own, without blocks.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace

import torch

from zrt.actors.block_server.backend import Progress
from zrt.actors.block_server.layer_lending.layer_setup import LentModel, set_up
from zrt.actors.block_server.layer_lending.lent_run import LentRun, Numbers
from zrt.actors.block_server.layer_lending.lent_worker import STEP_S, LentWorker
from zrt.actors.block_server.layer_lending.own_runs import OwnRun, held_table, read_bytes, read_run, stage_holding
from zrt.runtime.actor.executor import ComputeExecutor
from zrt.runtime.actor.member import Member
from zrt.runtime.actor.tasks import together
from zrt.runtime.compute.engine import Engine, Holding
from zrt.runtime.compute.turn import Outcome, TurnResult, Work
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.control import Address
from zrt.runtime.messages.layers import CloseLayers, LayersClosed, LayersOpened, OpenLayers
from zrt.runtime.messages.members import Lend

log = logging.getLogger(__name__)


class LendingBackend:
    """The backend of a stage that lends blocks; made by `load`. `lost(error)` is called once, when
    the backend breaks by itself: then another is needed.

    `own` are its engines, which the next backend may go on with.
    """

    def __init__(self, actor: Member, executor: ComputeExecutor, lost: Callable[[ZrtError], None]) -> None:
        self.engine: Holding
        self.broken: ZrtError | None = None
        self.own: dict[OwnRun, Engine] = {}
        self._actor = actor
        self._executor = executor
        self._lost = lost
        self._runs: list[Engine | LentRun] = []
        self._workers: dict[str, LentWorker] = {}
        self._turns = asyncio.Lock()
        self._numbers = Numbers()
        self._hopped_ns = 0

    # ---- life ------------------------------------------------------------------------------------

    async def load(
        self,
        model: LentModel,
        runs: "Sequence[OwnRun | Lend]",
        workers: Mapping[str, LentWorker],
        device: str,
        kept: Mapping[OwnRun, Engine],
        progress: Progress,
        cancelled: Callable[[], bool],
    ) -> None:
        """Give each worker its layers and load the stage's own runs, but for those that are `kept`.

        ZrtError: as load_engine; a worker's own; `worker_failed`.
        """
        lent: dict[str, list[int]] = {}
        for run in runs:
            if isinstance(run, Lend):
                lent.setdefault(run.worker, []).extend(range(run.first, run.last + 1))
        self._workers = {name: workers[name] for name in lent}
        ours = [run for run in runs if isinstance(run, OwnRun)]
        sizes = dict(zip(ours, read_bytes(model, ours, device), strict=True))
        total, done = sum(sizes.values()), 0

        def tick(now: int, _: int = 0) -> None:
            progress(done + now, total)

        await together(*(set_up(self._workers[name], model, layers, lambda: tick(0)) for name, layers in lent.items()))
        for run in runs:
            if isinstance(run, Lend):
                self._runs.append(LentRun(self._workers[run.worker], (run.first, run.last), self._numbers))
                continue
            engine = kept.get(run)
            if engine is None:
                table = held_table([*kept.values(), *self.own.values()], run.device(device))
                engine = await self._executor.run(read_run, model, run, device, table, tick, cancelled)
            self.own[run] = engine
            self._runs.append(engine)
            done += sizes[run]
            tick(0)
        own = list(self.own.values())
        self.engine = stage_holding(own[0], own[-1])

    def worker_lost(self, address: Address) -> None:
        """Break, if a worker's process that is gone has some of the blocks."""
        if any(worker.address == address for worker in self._workers.values()):
            self._fail(ZrtError("worker_failed", f"the layer worker {address.name} is gone", address.name))

    def end(self) -> None:
        """Take no more turns; `lost` is not called."""
        if self.broken is None:
            self.broken = ZrtError("cancelled", "these layers are not lent any more", self._actor.name)
        self._forget()

    def _fail(self, error: ZrtError) -> None:
        if self.broken is not None:
            return
        self.broken = error
        ending = self._actor.goes_down or self._actor.ended.is_set()  # and all others with it
        level = logging.INFO if ending else logging.WARNING
        log.log(level, "%s: %s", self._actor.name, error)
        self._forget()
        self._lost(error)

    def _forget(self) -> None:
        """Let nobody wait for a worker's answer until the deadline."""
        for worker in self._workers.values():
            self._actor.forget(worker.address)

    def _check(self) -> None:
        if self.broken is not None:
            raise self.broken.anew()

    # ---- work ------------------------------------------------------------------------------------

    async def open(self, key: Hashable, length: int, names: Sequence[int], prompt: int) -> int:
        """Open a session in every run, as Engine.open; return what all of them hold."""
        async with self._turns:
            have = []
            for engine in self.own.values():
                self._check()  # each time: what is broken meanwhile has had its engines emptied for the next
                have.append(await self._executor.run(engine.open, key, length, names, prompt))
            self._check()
            message = OpenLayers(self._numbers.of(key), length, prompt, list(names))
            try:
                asked = (worker.ask(message, LayersOpened, STEP_S) for worker in self._workers.values())
                return min(have + [answer.have for answer in await together(*asked)])
            except ZrtError as error:
                self._judge(error)
                raise

    async def close(self, key: Hashable, names: Sequence[int] | None) -> None:
        """Close a session in every run, as Engine.close."""
        async with self._turns:
            number = self._numbers.pop(key)
            for engine in self.own.values():
                await self._executor.run(engine.close, key, names)
            if number is None or self.broken is not None:
                return
            message = CloseLayers(number, None if names is None else list(names))
            asked = (worker.ask(message, LayersClosed, STEP_S) for worker in self._workers.values())
            for error in await asyncio.gather(*asked, return_exceptions=True):
                if isinstance(error, ZrtError):
                    self._fail(ZrtError("worker_failed", f"a session could not be closed: {error}", error.where))

    async def turn(self, works: Sequence[Work], threads: int) -> TurnResult:
        """Run the works through every run, as Engine.turn. ZrtError worker_failed."""
        async with self._turns:
            self._hopped_ns = 0
            outcomes: list[Outcome | None] = [None] * len(works)
            going = list(range(len(works)))
            part = list(works)
            output = None
            for run in self._runs:
                self._check()
                if run is not self._runs[-1]:  # what is picked is picked at the end
                    part = [replace(work, sampler=None, logits=False) for work in part]
                if isinstance(run, Engine):
                    result = await self._executor.run(run.turn, part, threads)
                else:
                    result = await self._hop(run, part)
                output = result.output
                for index, outcome in zip(going, result.outcomes, strict=True):
                    outcomes[index] = outcome
                ran = [index for index, outcome in zip(going, result.outcomes, strict=True) if outcome.fault is None]
                if not ran:
                    output = None
                    break
                if run is not self._runs[-1]:
                    assert output is not None
                    rows = [output] if len(ran) == 1 else torch.split(output, [works[index].n for index in ran])
                    part = [replace(works[index], rows=own) for index, own in zip(ran, rows, strict=True)]
                going = ran
            return TurnResult(
                [outcome for outcome in outcomes if outcome is not None], output, lent_us=self._hopped_ns // 1000
            )

    async def _hop(self, run: LentRun, works: Sequence[Work]) -> TurnResult:
        started = time.perf_counter_ns()
        try:
            return await run.turn(works)
        except ZrtError as error:
            self._judge(error)
            raise
        finally:
            self._hopped_ns += time.perf_counter_ns() - started

    def _judge(self, error: ZrtError) -> None:
        """Break where a worker failed; any other error is the session's alone."""
        if error.kind == "worker_failed":
            self._fail(error)
