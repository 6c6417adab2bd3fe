"""Sessions of foreign peers at a block server: bare KwaaiNet requests, each answered with a bare
response, keyed by (peer, session id).

There is no close message, so sessions that are idle too long are forgotten, as in KwaaiNet; and
earlier, least recently used first, when routed sessions need the room: the cluster's own work comes
first, and strangers may come in any number.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zrt.actors.block_server.stage_transfer import rows_of
from zrt.actors.block_server.step_owner import Turn
from zrt.actors.block_server.step_queue import Waiting
from zrt.actors.block_server.turn_loop import TurnLoop
from zrt.runtime.actor.envelope import Bare
from zrt.runtime.actor.log_limiter import LogLimiter
from zrt.runtime.actor.member import Member
from zrt.runtime.compute.engine import Holding
from zrt.runtime.compute.tensors import to_bytes
from zrt.runtime.compute.turn import Outcome, Work
from zrt.runtime.errors import ZrtError
from zrt.runtime.formatting import counted
from zrt.runtime.messages.inference import WARMING_UP, InferenceResponse, ResponseType
from zrt.runtime.wire.inference import decode_inference, encode_response

SPARE_BYTES = 64 * 1024
"""Room in a bare request for all that is not its data."""


@dataclass(frozen=True, slots=True)
class BareKey:
    """A session's key: KwaaiNet's session id, for that peer alone."""

    peer: bytes
    session: int


@dataclass(slots=True)
class BareRequest:
    """One request on its way through turns, which may cut it: `parts` are the results so far,
    `left` the tokens still to come."""

    bare: Bare
    left: int
    parts: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class BareStep(Waiting):
    """A request, or a part of one, that waits for its turn."""

    key: BareKey
    request: BareRequest


@dataclass(slots=True)
class BareSession:
    """A foreign peer's session: `used` is when a request last came (monotonic seconds), `waiting`
    how many have not been answered."""

    used: float
    waiting: int = 0


class BareSessions:
    """The table of foreign peers' sessions, and the owner of their steps. `ready` gives the engine,
    or raises what the peer is told; while the `actor` drains, no session is begun."""

    urgent = False

    def __init__(self, actor: Member, loop: TurnLoop, ready: Callable[[], Holding]) -> None:
        self._actor = actor
        self._loop = loop
        self._ready = ready
        self._sessions: dict[BareKey, BareSession] = {}  # least recently used first
        self._complaints = LogLimiter(actor.name)

    def __len__(self) -> int:
        return len(self._sessions)

    def on_request(self, bare: Bare) -> None:
        """Queue a request, or answer why not."""
        try:
            engine = self._ready()
            _check_size(bare, engine)
            request = decode_inference(bare.frame)
            rows = rows_of(engine, request, "float16")
            if request.seq_pos + len(rows) > engine.cache.context:
                text = f"seq_pos {request.seq_pos} + {counted(len(rows), 'token')}, the context holds {engine.cache.context}"
                raise ZrtError("context_exceeded", text)
            key = BareKey(bare.peer, request.session_id)
            if key not in self._sessions and self._actor.state in ("draining", "drained"):
                raise ZrtError("draining", "this block server is being drained and takes no new sessions")
        except ZrtError as error:
            self._refuse(bare, error)
            return
        now = time.monotonic()
        session = self._sessions.pop(key, None) or BareSession(now)
        session.used = now
        session.waiting += 1
        self._sessions[key] = session
        count = len(rows)
        self._loop.add(BareStep(key, request.seq_pos, count, rows, now, 0, self, BareRequest(bare, count)))

    # ---- turns -----------------------------------------------------------------------------------

    def work(self, engine: Holding, step: BareStep) -> Work:
        """Return the step's forward: the last stage gives the logits after a request's last
        token."""
        left = step.request.left
        logits = engine.shard.is_last and step.n == left
        return Work(step.key, step.seq_pos, step.n, step.rows, logits=logits, opens=left)

    def passing(self, steps: Sequence[BareStep]) -> None:
        """Return nothing: foreign peers are answered with bytes."""

    async def deliver(self, turn: Turn, ran: Sequence[tuple[BareStep, Outcome]]) -> None:
        """Reply to each request whose last part has run, or cannot run."""
        for step, outcome in ran:
            await self._deliver(turn, step, outcome)

    async def _deliver(self, turn: Turn, step: BareStep, outcome: Outcome) -> None:
        request = step.request
        if outcome.fault is not None:
            self._refuse(request.bare, outcome.fault)
            for later in self._loop.drop(step.key):
                if isinstance(later, BareStep) and later.request is not request:
                    self._refuse(later.request.bare, outcome.fault)
            if outcome.have == 0:  # nothing is lost with it
                await self._forget(step.key)
            elif step.key in self._sessions:
                self._sessions[step.key].waiting = 0
            return
        request.left -= step.n
        output = turn.result.output
        if output is not None and outcome.first >= 0:
            count = 1 if turn.engine.shard.is_last else step.n
            request.parts.append(output[outcome.first : outcome.first + count])
        if request.left > 0:
            return
        rows = (request.parts[0] if len(request.parts) == 1 else torch.cat(request.parts)).unsqueeze(0)
        kind: ResponseType = "logits" if turn.engine.shard.is_last else "hidden_states"
        if step.key in self._sessions:
            self._sessions[step.key].waiting -= 1
        data = to_bytes(rows, "float16")
        self._reply(request.bare, InferenceResponse(step.key.session, kind, list(rows.shape), data, None))

    # ---- room ------------------------------------------------------------------------------------

    async def collect(self, idle_s: float) -> None:
        """Forget the sessions that were not used for so long."""
        before = time.monotonic() - idle_s
        for key in [key for key, session in self._sessions.items() if session.used < before]:
            await self._forget(key)

    async def make_room(self) -> bool:
        """Forget the session that was used least recently, of those whose requests are all
        answered; return whether there was one."""
        key = next((key for key, session in self._sessions.items() if session.waiting == 0), None)
        if key is None:
            return False
        await self._forget(key)
        return True

    async def _forget(self, key: BareKey) -> None:
        self._sessions.pop(key, None)
        await self._loop.release(key)

    def _refuse(self, bare: Bare, error: ZrtError) -> None:
        text = WARMING_UP if error.kind == "warming_up" else f"{error.kind}: {error.message}"
        self._reply(bare, InferenceResponse(0, "hidden_states", [], memoryview(b""), text))

    def _reply(self, bare: Bare, response: InferenceResponse) -> None:
        try:
            self._actor.reply_bare(bare, encode_response(response))
        except ZrtError as error:
            self._complaints.add("reply", f"a bare peer takes no replies: {error}")


def _check_size(bare: Bare, engine: Holding) -> None:
    """Refuse, with ZrtError too_large, more bytes than the longest history takes as an array of
    integers, KwaaiNet's longest form: reading them would hold the loop up."""
    width = 4 if engine.shard.is_first else 2 * engine.spec.hidden_size
    most = 2 * width * engine.cache.context + SPARE_BYTES
    if len(bare.frame) > most:
        raise ZrtError("too_large", f"a request of {len(bare.frame)} bytes, this stage takes {most}")
