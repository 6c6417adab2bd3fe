"""Sessions of foreign peers at a block server: bare KwaaiNet requests, each answered with a bare response, keyed by (peer, session id).

There is no close message, so what is idle too long is forgotten, as in KwaaiNet.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zrt.actors.payloads import rows_of
from zrt.actors.turn_loop import Turn, TurnLoop
from zrt.runtime.actor import Actor
from zrt.runtime.compute.engine import Engine, Outcome, Work
from zrt.runtime.envelope import Bare
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.inference import WARMING_UP, InferenceResponse, ResponseType
from zrt.runtime.tensors import to_bytes
from zrt.runtime.turns import Waiting
from zrt.runtime.wire import decode_inference, encode_response

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BareKey:
    """KwaaiNet's session id, for that peer alone."""

    peer: bytes
    session: int


@dataclass(slots=True)
class BareStep:
    """One request on its way through turns, which may cut it: `parts` are the results so far, `left` the tokens still to come."""

    bare: Bare
    left: int
    parts: list[Tensor] = field(default_factory=list)


class BareSessions:
    """`ready` gives the engine, or raises what the peer is told; while it `drains`, no session is begun."""

    def __init__(
        self, actor: Actor, loop: TurnLoop, ready: Callable[[], Engine], *, drains: Callable[[], bool]
    ) -> None:
        self._actor = actor
        self._loop = loop
        self._ready = ready
        self._drains = drains
        self._used: dict[BareKey, float] = {}

    def __len__(self) -> int:
        return len(self._used)

    def on_request(self, bare: Bare) -> None:
        try:
            request = decode_inference(bare.frame)
            rows = rows_of(self._ready(), request, "float16")
            key = BareKey(bare.peer, request.session_id)
            if key not in self._used and self._drains():
                raise ZrtError("draining", "this block server is being drained and takes no new sessions")
        except ZrtError as error:
            self._refuse(bare, error)
            return
        now = time.monotonic()
        self._used[key] = now
        self._loop.add(Waiting(key, request.seq_pos, len(rows), rows, now, origin=BareStep(bare, len(rows))))

    def work(self, engine: Engine, step: Waiting) -> Work:
        ends = step.n == step.origin.left
        return Work(
            step.key, step.seq_pos, step.n, step.rows, logits=engine.shard.is_last and ends, opens=step.origin.left
        )

    def deliver(self, turn: Turn, step: Waiting, outcome: Outcome) -> None:
        """Reply once the last part of a request has run."""
        origin: BareStep = step.origin
        if outcome.fault is not None:
            self._loop.drop(step.key)
            self._refuse(origin.bare, outcome.fault)
            return
        origin.left -= step.n
        output = turn.result.output
        if output is not None and outcome.first >= 0:
            count = 1 if turn.engine.shard.is_last else step.n
            origin.parts.append(output[outcome.first : outcome.first + count])
        if origin.left > 0:
            return
        rows = (origin.parts[0] if len(origin.parts) == 1 else torch.cat(origin.parts)).unsqueeze(0)
        kind: ResponseType = "logits" if turn.engine.shard.is_last else "hidden_states"
        assert isinstance(step.key, BareKey)
        data = to_bytes(rows, "float16")
        self._reply(origin.bare, InferenceResponse(step.key.session, kind, list(rows.shape), data, None))

    async def collect(self, idle_s: float) -> None:
        """Forget sessions that were not used for so long."""
        before = time.monotonic() - idle_s
        for key in [key for key, used in self._used.items() if used < before]:
            del self._used[key]
            await self._loop.release(key)

    def _refuse(self, bare: Bare, error: ZrtError) -> None:
        text = WARMING_UP if error.kind == "warming_up" else f"{error.kind}: {error.message}"
        self._reply(bare, InferenceResponse(0, "hidden_states", [], memoryview(b""), text))

    def _reply(self, bare: Bare, response: InferenceResponse) -> None:
        try:
            self._actor.reply_bare(bare, encode_response(response))
        except ZrtError as error:
            log.warning("a bare peer takes no replies: %s", error)
