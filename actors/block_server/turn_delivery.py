"""The turns of routed steps: what each step's forward is, and where its results go.

Results go straight to the next stage; the last stage samples, tells the coordinator, and closes the
ring to the first.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zrt.actors.block_server.bare_sessions import BareSessions
from zrt.actors.block_server.memory_channels import MemoryChannels
from zrt.actors.block_server.stage_session import StageSession
from zrt.actors.block_server.stage_transfer import StageTransfer
from zrt.actors.block_server.step_owner import Turn
from zrt.actors.block_server.step_queue import Waiting
from zrt.actors.block_server.turn_loop import TurnLoop
from zrt.runtime.actor.log_limiter import LogLimiter
from zrt.runtime.actor.member import Member
from zrt.runtime.compute.engine import Holding
from zrt.runtime.compute.sampler import Picked
from zrt.runtime.compute.shared_rows.channel import HandedRows
from zrt.runtime.compute.turn import Outcome, Passing, Work
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.control import Address, Fault
from zrt.runtime.messages.header import HandedOver, HopTime, Step
from zrt.runtime.messages.sessions import Filled, Sampled, SampledToken, SessionMessage, StepFailed


@dataclass(frozen=True, slots=True)
class RoutedStep(Waiting):
    """A routed session's step, or a part of it, that waits for its turn: the session's table entry,
    and the step as it was received."""

    session: StageSession
    received: Step

    @property
    def left(self) -> int:
        return max(self.n, self.session.length - self.seq_pos)


class TurnDelivery:
    """The owner of routed steps. `sessions` is the table of routed sessions by id, which
    `RoutedSessions` keeps; `bare` may make room for a step that found no KV page."""

    urgent = True

    def __init__(
        self,
        actor: Member,
        loop: TurnLoop,
        memory_channels: MemoryChannels,
        bare: BareSessions,
        sessions: Mapping[int, StageSession],
    ) -> None:
        self._actor = actor
        self._loop = loop
        self._memory_channels = memory_channels
        self._stage_transfer = StageTransfer(actor, memory_channels, loop.tally, self.steps_failed)
        self._bare = bare
        self._sessions = sessions
        self._complaints = LogLimiter(actor.name)
        self._encode_us = 0

    def add(self, session: StageSession, step: Step, rows: Tensor | HandedRows, now: float) -> None:
        """Queue a step that arrived at `now`, with its rows."""
        self._loop.add(RoutedStep(step.session, step.seq_pos, step.n, rows, now, step.slot, self, session, step))

    # ---- the turn --------------------------------------------------------------------------------

    def work(self, engine: Holding, step: RoutedStep) -> Work:
        """Return the step's forward: the last stage samples where the history ends."""
        session = step.session
        samples = session.samples(step.seq_pos, step.n, step.received.until)
        return Work(step.key, step.seq_pos, step.n, step.rows, session.sampler if samples else None)

    def passing(self, steps: Sequence[RoutedStep]) -> Passing | None:
        """Return where the results of a turn of these steps are handed over, if they all go to one
        process and that takes them so."""
        address = steps[0].session.next
        if any(step.session.next != address for step in steps):
            return None
        outlet = self._memory_channels.outlet(address)
        if outlet is None or not any(_goes_on(step) for step in steps):
            return None
        loop = asyncio.get_running_loop()

        def begun(handed: HandedOver, ran: list[int]) -> None:
            loop.call_soon_threadsafe(self._begun, address, [steps[index] for index in ran], handed)

        return Passing(outlet, begun)

    def _begun(self, address: Address, steps: Sequence[RoutedStep], handed: HandedOver) -> None:
        """Let the ring go on with tokens that the device is still picking: the first stage begins
        their steps meanwhile."""
        going: list[tuple[Step, int]] = []
        for row, step in enumerate(steps):
            session = step.session
            if self._sessions.get(session.session) is session and _goes_on(step):
                following = session.begin_next()
                if following is not None:
                    going.append((following, row))
        self._stage_transfer.begun_tokens(address, going, handed)

    async def deliver(self, turn: Turn, ran: Sequence[tuple[RoutedStep, Outcome]]) -> None:
        """Send a turn's results on: those bound for one peer travel as one message."""
        began = time.monotonic()
        hidden: dict[Address, list[tuple[Step, Tensor]]] = defaultdict(list)
        passed: list[tuple[Step, int]] = []
        passed_to: Address | None = None
        ring: dict[Address, list[tuple[Step, int]]] = defaultdict(list)
        sampled: list[SampledToken] = []
        failed: list[tuple[RoutedStep, Outcome]] = []
        output, handed = turn.result.output, turn.result.handed
        for step, outcome in ran:
            session = step.session
            if self._sessions.get(session.session) is not session:
                self._loop.tally.dropped_stale += 1
                continue
            if outcome.failure is not None:
                session.failed()
                if session.over:
                    self._loop.forget(session.session)
                failed.append((step, outcome))
                continue
            queue_us = int((turn.started - step.arrived) * 1e6)
            hop = HopTime(queue_us, turn.spent_us, self._encode_us, turn.result.lent_us)
            going_on = session.onward(step.received, step.seq_pos, step.n, hop)
            if isinstance(outcome.picked, Picked):
                token, logprobs = outcome.picked.token, outcome.picked.logprobs
                said = SampledToken(session.session, session.epoch, session.length, token, going_on.times, logprobs)
                sampled.append(said)
                following = session.sampled(token)
                if following is not None:
                    ring[session.next].append((following, token))
                elif session.over:
                    self._loop.forget(session.session)
            elif session.ends(step.received.until):
                self._report(Filled(session.session, session.epoch, session.stage, step.seq_pos + step.n))
            elif output is not None or handed is not None:
                if session.gather and step.n == 1:
                    self._loop.expect(session.session, step.slot)
                if output is not None:
                    hidden[session.next].append((going_on, output[outcome.first : outcome.first + step.n]))
                else:
                    passed.append((going_on, outcome.first))
                    passed_to = session.next
        for address, tokens in ring.items():
            self.go_round(address, tokens)
        if sampled:
            self._report(Sampled(sampled))
        for address, delivery in hidden.items():
            await self._stage_transfer.hidden(address, delivery, turn.engine.dtype)
        if handed is not None:
            await self._send_handed(turn.engine, handed, passed_to, passed)
        self._encode_us = int((time.monotonic() - began) * 1e6)
        for step, outcome in failed:
            if self._sessions.get(step.session.session) is step.session:
                await self._step_failed(step, outcome)

    async def _send_handed(
        self, engine: Holding, handed: HandedOver, address: Address | None, passed: list[tuple[Step, int]]
    ) -> None:
        """Send word of hidden states that were handed over; take them back where nobody is to get
        them."""
        if address is None:
            self._memory_channels.take_back(handed)
        else:
            await self._stage_transfer.handed_hidden(address, passed, handed, engine.spec.hidden_size, engine.dtype)

    def go_round(self, address: Address, tokens: list[tuple[Step, int]]) -> None:
        """Close the ring: the tokens become the first stage's next steps. A ring of one stage needs
        no socket."""
        if address != self._actor.address:
            self._stage_transfer.tokens(address, tokens)
            return
        now = time.monotonic()
        for step, token in tokens:
            self.add(self._sessions[step.session], step, torch.tensor([token]), now)

    # ---- what the coordinator hears --------------------------------------------------------------

    async def _step_failed(self, step: RoutedStep, outcome: Outcome) -> None:
        error, session = outcome.failure, step.session
        assert error is not None
        if error.kind == "kv_full":
            self._loop.park(step)
            if await self._bare.make_room():
                return  # what is parked is tried again
        fault = Fault(error.kind, error.message, error.where or self._actor.name)
        self._report(StepFailed(session.session, session.epoch, session.stage, outcome.have, fault))

    def steps_failed(self, steps: Sequence[Step], error: ZrtError) -> None:
        """Tell the coordinator that these steps failed, and that nothing of them is held."""
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


def _goes_on(step: RoutedStep) -> bool:
    """Return whether something follows this step elsewhere: the token picked after it, or its way
    through the other stages."""
    session, until = step.session, step.received.until
    return session.samples(step.seq_pos, step.n, until) if session.is_last else not session.ends(until)
