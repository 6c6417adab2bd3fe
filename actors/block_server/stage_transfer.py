"""The transfer of a turn's results to the stage that takes them next: as bytes, or by word of rows
that lie in memory for that stage (memory_channels.py)."""

from array import array
from collections.abc import Callable, Sequence

import torch
from msgspec.structs import replace
from torch import Tensor

from zrt.actors.block_server.memory_channels import MemoryChannels
from zrt.runtime.actor.member import Member
from zrt.runtime.compute.engine import Holding
from zrt.runtime.compute.tensors import as_dtype, from_bytes, to_bytes
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.control import Address
from zrt.runtime.messages.header import HandedOver, Step
from zrt.runtime.messages.inference import InferenceRequest, PayloadType
from zrt.runtime.messages.stats import Load

SEND_DEADLINE_S = 30.0  # how long a full outbox to the next stage may stay full


class StageTransfer:
    """The way to the next stage: all that is bound for one stage travels as one message. `failed`
    hears of steps that cannot be sent; `tally` counts the messages with rows in memory."""

    def __init__(
        self,
        actor: Member,
        memory_channels: MemoryChannels,
        tally: Load,
        failed: Callable[[Sequence[Step], ZrtError], None],
    ) -> None:
        self._actor = actor
        self._memory_channels = memory_channels
        self._tally = tally
        self._failed = failed

    def tokens(self, address: Address, tokens: Sequence[tuple[Step, int]]) -> None:
        """Send the ring's next steps to the first stage."""
        ids = array("I", [token for _, token in tokens])
        data = memoryview(ids).cast("B")
        self._send(address, [step for step, _ in tokens], "token_ids", [len(tokens)], data, "uint32")

    def begun_tokens(self, address: Address, begun: Sequence[tuple[Step, int]], handed: HandedOver) -> None:
        """Send the ring's next steps, whose tokens are still being picked: each with its row in
        memory."""
        self._hand_over(address, begun, handed, "token_ids", [len(begun)], "uint32")

    async def hidden(self, address: Address, delivery: Sequence[tuple[Step, Tensor]], dtype: str) -> None:
        """Send each step's hidden states [n, hidden] as bytes."""
        steps = [step for step, _ in delivery]
        rows = delivery[0][1] if len(delivery) == 1 else torch.cat([rows for _, rows in delivery])
        data = to_bytes(rows, dtype)
        if await self._room(address, steps):
            self._send(address, steps, "hidden_states", [1, *rows.shape], data, dtype)

    async def handed_hidden(
        self, address: Address, delivery: Sequence[tuple[Step, int]], handed: HandedOver, width: int, dtype: str
    ) -> None:
        """Send word of each step's hidden states, rows of that width in memory: each step with its
        first row there."""
        if await self._room(address, [step for step, _ in delivery]):
            rows = sum(step.n for step, _ in delivery)
            self._hand_over(address, delivery, handed, "hidden_states", [1, rows, width], dtype)
        else:
            self._memory_channels.take_back(handed)

    def _hand_over(
        self,
        address: Address,
        going: Sequence[tuple[Step, int]],
        handed: HandedOver,
        payload: PayloadType,
        shape: list[int],
        dtype: str,
    ) -> None:
        said = replace(handed, rows=[row for _, row in going])
        if going and self._send(address, [step for step, _ in going], payload, shape, memoryview(b""), dtype, said):
            self._tally.handed += 1
        else:
            self._memory_channels.take_back(handed)

    async def _room(self, address: Address, steps: Sequence[Step]) -> bool:
        """Wait until the next stage takes more; return whether it does. If not, the steps have
        failed."""
        try:
            await self._actor.room(address, timeout=SEND_DEADLINE_S)
        except ZrtError as error:
            self._failed(steps, error)
            return False
        return True

    def _send(
        self,
        address: Address,
        steps: list[Step],
        payload: PayloadType,
        shape: list[int],
        data: memoryview,
        dtype: str,
        handed: HandedOver | None = None,
    ) -> bool:
        """Send one message; return whether it was sent. If not, the steps have failed."""
        request = InferenceRequest(steps[0].session, steps[0].seq_pos, payload, shape, data)
        near = "" if handed is not None else self._memory_channels.offer(address)
        try:
            self._actor.tell(address, request, steps=steps, dtype=dtype, near=near, handed=handed)
        except ZrtError as error:
            self._failed(steps, error)
            return False
        return True


def rows_of(engine: Holding, request: InferenceRequest, dtype: str) -> Tensor:
    """Return a request's rows: token ids int64 [n] on the first stage, hidden states [n, hidden] in
    the model's dtype elsewhere; `dtype` is the wire's.

    ZrtError bad_request if this stage does not take such a request.
    """
    is_first = engine.shard.is_first
    if (request.payload_type == "token_ids") != is_first:
        wanted = "token_ids" if is_first else "hidden_states"
        raise ZrtError("bad_request", f"this stage takes {wanted}, not {request.payload_type}")
    if is_first:
        return from_bytes(request.data, "uint32", [len(request.data) // 4]).to(torch.int64)
    hidden = engine.spec.hidden_size
    if len(request.shape) != 3 or request.shape[0] != 1 or request.shape[2] != hidden:
        raise ZrtError("bad_request", f"decode hidden states: shape {request.shape}, expected [1, n, {hidden}]")
    return as_dtype(from_bytes(request.data, dtype, request.shape[1:]), engine.shard.dtype)
