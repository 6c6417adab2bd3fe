"""A run of blocks that a worker holds: each turn of it is one Batch, and one hop."""

from collections.abc import Hashable, Sequence

import torch

from zrt.actors.lent_worker import STEP_S, LentWorker
from zrt.runtime.compute.engine import Outcome, TurnResult, Work
from zrt.runtime.compute.held_layers import Blocks
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.header import Step
from zrt.runtime.messages.layers import Batch, LayersOpened, OpenLayers, StepFaults, Tensor, WorkerError, layer_name
from zrt.runtime.tensors import from_raw, to_raw


class Numbers:
    """What the workers of one master call its sessions."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._last = 0

    def of(self, key: Hashable) -> int:
        if key not in self._numbers:
            self._last += 1
            self._numbers[key] = self._last
        return self._numbers[key]

    def pop(self, key: Hashable) -> int | None:
        """The number of a session that ends, if it had one."""
        return self._numbers.pop(key, None)


class LentRun:
    """Blocks first..last of `worker`'s. ZrtError worker_failed where it is gone, or says what it should not: its KV is lost then."""

    def __init__(self, worker: LentWorker, blocks: Blocks, numbers: Numbers) -> None:
        self.worker = worker
        self.blocks = blocks
        self._numbers = numbers

    async def turn(self, works: Sequence[Work]) -> TurnResult:
        """One hop; two where a step cannot run, which the worker finds before it runs any."""
        outcomes: dict[int, Outcome] = {}
        left = list(range(len(works)))
        for _ in range(len(works) + 1):
            if not left:
                return TurnResult([outcomes[index] for index in range(len(works))], None)
            answer = await self._send([works[index] for index in left])
            if isinstance(answer, Tensor):
                row = 0
                for index in left:
                    outcomes[index] = Outcome(works[index].seq_pos + works[index].n, first=row)
                    row += works[index].n
                output = from_raw(answer)[0]
                return TurnResult([outcomes[index] for index in range(len(works))], output)
            still = []
            for index, have, kind in zip(left, answer.have, answer.faults, strict=True):
                if kind:
                    text = f"blocks {self.blocks[0]}-{self.blocks[1]}"
                    outcomes[index] = Outcome(have, ZrtError.of(kind, text, self.worker.name))
                else:
                    still.append(index)
            left = still
        raise self.worker.failure("it finds more faults than there are steps")

    async def _send(self, works: Sequence[Work]) -> Tensor | StepFaults:
        for work in works:
            if work.opens and work.seq_pos == 0:  # a session that nobody opened
                await self.worker.ask(OpenLayers(self._numbers.of(work.key), work.opens), LayersOpened, STEP_S)
        steps = [Step(self._numbers.of(work.key), 0, work.seq_pos, work.n) for work in works]
        rows = torch.cat([work.rows for work in works])
        position = works[0].seq_pos
        layers = range(self.blocks[0], self.blocks[1] + 1)
        batch = Batch(to_raw(rows.unsqueeze(0)), [(layer_name(layer), position, layer) for layer in layers])
        worker = self.worker
        try:
            envelope = await worker.actor.ask(worker.address, batch, timeout=STEP_S, steps=steps)
        except ZrtError as error:
            raise worker.failure(error.message) from None
        answer = envelope.body
        if isinstance(answer, Tensor) and list(answer.shape) == [1, *rows.shape] and answer.dtype == batch.x.dtype:
            return answer
        if (
            isinstance(answer, StepFaults)
            and any(answer.faults)
            and len(answer.faults) == len(answer.have) == len(works)
        ):
            return answer
        said = answer.message if isinstance(answer, WorkerError) else type(answer).__name__
        raise worker.failure(f"it answered {said}")
