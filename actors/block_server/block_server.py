"""A block server: holds a contiguous range of a model's blocks and runs the steps of many sessions
through it.

Receives from the coordinator: Assign, Workers, SetState, Open, Credit, Close, Shutdown, and
InferenceRequest (token ids: prompts, replays). Receives from the stage before it: InferenceRequest
(hidden states; token ids where the last stage closes the ring). From the one after it: HandOver.
Receives from any peer, bare: InferenceRequest, answered by InferenceResponse. Sends to the
coordinator: Register, Beat, StateChanged, LoadProgress, Identify, Opened, Sampled, Filled,
StepFailed; to the next stage: InferenceRequest; to its TP ranks: the requests of messages/ranks.py;
to its layer workers: those of messages/layers.py.

With `tp` in its assignment it leads that many ranks (group.py), and all of them run each turn. With
`lend`, or `helped`, it is the master of layer workers (lending.py), which run some of its blocks.

The loop keeps the sessions (routed_sessions.py, bare_sessions.py), the queue of steps
(turn_loop.py) and what serves (assigned_blocks.py); tensors, KV and weights belong to the executor
(compute/engine.py).
"""

import asyncio
import logging
import os
from functools import partial

import torch

from zrt.actors.block_server.assigned_blocks import AssignedBlocks
from zrt.actors.block_server.bare_sessions import BareSessions
from zrt.actors.block_server.memory_channels import MemoryChannels
from zrt.actors.block_server.routed_sessions import RoutedSessions
from zrt.actors.block_server.turn_loop import TurnLoop
from zrt.actors.options import BlockServerOptions
from zrt.runtime.actor.envelope import Envelope
from zrt.runtime.actor.member import Member
from zrt.runtime.compute.devices import device_lives
from zrt.runtime.compute.engine import Holding
from zrt.runtime.compute.threads import configure_threads
from zrt.runtime.errors import ZrtError
from zrt.runtime.formatting import block_range
from zrt.runtime.messages.control import Control, Done, Fault
from zrt.runtime.messages.inference import WARMING_UP
from zrt.runtime.messages.members import (
    ActorState,
    Assign,
    Assignment,
    LoadProgress,
    Register,
    SetState,
    StateChanged,
    Workers,
)
from zrt.runtime.messages.stats import Load

log = logging.getLogger(__name__)

SETTLE_S = 0.1  # how long a beat that is asked for waits for the pages of sessions that were closed
COLLECT_S = 30.0  # how often idle bare sessions are looked for (KwaaiNet's pace)
LOOK_S = 1.0  # how often a model that could not be loaded is looked at


class BlockServer(Member):
    """One stage of the pipeline, or a replica of one. `device` is a torch device, `threads` what
    its GEMMs may use: while it computes alone, and beside other stages of this machine;
    `memory_bytes` the most the process may take in all, 0: what there is."""

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
        self._given = cluster
        self._fault: Fault | None = None
        self._loads_to: ActorState = "ready"
        self._looks: asyncio.Task[None] | None = None
        self.turns = TurnLoop(f"{name}-{device}", threads, lives=partial(device_lives, torch.device(device)))
        self._memory_channels = MemoryChannels(self, self.turns.executor)
        self.blocks = AssignedBlocks(
            self,
            self.turns.executor,
            device=device,
            threads=threads[0],
            listener=self,
        )
        self.bare = BareSessions(self, self.turns, self._ready)
        self.routed = RoutedSessions(self, self.turns, self._ready, self.bare, self._memory_channels)
        self.obey(Assign, self._on_assign)
        self.obey(SetState, self._on_set_state)
        self.obey(Workers, self._on_workers)
        self.on_peer_death(self.blocks.lending.peer_died)
        self.handle_bare(self.bare.on_request)
        self.on_registered(self._on_registered)
        self.on_coordinator_lost(self._free)

    async def start(self) -> None:
        configure_threads(self.threads[0])
        self.state = "blank"
        await super().start()
        self.depend(self.turns.run(), "turns")
        self.every(COLLECT_S, self._collect_idle)
        self.every(LOOK_S, self._look_again)

    async def stop(self) -> None:
        self.state = "stopped"
        self._memory_channels.stop()
        self.turns.take_backend(None, 1)
        await self.blocks.end()
        await super().stop()
        self.turns.executor.close()

    # ---- membership ------------------------------------------------------------------------------

    def registration(self) -> Register:
        message = super().registration()
        message.device = self.device
        message.shares_cores = self.device == "cpu" and self.threads[0] > self.threads[1]
        message.holds = self.blocks.assignment
        return message

    def load(self) -> Load:
        load = self.turns.load()
        load.sessions = len(self.routed) + len(self.bare)
        load.stale = self.counters.stale
        load.group = self.blocks.group_stats.load() if self.blocks.group_stats is not None else None
        load.lend = self.blocks.lent()
        return load

    async def settled(self) -> None:
        await self.routed.closed(SETTLE_S)

    def _on_registered(self, again: bool) -> None:
        if not again:  # another coordinator: what the last one opened is dead
            self.routed.forget_all()
            if self.state == "draining":  # what it was to wait for is gone, and so is who asked
                self.state = "drained"
        given = self.blocks.assignment
        if given is None:
            return
        if again or self.turns.backend is None:  # things may have changed since the registration was written
            self._set_state(self.state, self._fault)
        else:
            self.spawn(self._confirm(given), "confirm")

    async def _confirm(self, given: Assignment) -> None:
        """Serve the sessions of another coordinator with the blocks that are loaded, if it serves
        the same model; or else load what is in the folder now, if that is something else."""
        backend = self.turns.backend
        try:
            await self.blocks.confirm(given)
        except ZrtError as error:
            anew = error.kind == "bad_model" and await self.blocks.saved_anew()
            if self.blocks.assignment is not given or self.turns.backend is not backend or self.ended.is_set():
                return
            if anew:
                self._begin(given)
            else:
                self.turns.take_backend(None, given.chunk)
                self._memory_channels.serve(None, None)
                self._set_state("failed", self._as_fault(error))
                await self.blocks.end()
            return
        if self.blocks.assignment is given:
            self._set_state(self.state, self._fault)

    def _free(self) -> None:
        """Be free for the next cluster there after this one's orderly end, with nothing of the
        last; unless the process was started for that cluster alone."""
        if self.goes_down and not self._given:
            self.cluster = ""
            self._let_go()

    def _let_go(self) -> None:
        """Let go of the assignment, its blocks and its sessions."""
        self.state, self._fault = "blank", None
        self.blocks.assignment = None
        self.turns.take_backend(None, 1)
        self._memory_channels.serve(None, None)
        self.routed.forget_all()
        self.spawn(self.blocks.end(), "let go")

    # ---- assignment ------------------------------------------------------------------------------

    def _on_assign(self, order: Assign, envelope: Envelope) -> Control:
        assignment = order.assignment
        if assignment is None:
            log.info("%s: unloads its blocks: the plan has no place for them", self.name)
            self._let_go()
        elif self.blocks.assignment is None or assignment.serial != self.blocks.assignment.serial:
            self.blocks.assign(assignment)
            self.state = "blank"
            self._begin(assignment)
        return Done()

    async def _on_set_state(self, message: SetState, envelope: Envelope) -> Control:
        if self.state == "loading" and message.state == "ready":
            if self._loads_to != "drained":
                raise ZrtError("bad_request", f"{self.name} is loading, and was not drained", self.name)
            self._loads_to = "ready"
        else:
            self._ready()
            self.state = message.state
        await self.catch_up()  # what it was before must not be heard after the answer, as if it were so again
        return Done()

    def _begin(self, assignment: Assignment, lost: ZrtError | None = None) -> None:
        """Load these blocks; anew, where the ranks or workers that held them are `lost`."""
        blocks = block_range(assignment.first, assignment.last)
        log.info("%s: loads blocks %s of %s", self.name, blocks, assignment.model)
        self.turns.take_backend(None, assignment.chunk)
        self._memory_channels.serve(None, None)
        if self.state != "loading":  # a rank or a worker that is lost undrains nothing
            self._loads_to = "drained" if self.state == "drained" else "ready"
        self._set_state("loading", self._as_fault(lost) if lost is not None else None)
        self.spawn(self._load(assignment), "load")

    async def _load(self, assignment: Assignment) -> None:
        try:
            backend = await self.blocks.load(assignment)
        except Exception as error:  # whatever it is, it is this assignment's end, and the coordinator's to know
            known = isinstance(error, ZrtError)
            if not known:
                log.exception("%s: loading failed", self.name)
            fault = error if isinstance(error, ZrtError) else ZrtError("internal", f"loading failed: {error!r}")
            if self.blocks.assignment is assignment:
                self._set_state("failed", self._as_fault(fault))
            return
        if self.blocks.assignment is assignment:
            self.turns.take_backend(backend, assignment.chunk)
            self._memory_channels.serve(backend.engine, assignment)
            self.progress_changed()
            log.info("%s: is ready", self.name)
            self._set_state(self._loads_to)

    def _look_again(self) -> None:
        """Load a model that could not be loaded as it was, once its files are others."""
        if self._looks is not None and not self._looks.done():
            return  # a file system may take its time
        if self.state == "failed" and self._fault is not None and self._fault.kind == "bad_model":
            self._looks = self.spawn(self._load_changed(), "look again")

    async def _load_changed(self) -> None:
        given, changed = self.blocks.assignment, await self.blocks.files_changed()
        if changed and given is not None and self.blocks.assignment is given and self.state == "failed":
            self._begin(given)

    def _on_workers(self, workers: Workers, envelope: Envelope) -> Control:
        self.blocks.lending.workers_are(workers)
        given, fault = self.blocks.assignment, self._fault
        if given is None:
            return Done()
        revives = fault is not None and self.blocks.lending.may_mend(given, fault)
        idle = self.state == "ready" and not len(self.routed) + len(self.bare)
        if revives or (given.helped and idle and self.blocks.lending.may_help):
            self._begin(given)
        return Done()

    def backend_lost(self, error: ZrtError) -> None:
        """Load anew: all KV of this stage is gone with the ranks or workers that served, and
        sessions are opened and replayed once there are new ones."""
        blocks, backend = self.blocks, self.turns.backend
        assignment = blocks.assignment
        if (
            assignment is None
            or backend is None
            or backend not in (blocks.group, blocks.lending.lent)
            or self.ended.is_set()
        ):
            return  # it was being built: whoever builds it knows
        if blocks.group_stats is not None:
            blocks.group_stats.rebuilds += 1
        self.routed.lost(error, self.turns.running)
        self._begin(assignment, error)
        self.routed.forget_all()

    def progress_changed(self) -> None:
        """Tell the coordinator how far loading is."""
        if (progress := self.blocks.progress()) is not None:
            self._report(progress)

    def _set_state(self, state: ActorState, fault: Fault | None = None) -> None:
        self.state, self._fault = state, fault if state == "failed" else None
        self._report(StateChanged(state, self.blocks.assignment.serial if self.blocks.assignment else 0, fault))

    def _as_fault(self, error: ZrtError) -> Fault:
        return Fault(error.kind, error.message, error.where or self.name)

    def _report(self, message: StateChanged | LoadProgress) -> None:
        """Tell the coordinator. Nothing is sent while it is lost: the next registration says how
        things are."""
        try:
            self.tell_coordinator(message)
        except ZrtError as error:
            log.warning("%s: the coordinator does not take a %s: %s", self.name, type(message).__name__, error)

    def _ready(self) -> Holding:
        if self.turns.engine is not None:
            return self.turns.engine
        if self.state == "loading":
            raise ZrtError("warming_up", WARMING_UP, self.name)
        raise ZrtError("model_not_loaded", "no blocks are loaded in this block server", self.name)

    def _collect_idle(self) -> None:
        if self.blocks.assignment is not None:
            self.spawn(self.bare.collect(self.blocks.assignment.idle_s), "collect")


def make(options: BlockServerOptions) -> BlockServer:
    """Return a blank block server that joins the coordinator."""
    alone = options.num_threads
    return BlockServer(
        options.name or f"block-server-{os.getpid()}",
        join=options.join,
        device=options.device,
        threads=(alone, options.shared_threads or alone),
        listen=options.listen,
        advertise=options.advertise,
        cluster=options.cluster_id,
        memory_bytes=options.memory,
    )
