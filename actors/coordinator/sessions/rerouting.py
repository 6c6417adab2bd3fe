"""Sessions that change where they run: another route after a loss or for a drain, the queue again
for want of pages, parked without a stage."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress

from zrt.actors.coordinator.event_log import EventLog
from zrt.actors.coordinator.fleet.pipeline import Pipeline
from zrt.actors.coordinator.fleet.replica_choice import ReplicaUse
from zrt.actors.coordinator.sessions.admission import Admission
from zrt.actors.coordinator.sessions.generation import Generation
from zrt.actors.coordinator.sessions.routing import Routing, SessionKeeper
from zrt.actors.coordinator.sessions.session import SessionState
from zrt.runtime.actor.actor import Actor
from zrt.runtime.errors import ZrtError
from zrt.runtime.formatting import counted
from zrt.runtime.messages.control import Address

RUNNING = frozenset({SessionState.PREFILL, SessionState.DECODING, SessionState.REPLAYING})


class Rerouting:
    """The sessions that `keeper` owns, by id in `live`, as they change where they run.

    Whoever waits for sessions to leave where they run calls `expect_news` before it looks, and
    `wait_for_news` after.
    """

    def __init__(
        self,
        actor: Actor,
        pipeline: Pipeline,
        admission: Admission,
        live: Mapping[int, Generation],
        event_log: EventLog,
        keeper: SessionKeeper,
    ) -> None:
        self._news = asyncio.Event()
        self.routing = Routing(actor, pipeline, keeper, self)
        self._actor = actor
        self._pipeline = pipeline
        self._admission = admission
        self._live = live
        self._event_log = event_log
        self._keeper = keeper
        self._making_room = False

    def routes_changed(self) -> None:
        """Let sessions that wait or are parked go on, or end, since a stage became ready, grew, or
        is lost for good."""
        capacity, room = self._pipeline.capacity()
        self._admission.resize(capacity=capacity, room=room, slots=self._pipeline.num_slots)
        lost = self._pipeline.stage_lost()
        for generation in list(self._live.values()):
            session = generation.session
            if session.state not in (SessionState.WAITING, SessionState.PARKED):
                continue
            if lost is not None:
                self._keeper.fail(generation, lost)
            elif self._pipeline.route(session.route) is None:
                continue
            elif session.state is SessionState.WAITING:
                self.routing.begin(generation)
            else:
                self._admission.unpark(session.id)
        self._keeper.admit()
        self.tell_news()

    def crowd(self, slot: int) -> ReplicaUse:
        """Return how many sessions run through each block server, and how many of them in this
        slot."""
        routed = [(address.name, one.session.slot) for one in self._live.values() for address in one.session.route]
        slots = Counter(routed)
        return {name: (count, slots[name, slot]) for name, count in Counter(name for name, _ in routed).items()}

    def through(self, address: Address) -> list[Generation]:
        """Return the generations that run through this block server."""
        return [generation for generation in self._live.values() if address in generation.session.route]

    def move_off(self, generation: Generation, address: Address, why: str) -> bool:
        """Have a generation leave this block server, if the pipeline offers a route without it;
        return whether it leaves. One that waits for another stage meanwhile keeps its place."""
        session = generation.session
        route = self._pipeline.route(session.route)
        if session.state is SessionState.PREEMPTED:
            return True  # it is leaving already
        if route is not None and address not in route:
            generation.interrupt(why)
            self.routing.begin(generation)
            return True
        return False

    def park(self, generation: Generation, why: str) -> None:
        """Free what a generation holds on all stages and keep its history, until there is a route
        again."""
        session = generation.session
        session.park()
        self.routing.leave(generation)
        session.reroute([])
        self.tell_news()
        self._admission.park(session.id)
        self.routing.leave_trial(generation)
        generation.interrupt(why)
        generation.progress()
        self._keeper.admit()

    def tell_news(self) -> None:
        """Tell whoever waits for news that a session left where it ran, or may leave."""
        self._news.set()

    def expect_news(self) -> None:
        """Forget the news so far."""
        self._news.clear()

    async def wait_for_news(self, seconds: float) -> None:
        """Wait until a session left where it ran, or may leave, `seconds` at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()

    def trial_over(self) -> None:
        """Let sessions that wait for another's trial go on; not at once, since the caller is about
        to change a session."""
        asyncio.get_running_loop().call_soon(self.routes_changed)

    def peer_lost(self, address: Address, why: str, *, died: bool = False) -> None:
        """Have the sessions that ran through this process take another route, and tell their
        clients `why`. Where it `died`, that may have been for one of them."""
        moved = [one for one in self.through(address) if one.session.state is not SessionState.PREEMPTED]
        if moved:
            self._event_log.add("reroute", address.name, f"{counted(len(moved), 'session')} to take another route")
        gone = ZrtError("stage_lost", why, address.name)
        for generation in moved:
            generation.interrupt(gone.message)
            if not died or generation.session.state not in RUNNING or self.routing.blame(generation, gone):
                self.routing.begin(generation)

    def make_room(self, stage: str) -> bool:
        """Have the youngest session on this stage leave, and go back to the queue; return False if
        a lone one holds the stage.

        While one leaves, nothing more is done: steps that find no page then say so again.
        """
        if self._making_room:
            return True
        youngest = self._admission.youngest(
            {session for session, one in self._live.items() if stage in {hop.name for hop in one.session.route}}
        )
        if youngest is None:
            return False
        generation = self._live[youngest]
        generation.session.preempt()
        why = f"{stage} ran out of KV pages"
        generation.interrupt(why)
        self._event_log.add("preemption", f"{youngest:016x}", why)
        self.routing.leave_trial(generation)
        self._making_room = True
        self._actor.spawn(self._vacate(generation), f"preempt {youngest:016x}")
        return True

    async def _vacate(self, generation: Generation) -> None:
        """Put a preempted generation back in the queue once it has left every stage; until then it
        keeps its place among those that run, and nobody may route it."""
        session = generation.session
        epoch = session.epoch
        try:
            await self.routing.leave_now(generation)
        finally:
            self._making_room = False
        if session.epoch == epoch and not session.finished:
            session.reroute([])
            self._admission.preempt(session.id)
            self.tell_news()
        self._keeper.admit()
