"""One live generation as the coordinator runs it: the session, its client, its clock, and what is
told of it. Only the methods here write a generation."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from zrt.actors.coordinator.prompts.encoder import WaitingText
from zrt.actors.coordinator.sessions.delivery import Delivery, caller_name
from zrt.actors.coordinator.sessions.session import Session, SessionState, TextPiece, TextStream
from zrt.runtime.formatting import counted
from zrt.runtime.messages.client import (
    Accepted,
    Error,
    Finished,
    Phase,
    Piece,
    Progress,
    StageShare,
    Timings,
)
from zrt.runtime.messages.cluster import GAPS, HopInfo, SessionInfo
from zrt.runtime.messages.sessions import SampledToken
from zrt.runtime.page_keys import PageKeys

PHASES: dict[SessionState, Phase] = {
    SessionState.TOKENISING: "tokenising",
    SessionState.QUEUED: "queued",
    SessionState.PREFILL: "prefill",
    SessionState.DECODING: "decoding",
    SessionState.WAITING: "waiting",
    SessionState.PREEMPTED: "preempted",
    SessionState.PARKED: "parked",
    SessionState.REPLAYING: "replaying",
}


@dataclass(slots=True)
class Generation:
    """The `choice`-th answer to a request. Times are monotonic seconds. `progressed` is when
    something last came of the generation; `attempts` to route it since then failed, the last with
    `fault`. `filled` tokens of its history are known to be run."""

    session: Session
    delivery: Delivery
    keys: PageKeys
    created: float
    progressed: float
    choice: int = 0
    text: WaitingText | None = None
    admitted: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    last_epoch: int = 0
    filled: int = 0
    attempts: int = 0
    fault: str = ""
    network: float = 0.0  # seconds of decoding that no stage accounts for, interruptions apart
    spent: list[list[int]] = field(default_factory=list)  # a stage: [queue, compute, encode, lent] µs
    spent_on: int = 0  # tokens that took it
    gaps: deque[float] = field(default_factory=lambda: deque(maxlen=GAPS))

    @property
    def id(self) -> int:
        return self.session.id

    def page_keys(self) -> list[int]:
        """Return the keys of the full pages of the session's history."""
        return self.keys.of(self.session.tokens)

    # ---- how it gets on --------------------------------------------------------------------------

    def begin(self, prompt: Sequence[int], max_length: int, detokeniser: TextStream | None) -> None:
        """Take the prompt, now that it is token ids."""
        self.text = None
        self.session.begin(prompt, max_length, detokeniser)

    def admit(self, slot: int, now: float) -> None:
        """Let the generation run in this slot: its turn in the queue came."""
        self.session.take_slot(slot)
        self.progressed = now
        self.admitted = self.admitted or now

    def interrupt(self, why: str) -> None:
        """Note why the generation does not go on for now; its client hears that with its
        progress."""
        self.fault = why

    def count_attempt(self, why: str) -> int:
        """Note that the generation's route failed, and return how often that happened before since
        its last token."""
        self.interrupt(why)
        self.attempts += 1
        return self.attempts - 1

    def replay(self, have: int) -> None:
        """Run the prompt, or what a new route lacks of the history: all beyond `have` tokens."""
        session = self.session
        session.move(SessionState.PREFILL if session.completion_tokens == 0 else SessionState.REPLAYING)
        self.filled = have
        self.progress()

    def fill(self, upto: int, now: float) -> None:
        """Note that its history has been run up to so many tokens."""
        self.progressed = now
        self.filled = max(self.filled, upto)
        self.progress()

    def take(self, token: SampledToken, now: float) -> None:
        """Note the time a token took, stage by stage."""
        self.attempts = 0
        self.fault = ""
        if self.first_token:
            self.gaps.append(now - self.last_token)
            if self.session.epoch == self.last_epoch:  # else it was interrupted, and replayed
                self.network += (
                    now - self.last_token - sum(hop.queue + hop.compute + hop.encode for hop in token.times) / 1e6
                )
        self.last_epoch = self.session.epoch
        self.progressed = self.last_token = now
        self.first_token = self.first_token or now
        if len(self.spent) != len(self.session.route):
            self.spent = [[0, 0, 0, 0] for _ in self.session.route]
            self.spent_on = 0
        self.spent_on += 1
        for spent, hop in zip(self.spent, token.times, strict=False):
            spent[0] += hop.queue
            spent[1] += hop.compute
            spent[2] += hop.encode
            spent[3] += hop.lent

    # ---- what its client hears -------------------------------------------------------------------

    def tell(self, event: Accepted | Progress | Piece | Finished | Error) -> None:
        self.delivery.send(event, time.monotonic())

    def accepted(self, notes: list[str], lease_s: float) -> None:
        session = self.session
        self.tell(
            Accepted(
                id=self.delivery.request,
                choice=self.choice,
                session=session.id,
                seed=session.sampling.seed,
                prompt_tokens=session.prompt_tokens,
                resume=self.delivery.resume,
                lease_s=lease_s,
                notes=notes,
            )
        )

    def piece(self, piece: TextPiece) -> None:
        self.tell(
            Piece(
                id=self.delivery.request,
                choice=self.choice,
                index=piece.index,
                text=piece.text,
                token_ids=piece.token_ids,
                logprobs=piece.logprobs,
            )
        )

    def progress(self, place: tuple[int, int] | None = None) -> None:
        """Tell the client where the generation stands: its place in the queue (given), tokens
        generated of those it may, or prompt tokens run of all."""
        session = self.session
        message = self.fault
        if place is not None:
            done, total = place
        elif session.state is SessionState.TOKENISING and self.text is not None:
            done, total = self.text.done, self.text.total
            message = f"behind {counted(self.text.before, 'text')}" if self.text.before else ""
        elif session.state is SessionState.DECODING:
            done, total = session.completion_tokens, session.max_length - session.prompt_tokens
        else:
            done, total = self.filled, session.prompt_tokens
        phase = PHASES[session.state]
        self.tell(
            Progress(id=self.delivery.request, choice=self.choice, phase=phase, done=done, total=total, message=message)
        )

    def error(self, kind: str, message: str, where: str) -> None:
        self.tell(Error(id=self.delivery.request, kind=kind, message=message, where=where))

    def finished(self, shares: list[StageShare]) -> None:
        session = self.session
        assert session.reason is not None
        self.tell(
            Finished(
                id=self.delivery.request,
                choice=self.choice,
                reason=session.reason,
                prompt_tokens=session.prompt_tokens,
                completion_tokens=session.completion_tokens,
                seed=session.sampling.seed,
                timings=self._timings(),
                stages=shares,
            )
        )

    # ---- what people see -------------------------------------------------------------------------

    def info(self, began: float, now: float, page_tokens: int) -> SessionInfo:
        """Return what people are shown of the session; `began` is when the clock of `asked_ms` was
        0."""
        session, timings = self.session, self._timings()
        hops = [
            HopInfo(address.name, *(round(us / 1e3 / self.spent_on, 3) for us in spent[:3]))
            for address, spent in zip(session.route, self.spent, strict=False)
        ]
        return SessionInfo(
            session=session.id,
            state=session.state,
            prompt_tokens=session.prompt_tokens,
            completion_tokens=session.completion_tokens,
            epoch=session.epoch,
            route=[address.name for address in session.route],
            client=caller_name(self.delivery.client),
            asked_ms=int((self.created - began) * 1e3),
            ttft_ms=timings.ttft_ms,
            tokens_s=round(self._pace(now), 2),
            gaps_ms=[round(gap * 1e3, 2) for gap in self.gaps],
            hops=hops,
            network_ms=round(timings.network_ms / max(1, session.completion_tokens - 1), 3),
            kv_pages=-(-len(session.tokens) // page_tokens) if session.route else 0,
            fault=self.fault,
        )

    def _pace(self, now: float) -> float:
        """Return tokens a second over the last gaps between tokens, and the present gap if that is
        longer."""
        if not self.gaps or self.session.state is not SessionState.DECODING:
            return 0.0
        seconds, count = sum(self.gaps), len(self.gaps)
        late = now - self.last_token
        return (count + 1) / (seconds + late) if late > seconds / count else count / max(seconds, 1e-6)

    def _timings(self) -> Timings:
        decoded = self.session.completion_tokens - 1
        seconds = self.last_token - self.first_token
        return Timings(
            queue_ms=round((self.admitted - self.created) * 1e3, 3) if self.admitted else 0.0,
            ttft_ms=round((self.first_token - self.created) * 1e3, 3) if self.first_token else 0.0,
            decode_tok_s=round(decoded / seconds, 3) if decoded > 0 and seconds > 0 else 0.0,
            network_ms=round(max(0.0, self.network) * 1e3, 3),
        )
