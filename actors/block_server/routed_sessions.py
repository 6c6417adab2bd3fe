"""Routed sessions at a block server: opened by the coordinator, stepped by the stage before, closed
by the coordinator.

Results go straight to the next stage; the last stage samples, tells the coordinator, and closes the
ring to the first.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from zrt.actors.block_server.backend import Backend
from zrt.actors.block_server.row_channels import RowChannels
from zrt.actors.block_server.row_transfer import RowTransfer, rows_of
from zrt.actors.block_server.stage_session import StageSession
from zrt.actors.block_server.step_queue import Waiting
from zrt.actors.block_server.turn_loop import Turn, TurnLoop
from zrt.runtime.actor.envelope import Envelope
from zrt.runtime.actor.log_limiter import LogLimiter
from zrt.runtime.actor.member import Member
from zrt.runtime.compute.engine import Holding
from zrt.runtime.compute.sampler import Picked, Sampler
from zrt.runtime.compute.shared_rows.channel import HandedRows
from zrt.runtime.compute.turn import Outcome, Passing, Work
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.control import Address, Control, Done, Fault
from zrt.runtime.messages.header import HandedOver, HopTime, Step
from zrt.runtime.messages.inference import InferenceRequest
from zrt.runtime.messages.sessions import (
    Close,
    Credit,
    Filled,
    Open,
    Opened,
    Sampled,
    SampledToken,
    SessionMessage,
    StepFailed,
)
from zrt.runtime.page_keys import check_keys


@dataclass(frozen=True, slots=True)
class Routed:
    """Where a waiting step came from: the session's table entry and the step as it arrived."""

    session: StageSession
    step: Step


class RoutedSessions:
    """The table of sessions by id. `ready` gives the engine, or raises what the sender is told;
    `make_room` frees KV memory that serves somebody else, and is false if there is none."""

    def __init__(
        self,
        actor: Member,
        loop: TurnLoop,
        ready: Callable[[], Holding],
        make_room: Callable[[], Awaitable[bool]],
        handovers: RowChannels,
    ) -> None:
        self._actor = actor
        self._handovers = handovers
        self._onward = RowTransfer(actor, handovers, loop.tally, self._steps_failed)
        self._loop = loop
        self._ready = ready
        self._make_room = make_room
        self._complaints = LogLimiter(actor.name)
        self._sessions: dict[int, StageSession] = {}
        self._encode_us = 0
        actor.obey(Open, self._on_open)
        actor.obey(Credit, self._on_credit)
        actor.obey(Close, self._on_close)
        actor.handle(InferenceRequest, self._on_step)

    def __len__(self) -> int:
        return len(self._sessions)

    def lost(self, error: ZrtError, running: list[Waiting]) -> None:
        """What runs the turns broke, in one that had these steps: it may have been for one of
        them."""
        self._steps_failed([step.origin.step for step in running if isinstance(step.origin, Routed)], error)

    def forget_all(self) -> None:
        for session in list(self._sessions):
            self._forget(session)

    def _forget(self, session: int, page_keys: list[int] | None = None) -> None:
        self._sessions.pop(session, None)
        self._actor.spawn(self._loop.release(session, page_keys), f"close {session:016x}")

    # ---- what arrives ----------------------------------------------------------------------------

    def _on_open(self, message: Open, envelope: Envelope) -> Awaitable[Control]:
        """Known from here on, so that a close that comes right behind finds it; the executor's part
        follows."""
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
        return self._open(backend, message, session)

    async def _open(self, backend: Backend, message: Open, session: StageSession) -> Control:
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

    def _on_close(self, message: Close, envelope: Envelope) -> Control:
        known = self._sessions.get(message.session)
        if known is not None and known.epoch > message.epoch:
            self._loop.tally.dropped_stale += 1
        elif known is not None:
            if self._loop.engine is not None:
                check_keys(message.page_keys, self._loop.engine.max_pages)
            self._forget(message.session, message.page_keys)
        return Done()

    def _on_credit(self, message: Credit, envelope: Envelope) -> None:
        session = self._sessions.get(message.session)
        if session is None or session.epoch != message.epoch:
            self._loop.tally.dropped_stale += 1
            return
        freed = session.grant(message.upto, message.slot)
        if freed is not None:
            token, step = freed
            self._go_round(session.next, [(step, token)])

    def _on_step(self, request: InferenceRequest, envelope: Envelope) -> None:
        """Queue the steps of one message. The coordinator hears `kv_gap` of its own steps of a
        session that is not open; steps of an older epoch, or of a process that does not stand
        before this one on the session's route, are dropped.
        """
        from_coordinator = self._actor.is_coordinator(envelope)
        header = envelope.header
        taken: list[tuple[StageSession, Step, int]] = []
        for index, step in enumerate(header.steps):
            session = self._sessions.get(step.session)
            if session is None and from_coordinator:
                self._steps_failed([step], ZrtError("kv_gap", "this session is not open here"))
            elif session is None or session.epoch != step.epoch:
                self._loop.tally.dropped_stale += 1
            elif session.over:
                pass  # it was begun before its end was known
            elif header.incarnation == session.before.incarnation or (from_coordinator and session.stage == 0):
                taken.append((session, step, index))
            else:
                self._loop.tally.dropped_stale += 1
        if not taken:
            self._handovers.dismiss(header)
            return
        try:
            rows = self._rows(envelope, request, taken[0][0].before)
        except ZrtError as error:
            self._handovers.dismiss(header)
            self._steps_failed([step for _, step, _ in taken], error)
            return
        if header.near:
            self._handovers.heard(header, taken[0][0].before)
        now = time.monotonic()
        for session, step, index in taken:
            self._loop.add(_waiting(session, step, rows[index], now))

    def _rows(self, envelope: Envelope, request: InferenceRequest, before: Address) -> Sequence[Tensor | HandedRows]:
        """The rows of each step of a message of the stage before."""
        header, engine = envelope.header, self._ready()
        if header.handed is not None:
            return self._handovers.rows(engine, header, request, before)
        rows = rows_of(engine, request, header.dtype)
        starts = accumulate((step.n for step in header.steps), initial=0)
        return [rows[start : start + step.n] for start, step in zip(starts, header.steps, strict=False)]

    # ---- turns -----------------------------------------------------------------------------------

    def work(self, step: Waiting) -> Work:
        origin: Routed = step.origin
        samples = origin.session.samples(step.seq_pos, step.n, origin.step.until)
        return Work(step.key, step.seq_pos, step.n, step.rows, origin.session.sampler if samples else None)

    def passing(self, steps: Sequence[Waiting]) -> Passing | None:
        """Where the results of a turn of these steps are handed over, if they all go to one process
        and that takes them so."""
        if not all(isinstance(step.origin, Routed) for step in steps):
            return None
        sessions = [step.origin.session for step in steps]
        address = sessions[0].next
        outlet = None if any(session.next != address for session in sessions) else self._handovers.outlet(address)
        if outlet is None or not any(_goes_on(step) for step in steps):
            return None
        loop = asyncio.get_running_loop()

        def begun(handed: HandedOver, ran: list[int]) -> None:
            loop.call_soon_threadsafe(self._begun, address, [steps[index] for index in ran], handed)

        return Passing(outlet, begun)

    def _begun(self, address: Address, steps: list[Waiting], handed: HandedOver) -> None:
        """The ring goes on with tokens that the device is still picking: the first stage begins
        their steps meanwhile."""
        going: list[tuple[Step, int]] = []
        for row, step in enumerate(steps):
            origin: Routed = step.origin
            session = origin.session
            if self._sessions.get(session.session) is session and _goes_on(step):
                following = session.begin_next()
                if following is not None:
                    going.append((following, row))
        self._onward.begun_tokens(address, going, handed)

    async def deliver(self, turn: Turn, ran: list[tuple[Waiting, Outcome]]) -> None:
        """Send a turn's results on: what is bound for one peer travels as one message."""
        began = time.monotonic()
        hidden: dict[Address, list[tuple[Step, Tensor]]] = defaultdict(list)
        passed: list[tuple[Step, int]] = []
        passed_to: Address | None = None
        ring: dict[Address, list[tuple[Step, int]]] = defaultdict(list)
        sampled: list[SampledToken] = []
        failed: list[tuple[StageSession, Waiting, Outcome]] = []
        output, handed = turn.result.output, turn.result.handed
        for step, outcome in ran:
            origin: Routed = step.origin
            session = origin.session
            if self._sessions.get(session.session) is not session:
                self._loop.tally.dropped_stale += 1
                continue
            if outcome.failure is not None:
                session.failed()
                if session.over:
                    self._loop.forget(session.session)
                failed.append((session, step, outcome))
                continue
            queue_us = int((turn.started - step.arrived) * 1e6)
            hop = HopTime(queue_us, turn.spent_us, self._encode_us, turn.result.lent_us)
            onward = session.onward(origin.step, step.seq_pos, step.n, hop)
            if isinstance(outcome.picked, Picked):
                token, logprobs = outcome.picked.token, outcome.picked.logprobs
                said = SampledToken(session.session, session.epoch, session.length, token, onward.times, logprobs)
                sampled.append(said)
                following = session.sampled(token)
                if following is not None:
                    ring[session.next].append((following, token))
                elif session.over:
                    self._loop.forget(session.session)
            elif session.ends(origin.step.until):
                self._report(Filled(session.session, session.epoch, session.stage, step.seq_pos + step.n))
            elif output is not None or handed is not None:
                if session.gather and step.n == 1:
                    self._loop.expect(session.session, step.slot)
                if output is not None:
                    hidden[session.next].append((onward, output[outcome.first : outcome.first + step.n]))
                else:
                    passed.append((onward, outcome.first))
                    passed_to = session.next
        for address, tokens in ring.items():
            self._go_round(address, tokens)
        if sampled:
            self._report(Sampled(sampled))
        engine = turn.engine
        for address, delivery in hidden.items():
            await self._onward.hidden(address, delivery, engine.dtype)
        if handed is not None and passed_to is None:
            self._handovers.take_back(handed)
        elif handed is not None and passed_to is not None:
            await self._onward.handed_hidden(passed_to, passed, handed, engine.spec.hidden_size, engine.dtype)
        self._encode_us = int((time.monotonic() - began) * 1e6)
        for session, step, outcome in failed:
            if self._sessions.get(session.session) is session:
                await self._step_failed(session, step, outcome)

    def _go_round(self, address: Address, tokens: list[tuple[Step, int]]) -> None:
        """Close the ring: the tokens become the first stage's next steps. A ring of one stage needs
        no socket."""
        if address != self._actor.address:
            self._onward.tokens(address, tokens)
            return
        now = time.monotonic()
        for step, token in tokens:
            self._loop.add(_waiting(self._sessions[step.session], step, torch.tensor([token]), now))

    # ---- what the coordinator hears --------------------------------------------------------------

    async def _step_failed(self, session: StageSession, step: Waiting, outcome: Outcome) -> None:
        error = outcome.failure
        assert error is not None
        if error.kind == "kv_full":
            self._loop.park(step)
            if await self._make_room():
                return  # what is parked is tried again
        fault = Fault(error.kind, error.message, error.where or self._actor.name)
        self._report(StepFailed(session.session, session.epoch, session.stage, outcome.have, fault))

    def _steps_failed(self, steps: Sequence[Step], error: ZrtError) -> None:
        fault = Fault(error.kind, error.message, error.where or self._actor.name)
        for step in steps:
            session = self._sessions.get(step.session)
            self._report(StepFailed(step.session, step.epoch, session.stage if session else -1, 0, fault))

    def _report(self, message: SessionMessage) -> None:
        """Tell the coordinator; one that is lost, or takes nothing, will open the session anew."""
        try:
            self._actor.tell_coordinator(message)
        except ZrtError as error:
            what = type(message).__name__
            self._complaints.add(what, f"the coordinator does not take a {what}: {error}")


def _waiting(session: StageSession, step: Step, rows: Tensor | HandedRows, now: float) -> Waiting:
    return Waiting(step.session, step.seq_pos, step.n, rows, now, step.slot, Routed(session, step))


def _goes_on(step: Waiting) -> bool:
    """Whether something follows this step elsewhere: the token picked after it, or its way through
    the other stages."""
    origin: Routed = step.origin
    session, until = origin.session, origin.step.until
    return session.samples(step.seq_pos, step.n, until) if session.is_last else not session.ends(until)


def _check_size(message: Open, engine: Holding) -> None:
    """ZrtError context_exceeded, bad_request: more than a session can have."""
    if message.length > engine.cache.context:
        text = f"open: a history of {message.length} tokens, the context holds {engine.cache.context}"
        raise ZrtError("context_exceeded", text)
    check_keys(message.page_keys, engine.max_pages)


def _sampler(message: Open, vocab: int) -> Sampler:
    return Sampler(
        message.sampling, tokens=message.tokens, prompt_length=message.prompt_length, eos=message.eos, vocab=vocab
    )
