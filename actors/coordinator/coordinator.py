"""The coordinator: registers processes, gives block servers their blocks, takes clients' sessions
and streams their tokens.

Receives from every process: Register, Beat. From `zrt up`: ChildDied. From block servers:
StateChanged, LoadProgress, Sampled, Filled, StepFailed. Receives from clients (single frames,
messages/client.py): Generate, Resume, Cancel, Status, Subscribe, Follow, Unsubscribe, Drain,
Undrain, Restart, Down. Sends to block servers: Assign, Workers, SetState, Open, Credit, Close,
InferenceRequest (token ids). To `zrt up`: Kill. To every process: GoingDown, Shutdown. To clients:
events.

Its processes are membership.py's, sessions generations.py's, drains drains.py's. It computes no
tensors and never imports torch.
"""

import asyncio
import logging
import os
import secrets
import socket
import time
from dataclasses import replace
from pathlib import Path

from zrt.actors.coordinator.event_log import EventLog
from zrt.actors.coordinator.fleet.drains import Drains
from zrt.actors.coordinator.fleet.membership import Membership
from zrt.actors.coordinator.fleet.roster import Roster
from zrt.actors.coordinator.metrics import exposition
from zrt.actors.coordinator.metrics_server import MetricsServer
from zrt.actors.coordinator.sessions.admission import Admission
from zrt.actors.coordinator.sessions.delivery import caller_name
from zrt.actors.coordinator.sessions.generations import Generations
from zrt.actors.coordinator.sessions.requests import Requests
from zrt.actors.coordinator.subscribers import Subscribers
from zrt.runtime.actor.actor import Actor
from zrt.runtime.actor.actor_process import DOWN_STATUS
from zrt.runtime.actor.envelope import Bare
from zrt.runtime.cluster.file_schema import Conf
from zrt.runtime.cluster.memory import block_server_bytes
from zrt.runtime.cluster.seats import lends, seats, spare_names, stage_ranges
from zrt.runtime.errors import ZrtError
from zrt.runtime.host_memory import resident_memory
from zrt.runtime.messages.client import (
    Cancel,
    ClientEvent,
    ClientRequest,
    Cluster,
    Down,
    Drain,
    Error,
    Follow,
    Generate,
    Ok,
    Restart,
    Resume,
    Status,
    Subscribe,
    Undrain,
    Unsubscribe,
)
from zrt.runtime.messages.cluster import ActorInfo, pipeline_order
from zrt.runtime.messages.members import Assignment, Kill, Shutdown
from zrt.runtime.messages.sessions import Filled, Sampled, StepFailed
from zrt.runtime.models.architecture.spec import ModelSpec
from zrt.runtime.models.checkpoint.layout import PAGE_TOKENS
from zrt.runtime.models.checkpoint.split import kv_pages
from zrt.runtime.wire.clients import decode_client, encode_event
from zrt.runtime.wire.decode_errors import WireError
from zrt.runtime.wire.limits import MAX_CLIENT_FRAME

log = logging.getLogger(__name__)

KILL_DEADLINE_S = 5.0
PORT_RETRY_S = 0.1


class Coordinator(Actor):
    """One cluster's coordinator, for the model in `folder`, by the (checked) cluster file `conf`.

    `cluster` is the id that its members know the cluster by; one that takes an earlier
    coordinator's place has the same. For such a one `port_s` is how long it waits for its port,
    should it be taken.
    """

    def __init__(
        self, conf: Conf, folder: Path, spec: ModelSpec, prompts: Requests, *, cluster: str = "", port_s: float = 0.0
    ) -> None:
        reached = conf.cluster
        super().__init__("coordinator", listen=reached.listen, advertise=reached.advertise, limit=MAX_CLIENT_FRAME)
        self.conf = conf
        self.spec = spec
        self.prompts = prompts
        self.roster = self._roster()
        self.cluster = cluster or secrets.token_hex(8)
        self._has_parent = bool(cluster)
        self.happened = EventLog()
        self._port_s = port_s
        self.template = self._template(folder)
        admission = Admission(
            capacity=self.roster.pipeline.capacity()[0],
            page_tokens=PAGE_TOKENS,
            sessions=conf.limits.sessions,
            queue=conf.limits.queue,
            slots=self.roster.pipeline.num_slots,
        )
        self.generations = Generations(
            self,
            self.roster,
            prompts,
            admission,
            model=f"{folder} {conf.model.weights} {conf.model.dtype}",
            page_tokens=PAGE_TOKENS,
            lease_s=conf.limits.lease_s,
            idle_s=conf.limits.idle_s,
            happened=self.happened,
        )
        self._subscribers = Subscribers(self, lambda: self._cluster(""), self.happened)
        self.registry = Membership(
            self,
            conf,
            self.roster,
            self.generations,
            self.happened,
            template=self.template,
            cluster=self.cluster,
            changed=self._subscribers.changed,
        )
        self.drains = Drains(self, self.roster, self.generations, changed=self.registry.changed)
        self.metrics: MetricsServer | None = None
        if conf.metrics.listen:
            self.metrics = MetricsServer(conf.metrics.listen, self._exposition, self.roster.pipeline.unready)
        self.handle(Sampled, self.generations.on_sampled)
        self.handle(Filled, self.generations.on_filled)
        self.handle(StepFailed, self.generations.on_step_failed)
        self.handle_bare(self._on_client)

    async def start(self) -> None:
        await self._bind()
        if self.metrics is not None:
            await self.metrics.start()
        self.depend(self._subscribers.publish(), "publish")
        self.registry.start()

    async def _bind(self) -> None:
        """Bind the mailbox; a passing connection may have got the port of a coordinator that
        died."""
        give_up = time.monotonic() + self._port_s
        while True:
            try:
                return await super().start()
            except ZrtError:
                if time.monotonic() >= give_up:
                    raise
                await asyncio.sleep(PORT_RETRY_S)

    async def stop(self) -> None:
        self.generations.fail_all(ZrtError("coordinator_lost", "the coordinator was stopped", self.name))
        if self.metrics is not None:
            self.metrics.close()
        await super().stop()
        self.prompts.close()

    # ---- the plan --------------------------------------------------------------------------------

    def _roster(self) -> Roster:
        conf, spec = self.conf, self.spec
        made = seats(
            [(part.first, part.last) for part in stage_ranges(conf, spec)], [one.replicas for one in conf.stages]
        )
        return Roster(
            [
                replace(
                    seat,
                    tp=stage.tp,
                    lend=lends(conf, seat.stage),
                    helped=stage.backend == "layers",
                    gpu_memory=stage.gpu_memory,
                )
                for seat in made
                for stage in [conf.stages[seat.stage]]
            ],
            needed=lambda first, last: block_server_bytes(conf, spec, first, last),
            pages=lambda seat: kv_pages(spec, seat.last - seat.first + 1, conf.model.dtype, conf.kv.bytes, seat.tp),
            spares=spare_names(conf),
        )

    def _template(self, folder: Path) -> Assignment:
        """What all stages' assignments have in common. A demo name or hub id is resolved by each
        machine itself."""
        conf = self.conf
        reference = str(folder) if Path(conf.model.ref).expanduser().exists() else conf.model.ref
        return Assignment(
            serial=0,
            model=reference,
            weights=conf.model.weights,
            first=0,
            last=0,
            num_blocks=self.spec.num_blocks,
            dtype=conf.model.dtype,
            kv_bytes=conf.kv.bytes,
            context=self.prompts.context,
            sessions=conf.limits.sessions,
            chunk=conf.chunk,
            idle_s=conf.limits.idle_s,
        )

    # ---- what the stages say ---------------------------------------------------------------------

    # ---- clients ---------------------------------------------------------------------------------

    def _on_client(self, bare: Bare) -> None:
        try:
            request = decode_client(bare.frame)
        except WireError as error:
            self._refuse(bare, error.id, error, self.name)
            return
        try:
            self.spawn(self._serve(bare, request), f"client {request.id}")
        except ZrtError as error:
            self._refuse(bare, request.id, error, self.name)

    async def _serve(self, bare: Bare, request: ClientRequest) -> None:
        try:
            await self._obey(bare, request)
        except ZrtError as error:
            self._refuse(bare, request.id, error, error.where)

    def _refuse(self, bare: Bare, request: str, error: ZrtError | WireError, where: str) -> None:
        self.happened.add("refusal", caller_name(bare), error.message, error.kind)
        self._tell_client(bare, Error(id=request, kind=error.kind, message=error.message, where=where))

    async def _obey(self, bare: Bare, request: ClientRequest) -> None:
        match request:
            case Generate():
                await self.generations.start(bare, request)
            case Resume():
                self.generations.resume(bare, request)
            case Cancel():
                self._cancel(bare, request)
                self._tell_client(bare, Ok(id=request.id))
            case Status():
                cluster = self._cluster(request.id)
                cluster.happened = self.happened.since(0)
                self._tell_client(bare, cluster)
            case Subscribe():
                self._subscribers.add(bare, request)
            case Follow():
                self.generations.follow(bare, request)
            case Unsubscribe():
                self._subscribers.remove(bare.peer, request.id)
                self.generations.unfollow(bare.peer, request.id)
                self._tell_client(bare, Ok(id=request.id))
            case Drain():
                self._tell_client(
                    bare,
                    await self.drains.drain(request, caller_name(bare), lambda event: self._tell_client(bare, event)),
                )
            case Undrain():
                await self.drains.undrain(request.name)
                self._tell_client(bare, Ok(id=request.id))
            case Restart():
                await self._restart(request.name)
                self._tell_client(bare, Ok(id=request.id))
            case Down():
                self._tell_client(bare, Ok(id=request.id))
                within = request.timeout_ms / 1000
                self.happened.add("down", caller_name(bare), f"the cluster goes down, in {within:g} s at most")
                self.registry.go_down(within)
                await self.drains.all_finished(within)
                gone = ZrtError("cancelled", "the cluster was shut down")
                self.generations.fail_all(gone)
                self._subscribers.end(gone)
                self._down()

    def _cancel(self, bare: Bare, request: Cancel) -> None:
        if request.session is not None and request.request is None:
            self.generations.cancel(request.session)
        elif request.request is not None and request.session is None:
            self.generations.cancel_of(bare, request.request)
        else:
            raise ZrtError("bad_request", "give exactly one of session, request")

    def _tell_client(self, bare: Bare, event: ClientEvent) -> bool:
        """False when the client is gone or does not read."""
        try:
            return self.reply_bare(bare, encode_event(event))
        except ZrtError as error:
            self._complaints.add("client", f"a client takes no replies: {error}")
            return False

    async def _restart(self, name: str) -> None:
        """Have it killed by its parent, which starts it again. ZrtError as `Restart` says."""
        address = self.roster.server_or_worker(name).address
        supervisors = self.roster.of_kind("supervisor")
        if not supervisors:
            raise ZrtError("unsupported", f"there is no `zrt up` here that could start {name} again", self.name)
        await self.ask(supervisors[0].address, Kill(name, address.incarnation), timeout=KILL_DEADLINE_S)

    def _cluster(self, request: str) -> Cluster:
        return Cluster(
            id=request,
            name=self.conf.cluster.name,
            model=self.conf.model.ref,
            ready=self.roster.pipeline.ready,
            context=self.prompts.context,
            num_blocks=self.spec.num_blocks,
            fault=self.roster.pipeline.fault(),
            actors=sorted([*self.roster.infos(time.monotonic()), self._info()], key=pipeline_order),
            sessions=list(self.generations.infos()),
            stale=self.generations.dropped_stale + self.roster.stale + self.counters.stale,
            up_ms=int((time.monotonic() - self.generations.began) * 1000),
            tokens=self.generations.tokens,
            incarnation=self.incarnation,
            errors=dict(self.happened.errors),
            drains=self.drains.infos(),
        )

    def _info(self) -> ActorInfo:
        return ActorInfo(
            self.name,
            "coordinator",
            "ready",
            endpoint=self.endpoint,
            pid=os.getpid(),
            host=socket.gethostname(),
            rss_bytes=resident_memory(),
            restarts=self.restarts,
        )

    def _exposition(self) -> bytes:
        return exposition(self._cluster(""), self.generations.times, self.drains.ended)

    def _down(self) -> None:
        """`zrt up` ends everything it started; without one, every process is told, and this one
        ends."""
        self.registry.closed = True
        supervisors = self.roster.of_kind("supervisor")
        for entry in supervisors or self.roster.of_kind("block_server"):
            self.registry.tell(entry.address, Shutdown())
        if not supervisors:
            self.status = DOWN_STATUS if self._has_parent else 0
            self.ended.set()
