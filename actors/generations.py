"""The coordinator's sessions: admitted, routed, streamed, ended. A re-route is the same path as the first route: a new epoch,
an open on every replica, a replay of what they lack.
"""

import asyncio
import logging
import secrets
import time
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from zrt.runtime.actor import Actor, Bare
from zrt.runtime.detokenise import Detokeniser
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.client import (
    Accepted,
    ClientEvent,
    Error,
    Finished,
    Generate,
    Phase,
    Progress,
    SessionInfo,
    StageShare,
    Timings,
)
from zrt.runtime.messages.client import Piece as PieceEvent
from zrt.runtime.messages.control import (
    Address,
    Close,
    ControlMessage,
    Credit,
    Filled,
    Open,
    Opened,
    Sampled,
    SampledToken,
    StepFailed,
)
from zrt.runtime.messages.header import Step
from zrt.runtime.messages.inference import InferenceRequest
from zrt.runtime.prompts import Prompts
from zrt.runtime.roster import Roster
from zrt.runtime.sessions import Piece, Session, Span, State, replay_spans
from zrt.runtime.stops import StopMatcher
from zrt.runtime.wire import encode_event

log = logging.getLogger(__name__)

CREDIT = 16  # tokens a ring may produce unasked
OPEN_DEADLINE_S = 10.0
RETRY_S = (0.2, 0.4, 0.8, 1.6, 3.2)  # pauses between attempts to route a session; the last one repeats
ATTEMPTS = 30  # routing attempts without a token in between
KEEPALIVE_S = 1.0  # a client hears of its session at least this often
GAPS: frozenset[str] = frozenset({"kv_gap", "warming_up", "model_not_loaded", "stage_lost", "deadline", "overloaded"})
"""Kinds of a failed step that a new route mends."""

PHASES: dict[State, Phase] = {
    State.QUEUED: "queued",
    State.PREFILL: "prefill",
    State.DECODING: "decoding",
    State.WAITING: "waiting",
    State.REPLAYING: "replaying",
}


@dataclass(slots=True)
class Generation:
    """A session with its client and its clock (monotonic seconds)."""

    session: Session
    client: Bare
    id: str
    created: float
    told: float
    admitted: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    filled: int = 0
    attempts: int = 0
    fault: str = ""
    spent: list[list[int]] = field(default_factory=list)  # a stage: [queue µs, compute µs]

    def timings(self) -> Timings:
        decoded = self.session.completion_tokens - 1
        seconds = self.last_token - self.first_token
        return Timings(
            queue_ms=round((self.admitted - self.created) * 1e3, 3) if self.admitted else 0.0,
            ttft_ms=round((self.first_token - self.created) * 1e3, 3) if self.first_token else 0.0,
            decode_tok_s=round(decoded / seconds, 3) if decoded > 0 and seconds > 0 else 0.0,
        )


class Generations:
    """All live sessions. `capacity` is the number of tokens the scarcest stage's KV pool holds, in pages of `page_tokens`."""

    def __init__(
        self, actor: Actor, roster: Roster, prompts: Prompts, *, sessions: int, queue: int, capacity: int, page: int
    ) -> None:
        self._actor = actor
        self._roster = roster
        self._prompts = prompts
        self._max_sessions = sessions
        self._max_queue = queue
        self._capacity = capacity
        self._page = page
        self._live: dict[int, Generation] = {}
        self._queue: deque[Generation] = deque()
        self._reserved = 0
        self.dropped_stale = 0

    def __len__(self) -> int:
        return len(self._live)

    # ---- clients ------------------------------------------------------------------------------------------------

    async def start(self, client: Bare, request: Generate) -> None:
        """Accept a request: tokenise, check that it can ever fit, queue."""
        created = time.monotonic()
        if len(self._queue) >= self._max_queue:
            raise ZrtError("overloaded", f"{len(self._queue)} sessions wait already; try again in a few seconds")
        prompt = await self._prompts.encode(request)
        seed = secrets.randbits(32) if request.seed is None else request.seed
        sampling = self._prompts.sampling(request, seed)
        length = self._prompts.max_length(len(prompt), request.max_tokens)
        if self._pages(length) > self._capacity:
            needed, held = self._pages(length), self._capacity
            raise ZrtError(
                "kv_full",
                f"{length} tokens need {needed} KV pages, a stage has {held}: lower max_tokens or raise [kv] bytes",
            )
        tokenizer = self._prompts.tokenizer
        session = Session(
            self._new_id(),
            prompt,
            length,
            self._prompts.eos,
            sampling,
            Detokeniser(tokenizer) if tokenizer else None,
            StopMatcher(request.stop),
        )
        generation = Generation(session, client, request.id, created, created)
        self._live[session.id] = generation
        self._tell(generation, Accepted(id=request.id, session=session.id, seed=seed, prompt_tokens=len(prompt)))
        self._queue.append(generation)
        self._admit()
        if session.state is State.QUEUED:
            self._tell(generation, Progress(id=request.id, phase="queued", done=0, total=len(self._queue)))

    def cancel(self, session: int) -> None:
        """ZrtError unknown_session when it is not live (any more)."""
        generation = self._live.get(session)
        if generation is None:
            raise ZrtError("unknown_session", f"no session {session:016x} is running")
        self._emit(generation, generation.session.finish("cancelled"))

    def cancel_of(self, client: Bare, request: str) -> None:
        """The client's own generation with this id, if it is live."""
        for generation in self._live.values():
            if generation.client.peer == client.peer and generation.id == request:
                self.cancel(generation.session.id)
                return
        raise ZrtError("unknown_session", f"no generation {request!r} of this client is running")

    def fail_all(self, error: ZrtError) -> None:
        for generation in list(self._live.values()):
            self._fail(generation, error)

    def keep_alive(self) -> None:
        """A client hears at least once a second; this is also how a client that is gone is noticed."""
        before = time.monotonic() - KEEPALIVE_S
        for generation in list(self._live.values()):
            if generation.told < before:
                self._tell(generation, self._progress(generation))

    def infos(self) -> Iterator[SessionInfo]:
        for generation in self._live.values():
            session = generation.session
            yield SessionInfo(
                session.id,
                session.state,
                session.prompt_tokens,
                session.completion_tokens,
                session.epoch,
                [address.name for address in session.route],
            )

    def _new_id(self) -> int:
        while (number := secrets.randbits(63)) in self._live or number == 0:
            pass
        return number

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._page)

    def _progress(self, generation: Generation) -> Progress:
        session = generation.session
        done, total = generation.filled, session.prompt_tokens
        if session.state is State.QUEUED:
            done, total = self._queue.index(generation), len(self._queue)
        elif session.state is State.DECODING:
            done, total = session.completion_tokens, session.max_length - session.prompt_tokens
        return Progress(id=generation.id, phase=PHASES[session.state], done=done, total=total, message=generation.fault)

    def _tell(self, generation: Generation, event: ClientEvent) -> None:
        """A client that is gone, or that does not read, loses its session."""
        generation.told = time.monotonic()
        try:
            there = self._actor.reply_bare(generation.client, encode_event(event))
        except ZrtError as error:
            log.warning("client of session %016x: %s", generation.session.id, error)
            there = False
        if not there and not generation.session.finished:
            generation.session.finish("cancelled")
            self._end(generation)

    # ---- admission ----------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        while self._queue:
            generation = self._queue[0]
            running = len(self._live) - len(self._queue)
            pages = self._pages(generation.session.max_length)
            if running >= self._max_sessions or self._reserved + pages > self._capacity:
                return
            self._queue.popleft()
            self._reserved += pages
            generation.admitted = time.monotonic()
            self._reroute(generation)

    # ---- routes -------------------------------------------------------------------------------------------------

    def routes_changed(self) -> None:
        """A stage became ready, or is lost for good: sessions that wait go on, or end."""
        lost = self._roster.stage_lost()
        for generation in list(self._live.values()):
            if generation.session.state is not State.WAITING:
                continue
            if lost is not None:
                self._fail(generation, ZrtError("stage_lost", lost))
            else:
                self._reroute(generation)

    def peer_lost(self, address: Address) -> None:
        """Sessions that ran through this process take another route."""
        for generation in list(self._live.values()):
            if address in generation.session.route:
                generation.fault = f"{address.name} is gone"
                self._reroute(generation)

    def _reroute(self, generation: Generation, delay: float = 0.0) -> None:
        session = generation.session
        session.epoch += 1
        self._actor.spawn(self._route(generation, session.epoch, delay), f"route {session.id:016x}")

    async def _route(self, generation: Generation, epoch: int, delay: float) -> None:
        session = generation.session
        if delay:
            await asyncio.sleep(delay)
        if session.epoch != epoch or session.finished:
            return
        left, session.route = session.route, self._roster.route() or []
        for address in left:
            if address not in session.route:
                self._send(address, Close(session.id, epoch))
        if not session.route:
            self._wait(generation)
            return
        length = len(session.tokens)
        session.credit = length + CREDIT
        try:
            replies = await asyncio.gather(
                *(
                    self._actor.ask(address, self._open(session, stage, length), timeout=OPEN_DEADLINE_S)
                    for stage, address in enumerate(session.route)
                )
            )
        except ZrtError as error:
            self._retry(generation, epoch, error)
            return
        if session.epoch != epoch or session.finished:
            return
        have = [reply.body.have for reply in replies if isinstance(reply.body, Opened)]
        if len(have) != len(session.route):
            self._retry(generation, epoch, ZrtError("internal", "a replica did not answer `opened`"))
            return
        session.move(State.PREFILL if session.completion_tokens == 0 else State.REPLAYING)
        generation.filled = min(have)
        self._tell(generation, self._progress(generation))
        for span in replay_spans(have, length):
            self._send_span(session, span)

    def _open(self, session: Session, stage: int, length: int) -> Open:
        message = Open(session.id, session.epoch, session.slot, stage, session.route, length)
        if stage == len(session.route) - 1:
            message.tokens = session.tokens[:length]
            message.eos = sorted(session.eos)
            message.max_length = session.max_length
            message.credit = session.credit
            message.sampling = session.sampling
        return message

    def _send_span(self, session: Session, span: Span) -> None:
        ids = array("I", session.tokens[span.start : span.stop])
        step = Step(session.id, session.epoch, span.start, len(ids), session.slot, span.until)
        request = InferenceRequest(session.id, span.start, "token_ids", [len(ids)], memoryview(ids).cast("B"))
        try:
            self._actor.tell(session.route[0], request, steps=[step], dtype="uint32")
        except ZrtError as error:
            generation = self._live.get(session.id)
            if generation is not None:
                self._retry(generation, session.epoch, error)

    def _retry(self, generation: Generation, epoch: int, error: ZrtError) -> None:
        """Try another route a little later, unless that was done already or there is no hope."""
        session = generation.session
        if session.epoch != epoch or session.finished:
            return
        generation.fault = str(error)
        if error.kind not in GAPS:
            self._fail(generation, error)
            return
        generation.attempts += 1
        if generation.attempts > ATTEMPTS:
            self._fail(generation, ZrtError("stage_lost", f"{ATTEMPTS} attempts failed, the last with {error}"))
            return
        delay = 0.0 if generation.attempts == 1 else RETRY_S[min(generation.attempts - 2, len(RETRY_S) - 1)]
        self._reroute(generation, delay)

    def _wait(self, generation: Generation) -> None:
        if generation.session.state is not State.WAITING:
            generation.session.move(State.WAITING)
        lost = self._roster.stage_lost()
        if lost is not None:
            self._fail(generation, ZrtError("stage_lost", lost))
            return
        self._tell(generation, self._progress(generation))

    # ---- what the stages say ------------------------------------------------------------------------------------

    def on_sampled(self, message: Sampled) -> None:
        now = time.monotonic()
        for sampled in message.tokens:
            generation = self._current(sampled.session, sampled.epoch)
            if generation is not None:
                self._take(generation, sampled, now)

    def _take(self, generation: Generation, sampled: SampledToken, now: float) -> None:
        session = generation.session
        generation.attempts = 0
        generation.fault = ""
        if not generation.first_token:
            generation.first_token = now
        generation.last_token = now
        if not generation.spent:
            generation.spent = [[0, 0] for _ in session.route]
        for spent, hop in zip(generation.spent, sampled.times, strict=False):
            spent[0] += hop.queue
            spent[1] += hop.compute
        if session.state is not State.DECODING:
            session.move(State.DECODING)
        try:
            piece = session.push(sampled.index, sampled.token)
        except ZrtError as error:
            self._retry(generation, session.epoch, error)
            return
        if not session.finished and session.credit - len(session.tokens) <= CREDIT // 2:
            session.credit = len(session.tokens) + CREDIT
            self._send(session.route[-1], Credit(session.id, session.epoch, session.credit))
        if piece is not None:
            self._emit(generation, piece)

    def on_filled(self, message: Filled) -> None:
        generation = self._current(message.session, message.epoch)
        if generation is not None:
            generation.filled = max(generation.filled, message.upto)
            self._tell(generation, self._progress(generation))

    def on_step_failed(self, message: StepFailed) -> None:
        generation = self._current(message.session, message.epoch)
        if generation is not None:
            fault = message.fault
            self._retry(generation, message.epoch, ZrtError.of(fault.kind, fault.message, fault.where))

    def _current(self, session: int, epoch: int) -> Generation | None:
        generation = self._live.get(session)
        if generation is None or generation.session.epoch != epoch:
            self.dropped_stale += 1
            return None
        return generation

    # ---- the end ------------------------------------------------------------------------------------------------

    def _emit(self, generation: Generation, piece: Piece) -> None:
        session = generation.session
        if piece.text or piece.token_ids:
            event = PieceEvent(id=generation.id, index=piece.index, text=piece.text, token_ids=piece.token_ids)
            self._tell(generation, event)
        if piece.finish is None or session.id not in self._live:
            return
        self._tell(
            generation,
            Finished(
                id=generation.id,
                reason=piece.finish,
                prompt_tokens=session.prompt_tokens,
                completion_tokens=session.completion_tokens,
                seed=session.sampling.seed,
                timings=generation.timings(),
                stages=self._shares(generation),
            ),
        )
        self._end(generation)

    def _shares(self, generation: Generation) -> list[StageShare]:
        shares = []
        for address, (queue, compute) in zip(generation.session.route, generation.spent, strict=False):
            entry = self._roster.find(address.name)
            blocks = f"{entry.seat.first}-{entry.seat.last}" if entry and entry.seat else ""
            shares.append(StageShare(address.name, blocks, queue / 1e3, compute / 1e3))
        return shares

    def _fail(self, generation: Generation, error: ZrtError) -> None:
        if not generation.session.finished:
            generation.session.finish("error")
        self._tell(generation, Error(id=generation.id, kind=error.kind, message=error.message, where=error.where))
        self._end(generation)

    def _end(self, generation: Generation) -> None:
        """Free what the session holds everywhere; the next in the queue may come."""
        session = generation.session
        if self._live.pop(session.id, None) is None:
            return
        if generation.admitted:
            self._reserved -= self._pages(session.max_length)
        else:
            self._queue.remove(generation)
        for address in session.route:
            self._send(address, Close(session.id, session.epoch))
        self._admit()

    def _send(self, address: Address, message: ControlMessage) -> None:
        """Tell a replica; if it is gone, that is heard elsewhere."""
        try:
            self._actor.tell(address, message)
        except ZrtError as error:
            log.debug("%s for %s: %s", type(message).__name__, address.name, error)
