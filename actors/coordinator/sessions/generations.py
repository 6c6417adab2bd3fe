"""The coordinator's live generations: accepted, admitted, shown to their clients, ended."""

import asyncio
import logging
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Final

from msgspec.structs import replace

from zrt.actors.coordinator.event_log import EventLog
from zrt.actors.coordinator.fleet.roster import Roster
from zrt.actors.coordinator.prompts.encoder import WaitingText
from zrt.actors.coordinator.prompts.requests import Requests
from zrt.actors.coordinator.sessions.admission import Admission
from zrt.actors.coordinator.sessions.delivery import Delivery, Leases, caller_name, origin
from zrt.actors.coordinator.sessions.generation import Generation
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
from zrt.runtime.text.stop_strings import StopMatcher

log = logging.getLogger(__name__)

TEND_S: Final = 0.5
QUIET_S: Final = 0.5
"""Seconds that a client may hear nothing before it is told how its session gets on: so it hears at
least once a second."""

UNHURRIED: Final = frozenset({SessionState.TOKENISING, SessionState.PARKED})
"""The states in which nothing need come of a session for as long as it takes."""


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
        self._tokenising: dict[int, asyncio.Task[None]] = {}
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

    def start(self, client: Bare, request: Generate) -> None:
        """Let a request's sessions exist from now on, and accept them once the prompt is token ids.
        ZrtError: what its client is told instead."""
        if self.closed:
            raise ZrtError("draining", "the cluster is going down: it takes no new sessions")
        self._requests.check(request)
        sampling = self._requests.sampling(request)
        self._admission.check_room(request.n)
        text = self._requests.offer(request)
        answers = [self._generation(client, request, sampling, choice, text) for choice in range(request.n)]
        task = None
        if text is not None:
            try:
                name = f"tokenise {answers[0].id:016x}"
                asked = replace(request, prompt=None, messages=None)  # the text itself waits elsewhere
                task = self._actor.spawn(self._tokenise(answers, text, asked), name)
            except ZrtError:
                text.leave()
                raise
        for generation in answers:
            self._live[generation.id] = generation
            if task is not None:
                self._tokenising[generation.id] = task
        if self._tending is None:
            self._tending = self._actor.every(TEND_S, self._tend)
        if text is None:
            self._accept(answers, request, request.token_ids or [])

    async def _tokenise(self, answers: list[Generation], text: WaitingText, request: Generate) -> None:
        """Accept a request's sessions when its text is token ids. Cancelled if all of them end
        before."""
        try:
            prompt = await text.encode()
            left = [generation for generation in answers if self._tokenising.pop(generation.id, None)]
            self._requests.check_text(request, prompt)
            self._accept(left, request, prompt)
        except ZrtError as error:
            self._refuse(answers, error)
        except Exception as error:
            log.exception("a prompt is not accepted")
            self._refuse(answers, ZrtError("internal", f"the prompt is not accepted: {error!r}"))

    def _accept(self, answers: list[Generation], request: Generate, prompt: Sequence[int]) -> None:
        """Queue all sessions of a request, now that its prompt is known, or refuse it where there
        is no room for all."""
        length = self._requests.max_length(len(prompt), request.max_tokens)
        try:
            self._admission.offer_all([(generation.id, len(prompt), length) for generation in answers])
        except ZrtError as error:
            self._refuse(answers, error)
            return
        for generation in answers:
            generation.begin(prompt, length, self._requests.detokeniser(prompt))
            generation.accepted(self._requests.notes, self._lease_s)
            log.info("accepted: %d prompt tokens", len(prompt), extra={"session": generation.id})
        self.admit()
        for generation in answers:
            if self._admission.place(generation.id) is not None:
                self._tell(generation)

    def _generation(
        self, client: Bare, request: Generate, sampling: Sampling, choice: int, text: WaitingText | None
    ) -> Generation:
        """Make one answer of a request; each samples with a seed of its own."""
        session = Session(
            self._new_id(),
            self._requests.ends(request),
            replace(sampling, seed=sampling.seed + choice),
            StopMatcher(request.stop, self._requests.tokenizer, self._requests.eos),
        )
        now = time.monotonic()
        delivery = Delivery(self._actor, client, request.id, now, choice=choice)
        return Generation(session, delivery, PageKeys(self._model, self._page_tokens), now, now, choice, text)

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
            if delivery.gone and not delivery.resumable:
                generation.session.finish("cancelled")
                self._end(generation)
            elif delivery.stalled_since is not None:
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
        """Return whether something should come of a generation: it is neither tokenised, nor waits
        for its turn, nor is parked."""
        state = generation.session.state
        return state not in UNHURRIED and self._admission.place(generation.id) is None

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
        self._fail_all_of(generation, error)

    def _refuse(self, answers: Sequence[Generation], error: ZrtError) -> None:
        """Tell a client that its request is not accepted, unless it has given that up."""
        generation = next((one for one in answers if one.id in self._live), None)
        if generation is not None:
            self._event_log.add("refusal", caller_name(generation.delivery.client), error.message, error.kind)
            self._fail_all_of(generation, error)

    def _fail_all_of(self, generation: Generation, error: ZrtError) -> None:
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
        task = self._tokenising.pop(generation.id, None)
        if task is not None and task not in self._tokenising.values():
            task.cancel()
            if generation.text is not None:  # the task may not have begun
                generation.text.leave()
        ended = generation.session
        log.info(
            "ended (%s): %d tokens",
            ended.reason,
            ended.completion_tokens,
            extra={"session": ended.id, "ms": round((time.monotonic() - generation.created) * 1e3, 1)},
        )
        if generation.delivery.over and generation.delivery.resumable:
            self._over.keep(generation.id, generation.delivery, time.monotonic())
        self._routing.leave(generation)
        self._admission.remove(generation.id)
        self.admit()
        self._routing.clear(generation)
        self.rerouting.tell_news()
