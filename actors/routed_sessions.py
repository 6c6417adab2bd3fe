"""Routed sessions at a block server: opened by the coordinator, stepped by the stage before, closed by the coordinator.

Results go straight to the next stage; the last stage samples, tells the coordinator, and closes the ring to the first.
"""

import time
from array import array
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from zrt.actors.backend import Backend
from zrt.actors.payloads import rows_of
from zrt.actors.turn_loop import Turn, TurnLoop
from zrt.runtime.actor import Envelope
from zrt.runtime.complaints import Complaints
from zrt.runtime.compute.engine import Engine, Outcome, Work
from zrt.runtime.compute.sampling import Picked, Sampler
from zrt.runtime.errors import ZrtError
from zrt.runtime.member import Member
from zrt.runtime.messages.control import (
    Address,
    Close,
    Control,
    ControlMessage,
    Credit,
    Done,
    Fault,
    Filled,
    Open,
    Opened,
    Sampled,
    SampledToken,
    StepFailed,
)
from zrt.runtime.messages.header import HopTime, Step
from zrt.runtime.messages.inference import InferenceRequest
from zrt.runtime.page_keys import check_keys
from zrt.runtime.stage import StageSession
from zrt.runtime.tensors import to_bytes
from zrt.runtime.turns import Waiting

SEND_DEADLINE_S = 30.0  # how long a full outbox to the next stage may stay full


@dataclass(frozen=True, slots=True)
class Routed:
    """Where a waiting step came from: the session's table entry and the step as it arrived."""

    session: StageSession
    step: Step


class RoutedSessions:
    """The table of sessions by id. `ready` gives the engine, or raises what the sender is told; `make_room` frees KV memory that serves
    somebody else, and is false if there is none."""

    def __init__(
        self,
        actor: Member,
        loop: TurnLoop,
        ready: Callable[[], Engine],
        make_room: Callable[[], Awaitable[bool]],
    ) -> None:
        self._actor = actor
        self._loop = loop
        self._ready = ready
        self._make_room = make_room
        self._complaints = Complaints(actor.name)
        self._sessions: dict[int, StageSession] = {}
        self._encode_us = 0
        actor.obey(Open, self._on_open)
        actor.obey(Credit, self._on_credit)
        actor.obey(Close, self._on_close)
        actor.handle(InferenceRequest, self._on_step)

    def __len__(self) -> int:
        return len(self._sessions)

    def forget_all(self) -> None:
        for session in list(self._sessions):
            self._forget(session)

    def _forget(self, session: int, page_keys: list[int] | None = None) -> None:
        self._sessions.pop(session, None)
        self._actor.spawn(self._loop.release(session, page_keys), f"close {session:016x}")

    # ---- what arrives -------------------------------------------------------------------------------------------

    async def _on_open(self, envelope: Envelope) -> Control:
        message = envelope.body
        assert isinstance(message, Open)
        engine = self._ready()
        backend = self._loop.backend
        assert backend is not None
        known = self._sessions.get(message.session)
        if known is not None and known.epoch > message.epoch:
            self._loop.tally.dropped_stale += 1
            raise ZrtError("cancelled", f"epoch {message.epoch} is over, {known.epoch} runs")
        session = StageSession.opened(message)
        _check_size(message, engine)
        if session.is_last:
            session.sampler = _sampler(message, engine.spec.vocab_size)
        self._sessions[message.session] = session
        self._loop.drop(message.session)
        try:
            have = await self._reserve(backend, message)
        except Exception:
            if self._sessions.get(message.session) is session:
                self._forget(message.session)
            raise
        if self._sessions.get(message.session) is not session:
            raise ZrtError("cancelled", f"epoch {message.epoch} was overtaken")
        return Opened(have)

    async def _reserve(self, backend: Backend, message: Open) -> int:
        """A place in the engine's cache, before all others: how much of the history it holds."""
        while True:
            try:
                return await backend.open(message.session, message.length, message.page_keys, message.prompt_length)
            except ZrtError as error:
                if error.kind != "overloaded" or not await self._make_room():
                    raise

    def _on_close(self, envelope: Envelope) -> Control:
        message = envelope.body
        assert isinstance(message, Close)
        known = self._sessions.get(message.session)
        if known is not None and known.epoch > message.epoch:
            self._loop.tally.dropped_stale += 1
        elif known is not None:
            if self._loop.engine is not None:
                check_keys(message.page_keys, self._loop.engine.max_pages)
            self._forget(message.session, message.page_keys)
        return Done()

    def _on_credit(self, envelope: Envelope) -> None:
        message = envelope.body
        assert isinstance(message, Credit)
        session = self._sessions.get(message.session)
        if session is None or session.epoch != message.epoch:
            self._loop.tally.dropped_stale += 1
            return
        freed = session.grant(message.upto, message.slot)
        if freed is not None:
            token, step = freed
            self._send_tokens(session.next, [(step, token)])

    def _on_step(self, envelope: Envelope) -> None:
        """Queue the steps of one message. The coordinator hears `kv_gap` of its own steps of a session that is not open; steps of an older
        epoch, or of a process that does not stand before this one on the session's route, are dropped.
        """
        request = envelope.body
        assert isinstance(request, InferenceRequest)
        from_coordinator = self._actor.is_coordinator(envelope)
        taken: list[tuple[StageSession, Step, int]] = []
        row = 0
        for step in envelope.header.steps:
            session = self._sessions.get(step.session)
            if session is None and from_coordinator:
                self._steps_failed([step], ZrtError("kv_gap", "this session is not open here"))
            elif session is None or session.epoch != step.epoch:
                self._loop.tally.dropped_stale += 1
            elif envelope.header.incarnation == session.before.incarnation or (from_coordinator and session.stage == 0):
                taken.append((session, step, row))
            else:
                self._loop.tally.dropped_stale += 1
            row += step.n
        if not taken:
            return
        try:
            rows = rows_of(self._ready(), request, envelope.header.dtype)
        except ZrtError as error:
            self._steps_failed([step for _, step, _ in taken], error)
            return
        now = time.monotonic()
        for session, step, row in taken:
            self._loop.add(_waiting(session, step, rows[row : row + step.n], now))

    # ---- turns --------------------------------------------------------------------------------------------------

    def work(self, step: Waiting) -> Work:
        origin: Routed = step.origin
        samples = origin.session.samples(step.seq_pos, step.n, origin.step.until)
        return Work(step.key, step.seq_pos, step.n, step.rows, origin.session.sampler if samples else None)

    async def deliver(self, turn: Turn, ran: list[tuple[Waiting, Outcome]]) -> None:
        """Send a turn's results on: what is bound for one peer travels as one message."""
        began = time.monotonic()
        hidden: dict[Address, list[tuple[Step, Tensor]]] = defaultdict(list)
        ring: dict[Address, list[tuple[Step, int]]] = defaultdict(list)
        sampled: list[SampledToken] = []
        failed: list[tuple[StageSession, Waiting, Outcome]] = []
        output = turn.result.output
        for step, outcome in ran:
            origin: Routed = step.origin
            session = origin.session
            if self._sessions.get(session.session) is not session:
                self._loop.tally.dropped_stale += 1
                continue
            if outcome.failure is not None:
                failed.append((session, step, outcome))
                continue
            hop = HopTime(int((turn.started - step.arrived) * 1e6), turn.spent_us, self._encode_us)
            onward = session.onward(origin.step, step.seq_pos, step.n, hop)
            if isinstance(outcome.picked, Picked):
                token, logprobs = outcome.picked.token, outcome.picked.logprobs
                said = SampledToken(session.session, session.epoch, session.length, token, onward.times, logprobs)
                sampled.append(said)
                following = session.sampled(token)
                if following is not None:
                    ring[session.next].append((following, token))
            elif session.ends(origin.step.until):
                self._report(Filled(session.session, session.epoch, session.stage, step.seq_pos + step.n))
            elif output is not None:
                if session.gather and step.n == 1:
                    self._loop.expect(session.session, step.slot)
                hidden[session.next].append((onward, output[outcome.first : outcome.first + step.n]))
        for address, tokens in ring.items():
            self._send_tokens(address, tokens)
        if sampled:
            self._report(Sampled(sampled))
        for address, delivery in hidden.items():
            await self._send_hidden(turn.engine, address, delivery)
        self._encode_us = int((time.monotonic() - began) * 1e6)
        for session, step, outcome in failed:
            if self._sessions.get(session.session) is session:
                await self._step_failed(session, step, outcome)

    def _send_tokens(self, address: Address, tokens: list[tuple[Step, int]]) -> None:
        """Close the ring: the tokens become the first stage's next steps. A ring of one stage needs no socket."""
        if address == self._actor.address:
            now = time.monotonic()
            for step, token in tokens:
                self._loop.add(_waiting(self._sessions[step.session], step, torch.tensor([token]), now))
            return
        steps = [step for step, _ in tokens]
        ids = array("I", [token for _, token in tokens])
        data = memoryview(ids).cast("B")
        request = InferenceRequest(steps[0].session, steps[0].seq_pos, "token_ids", [len(steps)], data)
        self._send(address, request, steps, "uint32")

    async def _send_hidden(self, engine: Engine, address: Address, delivery: list[tuple[Step, Tensor]]) -> None:
        steps = [step for step, _ in delivery]
        rows = delivery[0][1] if len(delivery) == 1 else torch.cat([rows for _, rows in delivery])
        data = to_bytes(rows, engine.dtype)
        request = InferenceRequest(steps[0].session, steps[0].seq_pos, "hidden_states", [1, *rows.shape], data)
        try:
            await self._actor.room(address, timeout=SEND_DEADLINE_S)
        except ZrtError as error:
            self._steps_failed(steps, error)
            return
        self._send(address, request, steps, engine.dtype)

    def _send(self, address: Address, request: InferenceRequest, steps: list[Step], dtype: str) -> None:
        try:
            self._actor.tell(address, request, steps=steps, dtype=dtype)
        except ZrtError as error:
            self._steps_failed(steps, error)

    # ---- what the coordinator hears -----------------------------------------------------------------------------

    async def _step_failed(self, session: StageSession, step: Waiting, outcome: Outcome) -> None:
        error = outcome.failure
        assert error is not None
        if error.kind == "kv_full":
            self._loop.park(step)
            if await self._make_room():
                return  # what is parked is tried again
        fault = Fault(error.kind, error.message, error.where or self._actor.name)
        self._report(StepFailed(session.session, session.epoch, session.stage, outcome.have, fault))

    def _steps_failed(self, steps: list[Step], error: ZrtError) -> None:
        fault = Fault(error.kind, error.message, error.where or self._actor.name)
        for step in steps:
            session = self._sessions.get(step.session)
            self._report(StepFailed(step.session, step.epoch, session.stage if session else -1, 0, fault))

    def _report(self, message: ControlMessage) -> None:
        """Tell the coordinator; one that is lost, or takes nothing, will open the session anew."""
        try:
            self._actor.tell_coordinator(message)
        except ZrtError as error:
            what = type(message).__name__
            self._complaints.add(what, f"the coordinator does not take a {what}: {error}")


def _waiting(session: StageSession, step: Step, rows: Tensor, now: float) -> Waiting:
    return Waiting(step.session, step.seq_pos, step.n, rows, now, step.slot, Routed(session, step))


def _check_size(message: Open, engine: Engine) -> None:
    """ZrtError context_exceeded, bad_request: more than a session can have."""
    if message.length > engine.cache.context:
        text = f"open: a history of {message.length} tokens, the context holds {engine.cache.context}"
        raise ZrtError("context_exceeded", text)
    check_keys(message.page_keys, engine.max_pages)


def _sampler(message: Open, vocab: int) -> Sampler:
    return Sampler(
        message.sampling, tokens=message.tokens, prompt_length=message.prompt_length, eos=message.eos, vocab=vocab
    )
