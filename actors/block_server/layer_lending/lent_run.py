"""A run of blocks that a worker holds: each turn of it is one Batch, and one hop."""

import time
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from zrt.actors.block_server.layer_lending.lent_worker import STEP_S, LentWorker
from zrt.runtime.compute.layer_engine import Blocks
from zrt.runtime.compute.tensors import Rows, rows_to_raw
from zrt.runtime.compute.turn import Outcome, TurnResult, Work
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.header import Header, Step
from zrt.runtime.messages.layers import Batch, LayersOpened, OpenLayers, StepFaults, WorkerError, layer_name
from zrt.runtime.messages.layers import Tensor as WireTensor


class Numbers:
    """The numbers by which the workers of one master know its sessions."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._last = 0

    def of(self, key: Hashable) -> int:
        """Return a session's number, a new one where it has none."""
        if key not in self._numbers:
            self._last += 1
            self._numbers[key] = self._last
        return self._numbers[key]

    def pop(self, key: Hashable) -> int | None:
        """Forget the number of a session that ends, and return it, if there was one."""
        return self._numbers.pop(key, None)


class LentRun:
    """A run of blocks, first..last, that `worker` holds. ZrtError worker_failed where the worker is
    gone, or says what it should not: its KV is lost then."""

    def __init__(self, worker: LentWorker, blocks: Blocks, numbers: Numbers) -> None:
        self.worker = worker
        self.blocks = blocks
        self._numbers = numbers
        self._rows = Rows()
        self._layers = [(layer_name(layer), layer) for layer in range(blocks[0], blocks[1] + 1)]

    async def turn(self, works: Sequence[Work]) -> TurnResult:
        """Run a turn in one hop; in two where a step cannot run, which the worker finds before it
        runs any."""
        answer = await self._send(works)
        faulty: dict[int, Outcome] = {}
        left = list(range(len(works)))
        while isinstance(answer, StepFaults):
            for index, have, kind in zip(left, answer.have, answer.faults, strict=True):
                if kind:
                    text = f"blocks {self.blocks[0]}-{self.blocks[1]}"
                    faulty[index] = Outcome(have, ZrtError.of(kind, text, self.worker.name))
            left = [index for index in left if index not in faulty]
            if not left:
                return TurnResult([faulty[index] for index in range(len(works))], None)
            answer = await self._send([works[index] for index in left])
        outcomes, row = [], 0
        for index, work in enumerate(works):
            if index in faulty:
                outcomes.append(faulty[index])
            else:
                outcomes.append(Outcome(work.seq_pos + work.n, first=row))
                row += work.n
        return TurnResult(outcomes, answer)

    async def _send(self, works: Sequence[Work]) -> Tensor | StepFaults:
        """Make one hop; return hidden states [Σn, hidden], or which steps cannot run (at least one,
        so each answer of that kind leaves fewer)."""
        for work in works:
            if work.opens and work.seq_pos == 0:  # a session that nobody opened
                await self.worker.ask(OpenLayers(self._numbers.of(work.key), work.opens), LayersOpened, STEP_S)
        worker, started = self.worker, time.perf_counter_ns()
        steps = [Step(self._numbers.of(work.key), 0, work.seq_pos, work.n) for work in works]
        rows = works[0].held if len(works) == 1 else torch.cat([work.held for work in works])
        position = works[0].seq_pos
        batch = Batch(rows_to_raw(rows), [(name, position, layer) for name, layer in self._layers])
        try:
            envelope = await worker.actor.ask(worker.address, batch, timeout=STEP_S, steps=steps)
        except ZrtError as error:
            raise worker.failure(error.message) from None
        answer = envelope.body
        if isinstance(answer, WireTensor) and answer.shape == batch.x.shape and answer.dtype == batch.x.dtype:
            output = self._rows.take(answer)
            worker.hops.add((time.perf_counter_ns() - started) // 1000, _computed_us(envelope.header))
            return output
        if (
            isinstance(answer, StepFaults)
            and any(answer.faults)
            and len(answer.faults) == len(answer.have) == len(works)
        ):
            return answer
        said = answer.message if isinstance(answer, WorkerError) else type(answer).__name__
        raise worker.failure(f"it answered {said}")


def _computed_us(header: Header) -> int:
    """Return the microseconds that a worker says its layers took."""
    return sum(time.compute for step in header.steps for time in step.times)
