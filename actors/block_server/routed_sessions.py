"""Routed sessions at a block server: opened by the coordinator, stepped by the stage before, closed
by the coordinator. What becomes of their steps is turn_delivery.py's.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import accumulate

from torch import Tensor

from zrt.actors.block_server.backend import Backend
from zrt.actors.block_server.bare_sessions import BareSessions
from zrt.actors.block_server.memory_channels import MemoryChannels
from zrt.actors.block_server.stage_session import StageSession
from zrt.actors.block_server.stage_transfer import rows_of
from zrt.actors.block_server.step_queue import Waiting
from zrt.actors.block_server.turn_delivery import RoutedStep, TurnDelivery
from zrt.actors.block_server.turn_loop import TurnLoop
from zrt.runtime.actor.envelope import Envelope
from zrt.runtime.actor.member import Member
from zrt.runtime.compute.engine import Holding
from zrt.runtime.compute.sampler import Sampler
from zrt.runtime.compute.shared_rows.channel import HandedRows
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.control import Address, Control, Done
from zrt.runtime.messages.header import Step
from zrt.runtime.messages.inference import InferenceRequest
from zrt.runtime.messages.sessions import Close, Credit, Open, Opened
from zrt.runtime.page_keys import check_keys


class RoutedSessions:
    """The table of sessions by id. `ready` gives the engine, or raises what the sender is told;
    where the KV memory is full, `bare` sessions make room."""

    def __init__(
        self,
        actor: Member,
        loop: TurnLoop,
        ready: Callable[[], Holding],
        bare: BareSessions,
        memory_channels: MemoryChannels,
    ) -> None:
        self._actor = actor
        self._loop = loop
        self._ready = ready
        self._bare = bare
        self._memory_channels = memory_channels
        self._sessions: dict[int, StageSession] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._delivery = TurnDelivery(actor, loop, memory_channels, bare, self._sessions)
        actor.obey(Open, self._on_open)
        actor.obey(Credit, self._on_credit)
        actor.obey(Close, self._on_close)
        actor.handle(InferenceRequest, self._on_step)

    def __len__(self) -> int:
        return len(self._sessions)

    async def closed(self, seconds: float) -> None:
        """Wait until what closed sessions held is free, `seconds` at most: a turn may run."""
        if self._closing:
            await asyncio.wait(self._closing, timeout=seconds)

    def lost(self, error: ZrtError, running: list[Waiting]) -> None:
        """Tell the coordinator that the turn of these steps broke what runs turns: one of them may
        be the cause."""
        self._delivery.steps_failed([step.received for step in running if isinstance(step, RoutedStep)], error)

    def forget_all(self) -> None:
        """Close every session; the coordinator is not told."""
        for session in list(self._sessions):
            self._forget(session)

    def _forget(self, session: int, page_keys: list[int] | None = None) -> None:
        self._sessions.pop(session, None)
        closing = self._actor.spawn(self._loop.release(session, page_keys), f"close {session:016x}")
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    # ---- what arrives ----------------------------------------------------------------------------

    def _on_open(self, message: Open, envelope: Envelope) -> Awaitable[Control]:
        """Enter the session into the table at once, so that a close that comes right behind finds
        it; the executor's part follows."""
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
        """Take a place in the engine's cache; return how many tokens of the history it holds."""
        while True:
            try:
                return await backend.open(message.session, message.length, message.page_keys, message.prompt_length)
            except ZrtError as error:
                if error.kind != "overloaded" or not await self._bare.make_room():
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
            self._delivery.go_round(session.next, [(step, token)])

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
                self._delivery.steps_failed([step], ZrtError("kv_gap", "this session is not open here"))
            elif session is None or session.epoch != step.epoch:
                self._loop.tally.dropped_stale += 1
            elif session.over:
                pass  # it was begun before its end was known
            elif header.incarnation == session.before.incarnation or (from_coordinator and session.stage == 0):
                taken.append((session, step, index))
            else:
                self._loop.tally.dropped_stale += 1
        if not taken:
            self._memory_channels.dismiss(header)
            return
        try:
            rows = self._rows(envelope, request, taken[0][0].before)
        except ZrtError as error:
            self._memory_channels.dismiss(header)
            self._delivery.steps_failed([step for _, step, _ in taken], error)
            return
        if header.near:
            self._memory_channels.heard(header, taken[0][0].before)
        now = time.monotonic()
        for session, step, index in taken:
            self._delivery.add(session, step, rows[index], now)

    def _rows(self, envelope: Envelope, request: InferenceRequest, before: Address) -> Sequence[Tensor | HandedRows]:
        """Return the rows of each step of a message of the stage before."""
        header, engine = envelope.header, self._ready()
        if header.handed is not None:
            return self._memory_channels.rows(engine, header, request, before)
        rows = rows_of(engine, request, header.dtype)
        starts = accumulate((step.n for step in header.steps), initial=0)
        return [rows[start : start + step.n] for start, step in zip(starts, header.steps, strict=False)]


def _check_size(message: Open, engine: Holding) -> None:
    """Refuse more tokens or page keys than a session can have: ZrtError context_exceeded,
    bad_request."""
    if message.length > engine.cache.context:
        text = f"open: a history of {message.length} tokens, the context holds {engine.cache.context}"
        raise ZrtError("context_exceeded", text)
    check_keys(message.page_keys, engine.max_pages)


def _sampler(message: Open, vocab: int) -> Sampler:
    return Sampler(
        message.sampling, tokens=message.tokens, prompt_length=message.prompt_length, eos=message.eos, vocab=vocab
    )
