"""A block server: holds a contiguous range of a model's blocks and runs the steps of many sessions through it.

Receives from the coordinator: Assign, Open, Credit, Close, Shutdown, and InferenceRequest (token ids: prompts, replays).
Receives from the stage before it: InferenceRequest (hidden states; token ids where the last stage closes the ring).
Receives from any peer, bare: InferenceRequest, answered by InferenceResponse.
Sends to the coordinator: Register, Beat, StateChanged, LoadProgress, Opened, Sampled, Filled, StepFailed; to the next stage: InferenceRequest.

The loop keeps the table of sessions and the queue of steps; tensors, KV and weights belong to the lane (compute/engine.py).
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor
from zrt.runtime.actor import Bare, Envelope
from zrt.runtime.compute.engine import Engine, Outcome, TurnResult, Work
from zrt.runtime.compute.sampling import SamplingOptions
from zrt.runtime.compute.threads import configure_threads
from zrt.runtime.errors import ZrtError
from zrt.runtime.lane import Lane
from zrt.runtime.member import Member
from zrt.runtime.messages.control import (
    ActorState,
    Address,
    Assign,
    Assignment,
    Close,
    Control,
    Credit,
    Done,
    Fault,
    Filled,
    KvStats,
    Load,
    LoadProgress,
    Open,
    Opened,
    Register,
    Sampled,
    SampledToken,
    StateChanged,
    StepFailed,
)
from zrt.runtime.messages.header import HopTime, Step
from zrt.runtime.messages.inference import WARMING_UP, InferenceRequest, InferenceResponse, ResponseType
from zrt.runtime.models import resolve
from zrt.runtime.stage import StageSession
from zrt.runtime.tensors import from_bytes, to_bytes
from zrt.runtime.turns import TurnQueue, Waiting
from zrt.runtime.wire import decode_inference, encode_response

log = logging.getLogger(__name__)

PROGRESS_S = 0.1  # load progress is reported at most this often
COLLECT_S = 30.0  # how often idle bare sessions are looked for (KwaaiNet's pace)
SEND_DEADLINE_S = 30.0  # how long a full outbox to the next stage may stay full


@dataclass(frozen=True, slots=True)
class BareSession:
    """The key of a bare peer's session: KwaaiNet's id, for that peer alone."""

    peer: bytes
    session: int


@dataclass(frozen=True, slots=True)
class Routed:
    """Where a waiting step came from: the session's table entry and the step as it arrived."""

    session: StageSession
    step: Step


Delivery = list[tuple[Step, Tensor]]


class BlockServer(Member):
    """See the module's docstring. `device` is a torch device, `threads` what its products may use."""

    def __init__(self, name: str, *, join: str, device: str, threads: int, listen: str, advertise: str | None) -> None:
        super().__init__(name, "block_server", join=join, listen=listen, advertise=advertise)
        self.device = device
        self.threads = threads
        self.assignment: Assignment | None = None
        self.engine: Engine | None = None
        self.lane = Lane(f"{name}-{device}")
        self.tally = Load()
        self._loading: asyncio.Task[None] | None = None
        self._sessions: dict[int, StageSession] = {}
        self._bare_used: dict[BareSession, float] = {}
        self._queue = TurnQueue()
        self._wake = asyncio.Event()
        for body_type, handler in (
            (Assign, self._on_assign),
            (Open, self._on_open),
            (Credit, self._on_credit),
            (Close, self._on_close),
            (InferenceRequest, self._on_step),
        ):
            self.handle(body_type, handler)
        self.handle_bare(self._on_bare)
        self.on_registered(self._on_registered)

    async def start(self) -> None:
        configure_threads(self.threads)
        self.state = "blank"
        await super().start()
        self.spawn(self._turns(), "turns")
        self.every(COLLECT_S, self._collect_idle)

    async def stop(self) -> None:
        self.state = "stopped"
        await super().stop()
        self.lane.close()

    # ---- membership ---------------------------------------------------------------------------------------------

    def registration(self) -> Register:
        message = super().registration()
        message.state = self.state
        message.device = self.device
        message.holds = self.assignment
        return message

    def load(self) -> Load | None:
        load = self.tally
        load.sessions = len(self._sessions) + len(self._bare_used)
        load.waiting = len(self._queue)
        if self.engine is not None:
            stats = self.engine.stats()
            load.kv = KvStats(stats.free, stats.cached, stats.used, stats.total, stats.page_tokens)
        return load

    def _on_registered(self, again: bool) -> None:
        """A coordinator that does not know us has no sessions: what the last one opened is dead."""
        if not again:
            for session in list(self._sessions):
                self._forget(session)

    # ---- assignment ---------------------------------------------------------------------------------------------

    def _on_assign(self, envelope: Envelope) -> Control:
        assert isinstance(envelope.body, Assign)
        assignment = envelope.body.assignment
        if self.assignment is not None and assignment.serial == self.assignment.serial:
            return Done()
        if self._loading is not None:
            self._loading.cancel()
        self.assignment = assignment
        self.engine = None
        self._set_state("loading")
        self._loading = self.spawn(self._load(assignment), "load")
        return Done()

    async def _load(self, assignment: Assignment) -> None:
        loop = asyncio.get_running_loop()
        reported = 0.0

        def report(done: int, total: int) -> None:
            if self.assignment is assignment:
                self.tell_coordinator(LoadProgress(assignment.serial, done, total))

        def progress(done: int, total: int) -> None:
            nonlocal reported
            now = time.monotonic()
            if done == total or now - reported >= PROGRESS_S:
                reported = now
                loop.call_soon_threadsafe(report, done, total)

        def load() -> Engine:
            return Engine.load(
                resolve(assignment.model),
                assignment.weights,
                (assignment.first, assignment.last),
                num_blocks=assignment.num_blocks,
                dtype=assignment.dtype,
                device=self.device,
                kv_bytes=assignment.kv_bytes,
                context=assignment.context,
                sessions=assignment.sessions,
                progress=progress,
                cancelled=lambda: self.assignment is not assignment or self.ended.is_set(),
            )

        try:
            engine = await self.lane.run(load)
        except ZrtError as error:
            self._set_state("failed", Fault(error.kind, error.message, error.where or self.name))
        except (MemoryError, RuntimeError, OSError) as error:
            log.exception("load failed")
            self._set_state("failed", Fault("internal", f"loading failed: {error}", self.name))
        else:
            if self.assignment is assignment:
                self.engine = engine
                self._set_state("ready")

    def _set_state(self, state: ActorState, fault: Fault | None = None) -> None:
        self.state = state
        serial = self.assignment.serial if self.assignment else 0
        self.tell_coordinator(StateChanged(state, serial, fault))

    def _ready(self) -> Engine:
        if self.engine is None:
            if self.state == "loading":
                raise ZrtError("warming_up", WARMING_UP, self.name)
            raise ZrtError("model_not_loaded", "no blocks are assigned to this block server", self.name)
        return self.engine

    # ---- routed sessions ----------------------------------------------------------------------------------------

    async def _on_open(self, envelope: Envelope) -> Control:
        message = envelope.body
        assert isinstance(message, Open)
        engine = self._ready()
        known = self._sessions.get(message.session)
        if known is not None and known.epoch > message.epoch:
            self.tally.dropped_stale += 1
            raise ZrtError("cancelled", f"epoch {message.epoch} is over, {known.epoch} runs", self.name)
        session = StageSession.opened(message)
        self._sessions[message.session] = session
        self.tally.dropped_stale += self._queue.drop(message.session)
        have = await self.lane.run(engine.open, message.session, message.length)
        if self._sessions.get(message.session) is not session:
            raise ZrtError("cancelled", f"epoch {message.epoch} was overtaken", self.name)
        return Opened(have)

    def _on_close(self, envelope: Envelope) -> Control:
        message = envelope.body
        assert isinstance(message, Close)
        known = self._sessions.get(message.session)
        if known is not None and known.epoch <= message.epoch:
            self._forget(message.session)
        return Done()

    def _forget(self, session: int) -> None:
        self._sessions.pop(session, None)
        self._release(session)

    def _release(self, key: Hashable) -> None:
        self._queue.drop(key)
        if self.engine is not None:
            self.spawn(self.lane.run(self.engine.close, key), "close")

    def _on_credit(self, envelope: Envelope) -> None:
        message = envelope.body
        assert isinstance(message, Credit)
        session = self._sessions.get(message.session)
        if session is None or session.epoch != message.epoch:
            self.tally.dropped_stale += 1
            return
        freed = session.grant(message.upto)
        if freed is not None:
            token, step = freed
            self._send_tokens(session.next, [(step, token)])

    def _on_step(self, envelope: Envelope) -> None:
        """Queue the steps of one message; a step of an unknown session or an older epoch is dropped or answered `kv_gap`."""
        request = envelope.body
        assert isinstance(request, InferenceRequest)
        try:
            engine = self._ready()
            rows = self._rows(engine, request, envelope.header.dtype)
        except ZrtError as error:
            for step in envelope.header.steps:
                self._step_failed(step.session, step.epoch, -1, 0, error)
            return
        arrived = time.monotonic()
        row = 0
        for step in envelope.header.steps:
            session = self._sessions.get(step.session)
            part = rows[row : row + step.n]
            row += step.n
            if session is None:
                gap = ZrtError("kv_gap", "this session is not open here", self.name)
                self._step_failed(step.session, step.epoch, -1, 0, gap)
            elif session.epoch != step.epoch:
                self.tally.dropped_stale += 1
            else:
                origin = Routed(session, step)
                self._queue.add(Waiting(step.session, step.seq_pos, step.n, part, arrived, origin))
        self._wake.set()

    def _rows(self, engine: Engine, request: InferenceRequest, dtype: str) -> Tensor:
        """The request's data as the decoder wants it. ZrtError bad_request if this stage cannot take it."""
        if (request.payload_type == "token_ids") != engine.shard.is_first:
            wanted = "token_ids" if engine.shard.is_first else "hidden_states"
            raise ZrtError("bad_request", f"this stage takes {wanted}, not {request.payload_type}", self.name)
        if request.payload_type == "token_ids":
            return from_bytes(request.data, "uint32", [len(request.data) // 4]).to(torch.int64)
        hidden = engine.spec.hidden_size
        if len(request.shape) != 3 or request.shape[0] != 1 or request.shape[2] != hidden:
            raise ZrtError(
                "bad_request", f"hidden states of shape {request.shape}, expected [1, n, {hidden}]", self.name
            )
        return from_bytes(request.data, dtype, request.shape[1:]).to(engine.shard.dtype)

    def _step_failed(self, session: int, epoch: int, stage: int, have: int, error: ZrtError) -> None:
        fault = Fault(error.kind, error.message, error.where or self.name)
        self.tell_coordinator(StepFailed(session, epoch, stage, have, fault))

    # ---- bare requests ------------------------------------------------------------------------------------------

    def _on_bare(self, bare: Bare) -> None:
        try:
            request = decode_inference(bare.frame)
            engine = self._ready()
            rows = self._bare_rows(engine, request)
        except ZrtError as error:
            self._bare_failed(bare, error)
            return
        key = BareSession(bare.peer, request.session_id)
        self._bare_used[key] = time.monotonic()
        self._queue.add(Waiting(key, request.seq_pos, len(rows), rows, time.monotonic(), bare))
        self._wake.set()

    def _bare_rows(self, engine: Engine, request: InferenceRequest) -> Tensor:
        what = "token IDs" if request.payload_type == "token_ids" else "hidden states"
        try:
            rows = self._rows(engine, request, "float16")
        except ZrtError as error:
            raise ZrtError(error.kind, f"decode {what}: {error.message}", self.name) from error
        if len(rows) == 0:
            raise ZrtError("bad_request", f"decode {what}: no tokens", self.name)
        return rows

    def _bare_failed(self, bare: Bare, error: ZrtError) -> None:
        text = WARMING_UP if error.kind == "warming_up" else f"{error.kind}: {error.message}"
        self._reply_bare(bare, InferenceResponse(0, "hidden_states", [], memoryview(b""), text))

    def _reply_bare(self, bare: Bare, response: InferenceResponse) -> None:
        try:
            self.reply_bare(bare, encode_response(response))
        except ZrtError as error:
            log.warning("a bare peer takes no replies: %s", error)

    def _bare_done(self, engine: Engine, step: Waiting, outcome: Outcome, output: Tensor) -> None:
        bare: Bare = step.origin
        key = step.key
        assert isinstance(key, BareSession)
        count = 1 if engine.shard.is_last else step.n
        rows = output[outcome.first : outcome.first + count].unsqueeze(0)
        kind: ResponseType = "logits" if engine.shard.is_last else "hidden_states"
        data = to_bytes(rows, "float16")
        self._reply_bare(bare, InferenceResponse(key.session, kind, list(rows.shape), data, None))

    def _collect_idle(self) -> None:
        if self.assignment is None:
            return
        before = time.monotonic() - self.assignment.idle_s
        for key in [key for key, used in self._bare_used.items() if used < before]:
            del self._bare_used[key]
            self._release(key)

    # ---- turns --------------------------------------------------------------------------------------------------

    async def _turns(self) -> None:
        """Run what waits, one turn after another, for as long as the actor lives."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self.engine is not None and self.assignment is not None:
                turn = self._queue.take(self.assignment.chunk)
                if not turn:
                    break
                await self._turn(self.engine, turn)

    async def _turn(self, engine: Engine, turn: list[Waiting]) -> None:
        works = [self._work(engine, step) for step in turn]
        started = time.monotonic()
        try:
            result = await self.lane.run(engine.turn, works)
        except (ZrtError, RuntimeError, MemoryError) as error:
            log.exception("a turn of %d steps failed", len(turn))
            fault = error if isinstance(error, ZrtError) else ZrtError("internal", f"a turn failed: {error}", self.name)
            result = TurnResult([Outcome(0, fault) for _ in turn], None)
        spent = int((time.monotonic() - started) * 1e6)
        load = self.tally
        load.turns += 1
        load.steps += len(turn)
        load.tokens += sum(step.n for step in turn)
        load.busy_us += spent
        await self._deliver(engine, turn, result, started, spent)

    def _work(self, engine: Engine, step: Waiting) -> Work:
        origin = step.origin
        if not isinstance(origin, Routed):
            return Work(step.key, step.seq_pos, step.n, step.rows, logits=engine.shard.is_last, opens=True)
        session = origin.session
        sample = None
        if session.samples(step.seq_pos, step.n, origin.step.until):
            chosen = session.sampling
            sample = SamplingOptions(chosen.temperature, chosen.top_k, chosen.top_p, chosen.seed)
        return Work(step.key, step.seq_pos, step.n, step.rows, sample)

    async def _deliver(
        self, engine: Engine, turn: list[Waiting], result: TurnResult, started: float, spent: int
    ) -> None:
        """Send a turn's results on: what is bound for one peer travels as one message."""
        hidden: dict[Address, Delivery] = defaultdict(list)
        ring: dict[Address, list[tuple[Step, int]]] = defaultdict(list)
        sampled: list[SampledToken] = []
        for step, outcome in zip(turn, result.outcomes, strict=True):
            origin = step.origin
            if isinstance(origin, Bare):
                if outcome.fault is not None:
                    self._bare_failed(origin, outcome.fault)
                elif result.output is not None:
                    self._bare_done(engine, step, outcome, result.output)
                continue
            session: StageSession = origin.session
            if self._sessions.get(session.session) is not session:
                self.tally.dropped_stale += 1
                continue
            if outcome.fault is not None:
                self._step_failed(session.session, session.epoch, session.stage, outcome.have, outcome.fault)
                continue
            hop = HopTime(int((started - step.arrived) * 1e6), spent)
            onward = session.onward(origin.step, step.seq_pos, step.n, hop)
            if outcome.token is not None:
                sampled.append(
                    SampledToken(session.session, session.epoch, session.length, outcome.token, onward.times)
                )
                following = session.sampled(outcome.token)
                if following is not None:
                    ring[session.next].append((following, outcome.token))
            elif session.ends(origin.step.until):
                upto = step.seq_pos + step.n
                self.tell_coordinator(Filled(session.session, session.epoch, session.stage, upto))
            elif result.output is not None:
                rows = result.output[outcome.first : outcome.first + step.n]
                hidden[session.next].append((onward, rows))
        for address, tokens in ring.items():
            self._send_tokens(address, tokens)
        if sampled:
            self.tell_coordinator(Sampled(sampled))
        for address, delivery in hidden.items():
            await self._send_hidden(engine, address, delivery)

    def _send_tokens(self, address: Address, tokens: list[tuple[Step, int]]) -> None:
        """Close the ring: the tokens become the first stage's next steps. A ring of one stage needs no socket."""
        steps = [step for step, _ in tokens]
        if address == self.address:
            arrived = time.monotonic()
            for step, token in tokens:
                origin = Routed(self._sessions[step.session], step)
                self._queue.add(Waiting(step.session, step.seq_pos, 1, torch.tensor([token]), arrived, origin))
            self._wake.set()
            return
        data = to_bytes(torch.tensor([token for _, token in tokens]), "uint32")
        request = InferenceRequest(steps[0].session, steps[0].seq_pos, "token_ids", [len(steps)], data)
        self._tell_stage(address, request, steps, "uint32")

    async def _send_hidden(self, engine: Engine, address: Address, delivery: Delivery) -> None:
        steps = [step for step, _ in delivery]
        rows = delivery[0][1] if len(delivery) == 1 else torch.cat([rows for _, rows in delivery])
        dtype = engine.dtype
        request = InferenceRequest(
            steps[0].session, steps[0].seq_pos, "hidden_states", [1, *rows.shape], to_bytes(rows, dtype)
        )
        try:
            await self.room(address, timeout=SEND_DEADLINE_S)
        except ZrtError as error:
            self._steps_failed(steps, error)
            return
        self._tell_stage(address, request, steps, dtype)

    def _tell_stage(self, address: Address, request: InferenceRequest, steps: list[Step], dtype: str) -> None:
        try:
            self.tell(address, request, steps=steps, dtype=dtype)
        except ZrtError as error:
            self._steps_failed(steps, error)

    def _steps_failed(self, steps: list[Step], error: ZrtError) -> None:
        for step in steps:
            session = self._sessions.get(step.session)
            self._step_failed(step.session, step.epoch, session.stage if session else -1, 0, error)
