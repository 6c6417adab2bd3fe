"""What the stages report of the live generations: sampled tokens, prompts filled in, failed steps.

Receives from block servers: Sampled, Filled, StepFailed.
"""

import logging
import time

from zrt.actors.coordinator.sessions.admission import Admission
from zrt.actors.coordinator.sessions.generation import Generation
from zrt.actors.coordinator.sessions.generations import Generations
from zrt.actors.coordinator.sessions.latencies import Latencies
from zrt.actors.coordinator.sessions.routing import BLAMED
from zrt.actors.coordinator.sessions.session import SessionState
from zrt.runtime.actor.actor import Actor
from zrt.runtime.actor.envelope import Envelope
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.sessions import Filled, Sampled, SampledToken, StepFailed

log = logging.getLogger(__name__)


class StageReports:
    """The reports that the coordinator `actor` gets. `tokens` counts those sampled, `latencies`
    what clients waited for them, `dropped_stale` what was reported too late."""

    def __init__(self, actor: Actor, generations: Generations, admission: Admission) -> None:
        self.tokens = 0
        self.latencies = Latencies()
        self.dropped_stale = 0
        self._generations = generations
        self._admission = admission
        self._rerouting = generations.rerouting
        self._routing = generations.rerouting.routing
        actor.handle(Sampled, self._on_sampled)
        actor.handle(Filled, self._on_filled)
        actor.handle(StepFailed, self._on_step_failed)

    def _on_sampled(self, message: Sampled, envelope: Envelope) -> None:
        sender = envelope.header.incarnation
        now = time.monotonic()
        for sampled in message.tokens:
            generation = self._current(sampled.session, sampled.epoch, sender)
            if generation is not None:
                self._take(generation, sampled, now)

    def _take(self, generation: Generation, sampled: SampledToken, now: float) -> None:
        session = generation.session
        if generation.first_token:
            self.latencies.inter_token.observe(now - generation.last_token)
        else:
            self.latencies.first_token.observe(now - generation.created)
        generation.take(sampled, now)
        self._routing.clear(generation)
        self.tokens += 1
        if log.isEnabledFor(logging.DEBUG):
            log.debug("token %d", sampled.index, extra={"session": session.id, "step": sampled.index})
        if session.state is not SessionState.DECODING:
            session.move(SessionState.DECODING)
        try:
            piece = session.push(sampled.index, sampled.token, sampled.logprobs)
        except ZrtError as error:
            self._routing.retry(generation, session.epoch, error)
            return
        self._admission.grow(session.id, len(session.tokens))
        if piece is not None:
            self._generations.show(generation, piece)
        self._generations.renew(generation)

    def _on_filled(self, message: Filled, envelope: Envelope) -> None:
        generation = self._current(message.session, message.epoch, envelope.header.incarnation)
        if generation is not None:
            generation.fill(message.upto, time.monotonic())

    def _on_step_failed(self, message: StepFailed, envelope: Envelope) -> None:
        generation = self._current(message.session, message.epoch, envelope.header.incarnation)
        if generation is None:
            return
        fault = message.fault
        if fault.kind == "kv_full" and self._rerouting.make_room(fault.where):
            return  # the step is parked there, and runs when pages come back
        error = ZrtError.of(fault.kind, fault.message, fault.where)
        if error.kind not in BLAMED or self._routing.blame(generation, error):
            self._routing.retry(generation, message.epoch, error)

    def _current(self, session: int, epoch: int, sender: int) -> Generation | None:
        """Return the generation, if it still runs in this epoch and the sender is on its route."""
        generation = self._generations.get(session)
        if (
            generation is None
            or generation.session.epoch != epoch
            or all(address.incarnation != sender for address in generation.session.route)
        ):
            self.dropped_stale += 1
            return None
        return generation
