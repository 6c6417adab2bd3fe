"""How sessions get their routes: a new epoch, an open on every replica, a replay of what these
lack.

The first route, a re-route after a loss, and the return of a preempted session are the same path.
"""

import asyncio
import logging
from typing import Protocol

from msgspec.structs import replace

from zrt.actors.coordinator.fleet.pipeline import Pipeline
from zrt.actors.coordinator.fleet.replica_choice import ReplicaUse
from zrt.actors.coordinator.sessions.generation import Generation
from zrt.actors.coordinator.sessions.quarantine import LOSSES, Quarantine
from zrt.actors.coordinator.sessions.session import ReplaySpan, Session, SessionState, replay_spans
from zrt.runtime.actor.actor import Actor
from zrt.runtime.errors import MEMORY, ZrtError
from zrt.runtime.messages.control import Address
from zrt.runtime.messages.header import Step
from zrt.runtime.messages.inference import InferenceRequest
from zrt.runtime.messages.sessions import Close, Credit, Open, Opened, SessionMessage

log = logging.getLogger(__name__)

CREDIT = 16  # tokens a ring may produce unasked
OPEN_DEADLINE_S = 10.0
CLOSE_DEADLINE_S = 5.0
RETRY_S = (0.0, 0.2, 0.4, 0.8, 1.6, 3.2)  # pauses between attempts to route a session; the last one repeats
ATTEMPTS = 30  # routing attempts without a token in between
MENDED = frozenset(
    {"kv_gap", "kv_full", "warming_up", "model_not_loaded", "stage_lost", "deadline", "overloaded"}
    | {"rank_failed", "worker_failed"}
    | MEMORY
)
"""Kinds of a failed step or open that another attempt may mend."""
BLAMED = frozenset({"rank_failed", "worker_failed"} | MEMORY)
"""Kinds of a failed step that may have been too much for what ran it."""


class SessionKeeper(Protocol):
    """The owner of all live sessions, as the modules see it that change where sessions run."""

    def fail(self, generation: Generation, error: ZrtError) -> None:
        """End a generation that no route can save."""
        ...

    def admit(self) -> None:
        """Admit sessions from the queue for which there is room."""
        ...


class RouteListener(Protocol):
    """The observer that knows how all sessions run, and hears of each route that changes."""

    def crowd(self, slot: int) -> ReplicaUse:
        """Return how many sessions run where at this moment, and how many of them in this slot."""
        ...

    def tell_news(self) -> None:
        """Hear that a session took a route, and may have left another."""
        ...

    def trial_over(self) -> None:
        """Hear that a session in quarantine leaves room for another's trial."""
        ...


class Routing:
    """The routes of the sessions that `keeper` owns, through the replicas of `pipeline`."""

    def __init__(self, actor: Actor, pipeline: Pipeline, keeper: SessionKeeper, listener: RouteListener) -> None:
        self.quarantine = Quarantine()
        self._actor = actor
        self._pipeline = pipeline
        self._keeper = keeper
        self._listener = listener

    def begin(self, generation: Generation, delay: float = 0.0) -> None:
        """Take a (new) route, `delay` seconds from now. What still runs under an older epoch is
        dead from now on."""
        session = generation.session
        epoch = session.begin_epoch()
        self._actor.spawn(self._route(generation, epoch, delay), f"route {session.id:016x}")

    def retry(self, generation: Generation, epoch: int, error: ZrtError) -> None:
        """Try again a little later, since the route of `epoch` failed, unless that was done already
        or there is no hope."""
        session = generation.session
        if session.epoch != epoch or session.finished:
            return
        before = generation.count_attempt(str(error))
        if error.kind not in MENDED:
            self._keeper.fail(generation, error)
        elif before >= ATTEMPTS:
            self._keeper.fail(generation, ZrtError("stage_lost", f"{ATTEMPTS} attempts failed, the last with {error}"))
        else:
            self.begin(generation, RETRY_S[min(before, len(RETRY_S) - 1)])

    def blame(self, generation: Generation, error: ZrtError) -> bool:
        """Hold against a session that a stage was lost in a turn that it was in; return False if
        that was once too often, and has ended it."""
        if not self.quarantine.lost(generation.id):
            return True
        text = f"each of the last {LOSSES} times that this session was run its stage was lost, at last with {error.message}"
        self._keeper.fail(generation, ZrtError(error.kind, text, error.where))
        return False

    def clear(self, generation: Generation) -> None:
        """Let a session out of quarantine: a token came of it, or it has ended."""
        if self.quarantine and self.quarantine.clear(generation.id):
            self._listener.trial_over()

    def renew(self, generation: Generation, slot: int) -> None:
        """Let the ring run on, in this slot, once half its credit is used up; a client that does
        not listen gets none."""
        session = generation.session
        length = len(session.tokens)
        if session.state is not SessionState.DECODING or generation.delivery.stalled:
            return
        if session.credit - length <= CREDIT // 2:
            session.extend_credit(CREDIT)
            session.take_slot(slot)
            self.send(session.route[-1], Credit(session.id, session.epoch, session.credit, slot))

    def leave(self, generation: Generation) -> None:
        """Give up what the session holds on its route; its full pages may serve others."""
        session = generation.session
        for address in session.route:
            self.send(address, Close(session.id, session.epoch, generation.page_keys()))

    async def leave_now(self, generation: Generation) -> None:
        """Give up what the session holds, as `leave` does, and wait until every stage has heard
        so."""
        session = generation.session
        message = Close(session.id, session.epoch, generation.page_keys())
        asked = (self._actor.ask(address, message, timeout=CLOSE_DEADLINE_S) for address in session.route)
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(answer, BaseException):
                log.info("session %016x: a stage did not hear its close: %s", session.id, answer)

    def leave_trial(self, generation: Generation) -> None:
        """End the trial of a session that does not run for now, if it is on trial."""
        if self.quarantine.leave(generation.id):
            self._listener.trial_over()

    def send(self, address: Address, message: SessionMessage) -> None:
        """Tell a replica; a replica that is gone is noticed elsewhere."""
        try:
            self._actor.tell(address, message)
        except ZrtError as error:
            log.debug("%s for %s: %s", type(message).__name__, address.name, error)

    async def _route(self, generation: Generation, epoch: int, delay: float) -> None:
        session = generation.session
        if delay:
            await asyncio.sleep(delay)
        if session.epoch != epoch or session.finished:
            return
        before, route = session.route, self._pipeline.route(session.route, self._listener.crowd(session.slot))
        if route is not None and not self.quarantine.may_run(session.id):
            generation.interrupt("another session, with which a stage was lost as well, is tried first")
            route = None
        session.reroute(self._pipeline.holding(before) if route is None else route)
        self._listener.tell_news()
        for address in before:
            if address not in session.route:
                self.send(address, Close(session.id, epoch))
        if route is None:
            self._wait(generation)
            return
        session.extend_credit(CREDIT)
        try:
            have = await self._open_all(generation)
        except ZrtError as error:
            self.retry(generation, epoch, error)
            return
        if session.epoch != epoch or session.finished:
            return
        generation.replay(min(have))
        for span in replay_spans(have, len(session.tokens)):
            self._send_span(generation, span)

    async def _open_all(self, generation: Generation) -> list[int]:
        """Open the session on its whole route, and return how many tokens each stage holds. No step
        travels before all have answered."""
        session = generation.session
        keys = generation.page_keys()
        gather = self._pipeline.num_slots < self._pipeline.num_stages
        asked = (
            self._actor.ask(address, _open(session, stage, keys, gather), timeout=OPEN_DEADLINE_S)
            for stage, address in enumerate(session.route)
        )
        replies = await asyncio.gather(*asked)
        have = [reply.body.have for reply in replies if isinstance(reply.body, Opened)]
        if len(have) != len(session.route):
            raise ZrtError("internal", "a replica did not answer `opened`")
        return have

    def _send_span(self, generation: Generation, span: ReplaySpan) -> None:
        session = generation.session
        ids = session.tokens[span.start : span.stop]
        step = Step(session.id, session.epoch, span.start, len(ids), session.slot, span.until)
        request = InferenceRequest(session.id, span.start, "token_ids", [len(ids)], memoryview(ids).cast("B"))
        try:
            self._actor.tell(session.route[0], request, steps=[step], dtype="uint32")
        except ZrtError as error:
            self.retry(generation, session.epoch, error)

    def _wait(self, generation: Generation) -> None:
        """Let a session without a complete route wait until the pipeline changes, or end it if that
        cannot help. What is left of its route keeps its KV."""
        self.leave_trial(generation)
        if generation.session.state is not SessionState.WAITING:
            generation.session.move(SessionState.WAITING)
        lost = self._pipeline.stage_lost()
        if lost is not None:
            self._keeper.fail(generation, lost)
        else:
            generation.interrupt(generation.fault or self._pipeline.unready())
            generation.progress()


def _open(session: Session, stage: int, keys: list[int], gather: bool) -> Open:
    """Return what a stage of the session's route is told; the last one, which samples, is told
    more."""
    head = Open(
        session.id,
        session.epoch,
        session.slot,
        stage,
        session.route,
        len(session.tokens),
        keys,
        prompt_length=session.prompt_tokens,
        gather=gather,
    )
    if stage < len(session.route) - 1:
        return head
    return replace(
        head,
        tokens=session.tokens.tolist(),
        eos=sorted(session.eos),
        max_length=session.max_length,
        credit=session.credit,
        sampling=session.sampling,
    )
