"""Which way sessions go, and how they get there: a new epoch, an open on every replica, a replay of
what they lack.

The first route, a re-route after a loss, and the return of a preempted session are the same path.
"""

import asyncio
import logging
from array import array
from collections.abc import Callable

from zrt.actors.coordinator.fleet.pipeline import Crowd, Pipeline
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


class Routing:
    """`crowd(slot)` tells how many sessions run where at this moment; `fail` ends a generation that
    no route can save; `moved` hears of each that took a route, `cleared` when one that was a
    suspect leaves room for another."""

    def __init__(
        self,
        actor: Actor,
        pipeline: Pipeline,
        *,
        crowd: Callable[[int], Crowd],
        fail: Callable[[Generation, ZrtError], None],
        moved: Callable[[], None],
        cleared: Callable[[], None],
    ) -> None:
        self.suspects = Quarantine()
        self._actor = actor
        self._pipeline = pipeline
        self._crowd = crowd
        self._fail = fail
        self._moved = moved
        self._cleared = cleared

    def begin(self, generation: Generation, delay: float = 0.0) -> None:
        """Take a (new) route, `delay` seconds from now. What still runs under an older epoch is
        dead from now on."""
        session = generation.session
        session.epoch += 1
        self._actor.spawn(self._route(generation, session.epoch, delay), f"route {session.id:016x}")

    def retry(self, generation: Generation, epoch: int, error: ZrtError) -> None:
        """A route failed: try again a little later, unless that was done already or there is no
        hope."""
        session = generation.session
        if session.epoch != epoch or session.finished:
            return
        generation.fault = str(error)
        if error.kind not in MENDED:
            self._fail(generation, error)
            return
        if generation.attempts >= ATTEMPTS:
            self._fail(generation, ZrtError("stage_lost", f"{ATTEMPTS} attempts failed, the last with {error}"))
            return
        delay = RETRY_S[min(generation.attempts, len(RETRY_S) - 1)]
        generation.attempts += 1
        self.begin(generation, delay)

    def blame(self, generation: Generation, error: ZrtError) -> bool:
        """A stage was lost in a turn that this session was in. False if that was once too often: it
        has ended."""
        if not self.suspects.lost(generation.id):
            return True
        text = f"each of the last {LOSSES} times that this session was run its stage was lost, at last with {error.message}"
        self._fail(generation, ZrtError(error.kind, text, error.where))
        return False

    def clear(self, generation: Generation) -> None:
        """A token came of it, or it has ended."""
        if self.suspects and self.suspects.clear(generation.id):
            self._cleared()

    def renew(self, generation: Generation, slot: int) -> None:
        """Let the ring run on, in this slot, once half its credit is used up; a client that does
        not listen gets none."""
        session = generation.session
        length = len(session.tokens)
        if session.state is not SessionState.DECODING or generation.delivery.stalled:
            return
        if session.credit - length <= CREDIT // 2:
            session.credit = length + CREDIT
            session.slot = slot
            self.send(session.route[-1], Credit(session.id, session.epoch, session.credit, slot))

    def leave(self, generation: Generation) -> None:
        """Give up what the session holds on its route; its full pages may serve others."""
        session = generation.session
        for address in session.route:
            self.send(address, Close(session.id, session.epoch, generation.page_keys()))

    async def leave_now(self, generation: Generation) -> None:
        """As `leave`, and wait until every stage has heard it."""
        session = generation.session
        message = Close(session.id, session.epoch, generation.page_keys())
        asked = (self._actor.ask(address, message, timeout=CLOSE_DEADLINE_S) for address in session.route)
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(answer, BaseException):
                log.info("session %016x: a stage did not hear its close: %s", session.id, answer)

    def leave_trial(self, generation: Generation) -> None:
        """It does not run for now."""
        if self.suspects.leave(generation.id):
            self._cleared()

    def send(self, address: Address, message: SessionMessage) -> None:
        """Tell a replica; if it is gone, that is heard elsewhere."""
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
        before, route = session.route, self._pipeline.route(session.route, self._crowd(session.slot))
        if route is not None and not self.suspects.may_run(session.id):
            route, generation.fault = None, "another session, with which a stage was lost as well, is tried first"
        session.route = self._pipeline.holding(before) if route is None else route
        self._moved()
        for address in before:
            if address not in session.route:
                self.send(address, Close(session.id, epoch))
        if route is None:
            self._wait(generation)
            return
        session.credit = len(session.tokens) + CREDIT
        try:
            have = await self._open_all(generation)
        except ZrtError as error:
            self.retry(generation, epoch, error)
            return
        if session.epoch != epoch or session.finished:
            return
        session.move(SessionState.PREFILL if session.completion_tokens == 0 else SessionState.REPLAYING)
        generation.filled = min(have)
        generation.progress()
        for span in replay_spans(have, len(session.tokens)):
            self._send_span(generation, span)

    async def _open_all(self, generation: Generation) -> list[int]:
        """Open the session on its whole route; how many tokens each stage holds. No step travels
        before all have answered."""
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
        ids = array("I", session.tokens[span.start : span.stop])
        step = Step(session.id, session.epoch, span.start, len(ids), session.slot, span.until)
        request = InferenceRequest(session.id, span.start, "token_ids", [len(ids)], memoryview(ids).cast("B"))
        try:
            self._actor.tell(session.route[0], request, steps=[step], dtype="uint32")
        except ZrtError as error:
            self.retry(generation, session.epoch, error)

    def _wait(self, generation: Generation) -> None:
        """No complete route: the session waits until the pipeline changes, or ends if that cannot
        help. What is left of its route keeps its KV."""
        self.leave_trial(generation)
        if generation.session.state is not SessionState.WAITING:
            generation.session.move(SessionState.WAITING)
        lost = self._pipeline.stage_lost()
        if lost is not None:
            self._fail(generation, lost)
        else:
            generation.fault = generation.fault or self._pipeline.unready()
            generation.progress()


def _open(session: Session, stage: int, keys: list[int], gather: bool) -> Open:
    message = Open(session.id, session.epoch, session.slot, stage, session.route, len(session.tokens), keys)
    message.prompt_length = session.prompt_tokens
    message.gather = gather
    if stage == len(session.route) - 1:
        message.tokens = session.tokens[:]
        message.eos = sorted(session.eos)
        message.max_length = session.max_length
        message.credit = session.credit
        message.sampling = session.sampling
    return message
