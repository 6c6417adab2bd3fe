"""The coordinator's live generations: accepted, admitted, shown to their clients, ended."""

import logging
import secrets
import time
from collections.abc import Iterator
from typing import Final

from msgspec.structs import replace

from zrt.actors.coordinator.event_log import EventLog
from zrt.actors.coordinator.fleet.roster import Roster
from zrt.actors.coordinator.sessions.admission import Admission
from zrt.actors.coordinator.sessions.delivery import Delivery, Leases, origin
from zrt.actors.coordinator.sessions.generation import Generation
from zrt.actors.coordinator.sessions.requests import Requests
from zrt.actors.coordinator.sessions.rerouting import Rerouting
from zrt.actors.coordinator.sessions.session import Session, SessionState, TextPiece
from zrt.runtime.actor.actor import Actor
from zrt.runtime.actor.envelope import Bare
from zrt.runtime.actor.timers import Periodic
from zrt.runtime.errors import ZrtError
from zrt.runtime.formatting import block_range
from zrt.runtime.messages.client import Error, Follow, Generate, Resume, StageShare
from zrt.runtime.messages.cluster import SessionInfo
from zrt.runtime.messages.sampling import Sampling
from zrt.runtime.page_keys import PageKeys
from zrt.runtime.text.detokenizer import Detokenizer
from zrt.runtime.text.stop_strings import StopMatcher

log = logging.getLogger(__name__)

TEND_S: Final = 0.5
QUIET_S: Final = 0.5
"""Seconds that a client may hear nothing before it is told how its session gets on: so it hears at
least once a second."""


class Generations:
    """All live sessions, and those whose end their clients may yet ask for. `lease_s` is how long a
    client may take nothing, `idle_s` how long a session may come to nothing, before it ends."""

    def __init__(
        self,
        actor: Actor,
        roster: Roster,
        requests: Requests,
        admission: Admission,
        *,
        model: str,
        page_tokens: int,
        lease_s: float,
        idle_s: float,
        event_log: EventLog,
    ) -> None:
        self.began = time.monotonic()
        self._event_log = event_log
        self.closed = False
        """Whether no new session is taken: the cluster is going down."""
        self._actor = actor
        self._roster = roster
        self._requests = requests
        self._admission = admission
        self._model = model
        self._page_tokens = page_tokens
        self._lease_s = lease_s
        self._idle_s = idle_s
        self._live: dict[int, Generation] = {}
        self.rerouting = Rerouting(actor, roster.pipeline, admission, self._live, event_log, self)
        self._routing = self.rerouting.routing
        self._over = Leases(lease_s)
        self._tending: Periodic | None = None

    def __len__(self) -> int:
        return len(self._live)

    def get(self, session: int) -> Generation | None:
        """Return the live generation of this session, if there is one."""
        return self._live.get(session)

    def close(self) -> None:
        """Take no new session: the cluster is going down."""
        self.closed = True

    # ---- clients ---------------------------------------------------------------------------------

    async def start(self, client: Bare, request: Generate) -> None:
        """Accept a request: tokenise, check that it can ever fit, queue. ZrtError: what its client
        is told instead."""
        created = time.monotonic()
        prompt = await self._requests.encode(request)
        if self.closed:
            raise ZrtError("draining", "the cluster is going down: it takes no new sessions")
        sampling = self._requests.sampling(request)
        answers = [self._generation(client, request, prompt, sampling, choice, created) for choice in range(request.n)]
        sessions = [generation.session for generation in answers]
        self._admission.offer_all([(one.id, one.prompt_tokens, one.max_length) for one in sessions])
        for generation in answers:
            self._live[generation.id] = generation
            generation.accepted(self._requests.notes, self._lease_s)
            log.info("accepted: %d prompt tokens", len(prompt), extra={"session": generation.id})
        if self._tending is None:
            self._tending = self._actor.every(TEND_S, self._tend)
        self.admit()
        for generation in answers:
            if self._admission.place(generation.id) is not None:
                self._tell(generation)

    def _generation(
        self, client: Bare, request: Generate, prompt: list[int], sampling: Sampling, choice: int, created: float
    ) -> Generation:
        """Make one answer of a request; each samples with a seed of its own."""
        tokenizer = self._requests.tokenizer
        session = Session(
            self._new_id(),
            prompt[:],
            self._requests.max_length(len(prompt), request.max_tokens),
            self._requests.ends(request),
            replace(sampling, seed=sampling.seed + choice),
            Detokenizer(tokenizer, prompt, self._requests.eos) if tokenizer else None,
            StopMatcher(request.stop, tokenizer, self._requests.eos),
        )
        delivery = Delivery(self._actor, client, request.id, created, choice=choice)
        keys = PageKeys(self._model, self._page_tokens)
        return Generation(session, delivery, keys, created, created, choice)

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
            self.renew(generation)
            self._tell(generation)

    def follow(self, client: Bare, request: Follow) -> None:
        """Let another client hear a session. ZrtError as `Follow` says."""
        self._find(request.session).delivery.follow(client, request.id)

    def unfollow(self, peer: bytes, request: str) -> None:
        """End what this request of a client follows."""
        for generation in self._live.values():
            generation.delivery.unfollow(peer, request)

    def cancel(self, session: int) -> None:
        """End a session at once. ZrtError unknown_session: it is not live (any more)."""
        generation = self._find(session)
        self.show(generation, generation.session.finish("cancelled"))

    def _find(self, session: int) -> Generation:
        generation = self._live.get(session)
        if generation is None:
            raise ZrtError("unknown_session", f"no session {session:016x} is running")
        return generation

    def cancel_of(self, client: Bare, request: str) -> None:
        """End all that is live of the client's own request with this id. ZrtError unknown_session:
        there is nothing."""
        answers = self._answers(client.peer, request)
        if not answers:
            raise ZrtError("unknown_session", f"no generation {request!r} of this client is running")
        for generation in answers:
            self.cancel(generation.id)

    def _answers(self, peer: bytes, request: str) -> list[Generation]:
        deliveries = ((generation, generation.delivery) for generation in self._live.values())
        return [generation for generation, to in deliveries if to.client.peer == peer and to.request == request]

    def fail_all(self, error: ZrtError) -> None:
        """End all live generations with an error."""
        for generation in list(self._live.values()):
            self.fail(generation, error)

    def _tend(self) -> None:
        """Let clients hear at least once a second, and try stalled clients again or give them up,
        until no client is left to tend."""
        now = time.monotonic()
        for generation in list(self._live.values()):
            delivery = generation.delivery
            if delivery.stalled_since is not None:
                self._tend_stalled(generation, now - delivery.stalled_since)
            elif now - generation.progressed > self._idle_s and self._expected(generation):
                self.fail(generation, ZrtError("deadline", f"nothing came of it for {self._idle_s:g} s"))
            elif delivery.told < now - QUIET_S:
                self._tell(generation)
        self._over.tend(now)
        if self._tending is not None and not self._live and not self._over:
            self._tending.cancel()
            self._tending = None

    def _expected(self, generation: Generation) -> bool:
        """Return whether something should come of a generation: it neither waits for its turn nor
        is parked."""
        return generation.session.state is not SessionState.PARKED and self._admission.place(generation.id) is None

    def _tend_stalled(self, generation: Generation, seconds: float) -> None:
        if generation.delivery.retry():
            self.renew(generation)
        elif seconds > self._lease_s:
            log.warning("session %016x ends: its client took nothing for %.0f s", generation.id, seconds)
            generation.session.finish("cancelled")
            self._end(generation)

    def _tell(self, generation: Generation) -> None:
        """Tell the client of a generation how it gets on, or its place in the queue."""
        generation.progress(self._admission.place(generation.id))

    def infos(self) -> Iterator[SessionInfo]:
        """Return what people are shown of all live sessions, the oldest first."""
        now = time.monotonic()
        for generation in self._live.values():
            yield generation.info(self.began, now, self._page_tokens)

    def _new_id(self) -> int:
        while (number := secrets.randbits(63)) in self._live or number == 0:
            pass
        return number

    # ---- admission -------------------------------------------------------------------------------

    def admit(self) -> None:
        """Admit sessions from the queue for which there is room."""
        for session, slot in self._admission.admit():
            generation = self._live[session]
            generation.admit(slot, time.monotonic())
            self._routing.begin(generation)

    def renew(self, generation: Generation) -> None:
        """Let a generation that decodes run on, if its client listens."""
        session = generation.session
        if session.state is SessionState.DECODING:
            self._routing.renew(generation, self._admission.rebalance(session.id))

    # ---- the end ---------------------------------------------------------------------------------

    def show(self, generation: Generation, piece: TextPiece) -> None:
        """Send a piece of the answer to its client; the last one ends the generation."""
        if piece.text or piece.token_ids:
            generation.piece(piece)
        if piece.finish is not None:
            generation.finished(self._shares(generation))
            self._end(generation)

    def _shares(self, generation: Generation) -> list[StageShare]:
        shares = []
        for address, (queue, compute, encode, lent) in zip(generation.session.route, generation.spent, strict=False):
            record = self._roster.find(address.name)
            blocks = block_range(record.seat.first, record.seat.last) if record and record.seat else ""
            shares.append(StageShare(address.name, blocks, queue / 1e3, compute / 1e3, encode / 1e3, lent / 1e3))
        return shares

    def fail(self, generation: Generation, error: ZrtError) -> None:
        """Tell the client of a generation of an error, and end all answers to its request."""
        if generation.id not in self._live:
            return
        self._event_log.add("error", f"{generation.id:016x}", error.message, error.kind)
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
        """Free what the session holds everywhere, and let the next in the queue come."""
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
        self.admit()
        self._routing.clear(generation)
        self.rerouting.tell_news()
