"""The coordinator's sessions: accepted, admitted, streamed, ended."""

import logging
import secrets
import time
from collections.abc import Iterator

from msgspec.structs import replace

from zrt.actors.coordinator.event_log import EventLog
from zrt.actors.coordinator.fleet.roster import Roster
from zrt.actors.coordinator.metrics import Times
from zrt.actors.coordinator.sessions.admission import Admission
from zrt.actors.coordinator.sessions.delivery import Delivery, Leases, origin
from zrt.actors.coordinator.sessions.generation import Generation
from zrt.actors.coordinator.sessions.requests import Requests
from zrt.actors.coordinator.sessions.rerouting import Rerouting
from zrt.actors.coordinator.sessions.routing import BLAMED
from zrt.actors.coordinator.sessions.session import Session, SessionState, TextPiece
from zrt.runtime.actor.actor import Actor
from zrt.runtime.actor.envelope import Bare, Envelope
from zrt.runtime.actor.timers import Periodic
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.client import Error, Follow, Generate, Resume, StageShare
from zrt.runtime.messages.cluster import SessionInfo
from zrt.runtime.messages.sampling import Sampling
from zrt.runtime.messages.sessions import Filled, Sampled, SampledToken, StepFailed
from zrt.runtime.page_keys import PageKeys
from zrt.runtime.text.detokenizer import Detokenizer
from zrt.runtime.text.stop_strings import StopMatcher

log = logging.getLogger(__name__)

TEND_S = 0.5
QUIET_S = (
    0.5  # a client that heard nothing for so long is told how its session gets on, so it hears at least once a second
)


class Generations:
    """All live sessions. `lease_s`: how long a client may take nothing, `idle_s`: how long a
    session may come to nothing, before it ends."""

    def __init__(
        self,
        actor: Actor,
        roster: Roster,
        prompts: Requests,
        admission: Admission,
        *,
        model: str,
        page_tokens: int,
        lease_s: float,
        idle_s: float,
        happened: EventLog,
    ) -> None:
        self.began = time.monotonic()
        self.dropped_stale = 0
        self.tokens = 0
        self.times = Times()
        self.happened = happened
        self.closed = False
        """No new session is taken: the cluster is going down."""
        self._actor = actor
        self._roster = roster
        self._prompts = prompts
        self._admission = admission
        self._model = model
        self._page_tokens = page_tokens
        self._lease_s = lease_s
        self._idle_s = idle_s
        self._live: dict[int, Generation] = {}
        self.moves = Rerouting(
            actor, roster.pipeline, admission, self._live, happened, fail=self._fail, admit=self._admit
        )
        self._routing = self.moves.routing
        self._over = Leases(lease_s)
        self._tending: Periodic | None = None

    def __len__(self) -> int:
        return len(self._live)

    # ---- clients ---------------------------------------------------------------------------------

    async def start(self, client: Bare, request: Generate) -> None:
        """Accept a request: tokenise, check that it can ever fit, queue. ZrtError: what the client
        is told instead."""
        created = time.monotonic()
        prompt = await self._prompts.encode(request)
        if self.closed:
            raise ZrtError("draining", "the cluster is going down: it takes no new sessions")
        sampling = self._prompts.sampling(request)
        answers = [self._generation(client, request, prompt, sampling, choice, created) for choice in range(request.n)]
        self._offer(answers)
        for generation in answers:
            self._live[generation.id] = generation
            generation.accepted(self._prompts.notes, self._lease_s)
            log.info("accepted: %d prompt tokens", len(prompt), extra={"session": generation.id})
        if self._tending is None:
            self._tending = self._actor.every(TEND_S, self._tend)
        self._admit()
        for generation in answers:
            if self._admission.place(generation.id) is not None:
                self._tell(generation)

    def _generation(
        self, client: Bare, request: Generate, prompt: list[int], sampling: Sampling, choice: int, created: float
    ) -> Generation:
        """One answer of a request; each samples with a seed of its own."""
        tokenizer = self._prompts.tokenizer
        session = Session(
            self._new_id(),
            prompt[:],
            self._prompts.max_length(len(prompt), request.max_tokens),
            self._prompts.ends(request),
            replace(sampling, seed=sampling.seed + choice),
            Detokenizer(tokenizer, prompt, self._prompts.eos) if tokenizer else None,
            StopMatcher(request.stop),
        )
        delivery = Delivery(self._actor, client, request.id, created, choice=choice)
        keys = PageKeys(self._model, self._page_tokens)
        return Generation(session, delivery, keys, created, created, choice)

    def _offer(self, answers: list[Generation]) -> None:
        """Queue all of a request's answers, or none."""
        self._admission.check_number(len(answers))
        for count, generation in enumerate(answers):
            session = generation.session
            try:
                self._admission.offer(session.id, session.prompt_tokens, session.max_length)
            except ZrtError:
                for offered in answers[:count]:
                    self._admission.remove(offered.id)
                raise

    def resume(self, client: Bare, request: Resume) -> None:
        """Go on with a session over another connection. ZrtError as `Resume` says."""
        now = time.monotonic()
        name = f"session {request.session:016x}"
        generation = self._live.get(request.session)
        delivery = generation.delivery if generation is not None else self._over.find(request.session)
        if delivery is None:
            if not request.resume.startswith(origin(self._actor)):
                raise ZrtError("coordinator_lost", f"the coordinator that ran {name} is gone, and the session with it")
            text = f"{name} is kept no longer: its client was away, or it had ended, for more than {self._lease_s:g} s"
            raise ZrtError("resume_expired", text)
        if not secrets.compare_digest(request.resume.encode(), delivery.resume.encode()):
            raise ZrtError("unauthorized", f"{name} is resumed with what its `accepted` says in `resume`")
        delivery.move(client, request, now)
        if generation is None:
            self._over.keep(request.session, delivery, now)
        else:
            self._renew(generation)
            self._tell(generation)

    def follow(self, client: Bare, request: Follow) -> None:
        """Let another client hear a session. ZrtError as `Follow` says."""
        self._find(request.session).delivery.follow(client, request.id)

    def unfollow(self, peer: bytes, request: str) -> None:
        for generation in self._live.values():
            generation.delivery.unfollow(peer, request)

    def cancel(self, session: int) -> None:
        """ZrtError unknown_session when it is not live (any more)."""
        generation = self._find(session)
        self._show(generation, generation.session.finish("cancelled"))

    def _find(self, session: int) -> Generation:
        generation = self._live.get(session)
        if generation is None:
            raise ZrtError("unknown_session", f"no session {session:016x} is running")
        return generation

    def cancel_of(self, client: Bare, request: str) -> None:
        """All that is live of the client's own request with this id."""
        answers = self._answers(client.peer, request)
        if not answers:
            raise ZrtError("unknown_session", f"no generation {request!r} of this client is running")
        for generation in answers:
            self.cancel(generation.id)

    def _answers(self, peer: bytes, request: str) -> list[Generation]:
        deliveries = ((generation, generation.delivery) for generation in self._live.values())
        return [generation for generation, to in deliveries if to.client.peer == peer and to.request == request]

    def fail_all(self, error: ZrtError) -> None:
        for generation in list(self._live.values()):
            self._fail(generation, error)

    def _tend(self) -> None:
        """Clients hear at least once a second, stalled ones are tried again or given up; until
        there is nobody left to tend."""
        now = time.monotonic()
        for generation in list(self._live.values()):
            delivery = generation.delivery
            if delivery.stalled_since is not None:
                self._tend_stalled(generation, now - delivery.stalled_since)
            elif now - generation.progressed > self._idle_s and self._expected(generation):
                self._fail(generation, ZrtError("deadline", f"nothing came of it for {self._idle_s:g} s"))
            elif delivery.told < now - QUIET_S:
                self._tell(generation)
        self._over.tend(now)
        if self._tending is not None and not self._live and not self._over:
            self._tending.cancel()
            self._tending = None

    def _expected(self, generation: Generation) -> bool:
        """Whether something should come of it: it neither waits for its turn nor is parked."""
        return generation.session.state is not SessionState.PARKED and self._admission.place(generation.id) is None

    def _tend_stalled(self, generation: Generation, seconds: float) -> None:
        if generation.delivery.retry():
            self._renew(generation)
        elif seconds > self._lease_s:
            log.warning("session %016x ends: its client took nothing for %.0f s", generation.id, seconds)
            generation.session.finish("cancelled")
            self._end(generation)

    def _tell(self, generation: Generation) -> None:
        """How it gets on, or its place in the queue."""
        generation.progress(self._admission.place(generation.id))

    def infos(self) -> Iterator[SessionInfo]:
        """All live sessions, the oldest first."""
        now = time.monotonic()
        for generation in self._live.values():
            yield generation.info(self.began, now, self._page_tokens)

    def _new_id(self) -> int:
        while (number := secrets.randbits(63)) in self._live or number == 0:
            pass
        return number

    # ---- admission -------------------------------------------------------------------------------

    def _admit(self) -> None:
        for session, slot in self._admission.admit():
            generation = self._live[session]
            generation.session.slot = slot
            generation.progressed = time.monotonic()
            generation.admitted = generation.admitted or generation.progressed
            self._routing.begin(generation)

    # ---- what the stages say ---------------------------------------------------------------------

    def on_sampled(self, message: Sampled, envelope: Envelope) -> None:
        sender = envelope.header.incarnation
        now = time.monotonic()
        for sampled in message.tokens:
            generation = self._current(sampled.session, sampled.epoch, sender)
            if generation is not None:
                self._take(generation, sampled, now)

    def _take(self, generation: Generation, sampled: SampledToken, now: float) -> None:
        session = generation.session
        if generation.first_token:
            self.times.between.observe(now - generation.last_token)
        else:
            self.times.first.observe(now - generation.created)
        generation.sampled(sampled, now)
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
            self._show(generation, piece)
        self._renew(generation)

    def _renew(self, generation: Generation) -> None:
        session = generation.session
        if session.state is SessionState.DECODING:
            self._routing.renew(generation, self._admission.rebalance(session.id))

    def on_filled(self, message: Filled, envelope: Envelope) -> None:
        generation = self._current(message.session, message.epoch, envelope.header.incarnation)
        if generation is not None:
            generation.progressed = time.monotonic()
            generation.filled = max(generation.filled, message.upto)
            generation.progress()

    def on_step_failed(self, message: StepFailed, envelope: Envelope) -> None:
        generation = self._current(message.session, message.epoch, envelope.header.incarnation)
        if generation is None:
            return
        fault = message.fault
        if fault.kind == "kv_full" and self.moves.make_room(fault.where):
            return  # the step is parked there, and runs when pages come back
        error = ZrtError.of(fault.kind, fault.message, fault.where)
        if error.kind not in BLAMED or self._routing.blame(generation, error):
            self._routing.retry(generation, message.epoch, error)

    def _current(self, session: int, epoch: int, sender: int) -> Generation | None:
        """The generation, if it still runs in this epoch and the sender is on its route."""
        generation = self._live.get(session)
        if (
            generation is None
            or generation.session.epoch != epoch
            or all(address.incarnation != sender for address in generation.session.route)
        ):
            self.dropped_stale += 1
            return None
        return generation

    # ---- the end ---------------------------------------------------------------------------------

    def _show(self, generation: Generation, piece: TextPiece) -> None:
        if piece.text or piece.token_ids:
            generation.piece(piece)
        if piece.finish is not None:
            generation.finished(self._shares(generation))
            self._end(generation)

    def _shares(self, generation: Generation) -> list[StageShare]:
        shares = []
        for address, (queue, compute, encode, lent) in zip(generation.session.route, generation.spent, strict=False):
            entry = self._roster.find(address.name)
            blocks = f"{entry.seat.first}-{entry.seat.last}" if entry and entry.seat else ""
            shares.append(StageShare(address.name, blocks, queue / 1e3, compute / 1e3, encode / 1e3, lent / 1e3))
        return shares

    def _fail(self, generation: Generation, error: ZrtError) -> None:
        """Tell the client, and end all answers to its request."""
        if generation.id not in self._live:
            return
        self.happened.add("error", f"{generation.id:016x}", error.message, error.kind)
        answers = self._answers(generation.delivery.client.peer, generation.delivery.request)
        generation.error(error.kind, error.message, error.where)
        said = Error(id=generation.delivery.request, kind=error.kind, message=error.message, where=error.where)
        for answer in answers:
            if answer is not generation:
                answer.delivery.end(said)
            if not answer.session.finished:
                answer.session.finish("error")
            self._end(answer)

    def _end(self, generation: Generation) -> None:
        """Free what the session holds everywhere; the next in the queue may come."""
        if self._live.pop(generation.id, None) is None:
            return
        ended = generation.session
        log.info(
            "ended (%s): %d tokens",
            ended.reason,
            ended.completion_tokens,
            extra={"session": ended.id, "ms": round((time.monotonic() - generation.created) * 1e3, 1)},
        )
        if generation.delivery.over:
            self._over.keep(generation.id, generation.delivery, time.monotonic())
        self._routing.leave(generation)
        self._admission.remove(generation.id)
        self._admit()
        self._routing.clear(generation)
        self.moves.news.set()
