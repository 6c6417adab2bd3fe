"""A block server: holds a contiguous range of a model's blocks and runs the steps of many sessions through it.

Receives from the coordinator: Assign, SetState, Open, Credit, Close, Shutdown, and InferenceRequest (token ids: prompts, replays).
Receives from the stage before it: InferenceRequest (hidden states; token ids where the last stage closes the ring).
Receives from any peer, bare: InferenceRequest, answered by InferenceResponse.
Sends to the coordinator: Register, Beat, StateChanged, LoadProgress, Opened, Sampled, Filled, StepFailed; to the next stage: InferenceRequest.

The loop keeps the sessions (routed_sessions.py, bare_sessions.py) and the queue of steps (turn_loop.py); tensors, KV and weights belong
to the lane (compute/engine.py).
"""

import asyncio
import logging
import time

from zrt.actors.bare_sessions import BareSessions, BareStep
from zrt.actors.routed_sessions import RoutedSessions
from zrt.actors.turn_loop import Turn, TurnLoop
from zrt.runtime.actor import Envelope
from zrt.runtime.compute.engine import Engine, Work
from zrt.runtime.compute.threads import configure_threads
from zrt.runtime.errors import ZrtError
from zrt.runtime.member import Member
from zrt.runtime.messages.control import (
    ActorState,
    Assign,
    Assignment,
    Control,
    Done,
    Fault,
    Load,
    LoadProgress,
    Register,
    SetState,
    StateChanged,
)
from zrt.runtime.messages.inference import WARMING_UP
from zrt.runtime.models import resolve
from zrt.runtime.turns import Waiting

log = logging.getLogger(__name__)

PROGRESS_S = 0.1  # load progress is reported at most this often
COLLECT_S = 30.0  # how often idle bare sessions are looked for (KwaaiNet's pace)


class BlockServer(Member):
    """See the module's docstring. `device` is a torch device, `threads` what its products may use: while it computes alone, and beside
    other stages of this machine; `memory_bytes` the most it may take in all, 0: what there is."""

    def __init__(
        self,
        name: str,
        *,
        join: str,
        device: str,
        threads: tuple[int, int],
        listen: str,
        advertise: str | None,
        cluster: str = "",
        memory_bytes: int = 0,
    ) -> None:
        super().__init__(name, "block_server", join=join, listen=listen, advertise=advertise, cluster=cluster)
        self.device = device
        self.memory_bytes = memory_bytes
        self.threads = threads
        self.assignment: Assignment | None = None
        self._fault: Fault | None = None
        self.turns = TurnLoop(f"{name}-{device}", threads, work=self._work, deliver=self._deliver)
        self.bare = BareSessions(self, self.turns, self._ready, drains=lambda: self.state in ("draining", "drained"))
        self.routed = RoutedSessions(self, self.turns, self._ready, self.bare.make_room)
        self.obey(Assign, self._on_assign)
        self.obey(SetState, self._on_set_state)
        self.handle_bare(self.bare.on_request)
        self.on_registered(self._on_registered)

    async def start(self) -> None:
        configure_threads(self.threads[0])
        self.state = "blank"
        await super().start()
        self.depend(self.turns.run(), "turns")
        self.every(COLLECT_S, self._collect_idle)

    async def stop(self) -> None:
        self.state = "stopped"
        await super().stop()
        self.turns.lane.close()

    # ---- membership ---------------------------------------------------------------------------------------------

    def registration(self) -> Register:
        message = super().registration()
        message.device = self.device
        message.holds = self.assignment
        return message

    def load(self) -> Load:
        load = self.turns.load()
        load.sessions = len(self.routed) + len(self.bare)
        load.stale = self.counters.stale
        return load

    def _on_registered(self, again: bool) -> None:
        if not again:  # another coordinator: what the last one opened is dead
            self.routed.forget_all()
        if self.assignment is not None:  # things may have changed since the registration was written
            self._set_state(self.state, self._fault)

    # ---- assignment ---------------------------------------------------------------------------------------------

    def _on_assign(self, envelope: Envelope) -> Control:
        assert isinstance(envelope.body, Assign)
        assignment = envelope.body.assignment
        if self.assignment is None or assignment.serial != self.assignment.serial:
            self.assignment = assignment
            self.turns.take_engine(None, assignment.chunk)
            self._set_state("loading")
            self.spawn(self._load(assignment), "load")
        return Done()

    def _on_set_state(self, envelope: Envelope) -> Control:
        message = envelope.body
        assert isinstance(message, SetState)
        self._ready()
        self.state = message.state
        return Done()

    async def _load(self, assignment: Assignment) -> None:
        loop = asyncio.get_running_loop()
        reported = 0.0

        def progress(done: int, total: int) -> None:
            nonlocal reported
            now = time.monotonic()
            if done == total or now - reported >= PROGRESS_S:
                reported = now
                loop.call_soon_threadsafe(self._report, LoadProgress(assignment.serial, done, total))

        def load() -> Engine:
            return Engine.load(
                resolve(assignment.model, weights=assignment.weights == "files"),
                assignment,
                device=self.device,
                progress=progress,
                cancelled=lambda: self.assignment is not assignment or self.ended.is_set(),
            )

        try:
            engine = await self.turns.lane.run(load)
        except Exception as error:  # whatever it is, it is this assignment's end, and the coordinator's to know
            known = isinstance(error, ZrtError)
            if not known:
                log.exception("%s: loading failed", self.name)
            fault = error if isinstance(error, ZrtError) else ZrtError("internal", f"loading failed: {error!r}")
            if self.assignment is assignment:
                self._set_state("failed", Fault(fault.kind, fault.message, fault.where or self.name))
            return
        if self.assignment is assignment:
            self.turns.take_engine(engine, assignment.chunk)
            self._set_state("ready")

    def _set_state(self, state: ActorState, fault: Fault | None = None) -> None:
        self.state, self._fault = state, fault
        self._report(StateChanged(state, self.assignment.serial if self.assignment else 0, fault))

    def _report(self, message: StateChanged | LoadProgress) -> None:
        """Tell the coordinator; while it is lost nothing is, since the next registration says how things are."""
        try:
            self.tell_coordinator(message)
        except ZrtError as error:
            log.warning("%s: the coordinator does not take a %s: %s", self.name, type(message).__name__, error)

    def _ready(self) -> Engine:
        if self.turns.engine is not None:
            return self.turns.engine
        if self.state == "loading":
            raise ZrtError("warming_up", WARMING_UP, self.name)
        raise ZrtError("model_not_loaded", "no blocks are loaded in this block server", self.name)

    # ---- turns --------------------------------------------------------------------------------------------------

    def _work(self, engine: Engine, step: Waiting) -> Work:
        if isinstance(step.origin, BareStep):
            return self.bare.work(engine, step)
        return self.routed.work(step)

    async def _deliver(self, turn: Turn) -> None:
        ran = list(zip(turn.steps, turn.result.outcomes, strict=True))
        await self.routed.deliver(turn, [pair for pair in ran if not isinstance(pair[0].origin, BareStep)])
        for step, outcome in ran:
            if isinstance(step.origin, BareStep):
                await self.bare.deliver(turn, step, outcome)

    def _collect_idle(self) -> None:
        if self.assignment is not None:
            self.spawn(self.bare.collect(self.assignment.idle_s), "collect")
