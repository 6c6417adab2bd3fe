"""The coordinator: registers processes, gives block servers their blocks, takes clients' sessions
and streams their tokens.

Receives from every process: Register, Beat. From `zrt up`: ChildDied. From block servers:
StateChanged, LoadProgress, Identify, Sampled, Filled, StepFailed. Receives from clients (single
frames, messages/client.py): Generate, Resume, Cancel, Status, Subscribe, Follow, Unsubscribe,
Drain, Undrain, Restart, Down. Sends to block servers: Assign, Workers, SetState, Open, Credit,
Close, InferenceRequest (token ids). To `zrt up`: Kill. To every process: BeatNow, GoingDown,
Shutdown. To clients: events.

Its processes are in fleet/membership.py, its sessions in sessions/generations.py, its clients'
requests in client_requests.py. It computes no tensors and never imports torch.
"""

import asyncio
import logging
import os
import secrets
import socket
import time
from pathlib import Path

from zrt.actors.coordinator.client_requests import ClientRequests
from zrt.actors.coordinator.event_log import EventLog
from zrt.actors.coordinator.fleet.cluster_plan import assignment_template, planned_roster
from zrt.actors.coordinator.fleet.drains import Drains
from zrt.actors.coordinator.fleet.fresh_beats import FreshBeats
from zrt.actors.coordinator.fleet.membership import Membership
from zrt.actors.coordinator.fleet.served_model import ServedModel
from zrt.actors.coordinator.metrics import exposition
from zrt.actors.coordinator.metrics_server import MetricsServer
from zrt.actors.coordinator.prompts.requests import Requests
from zrt.actors.coordinator.sessions.admission import Admission
from zrt.actors.coordinator.sessions.generations import Generations
from zrt.actors.coordinator.sessions.stage_reports import StageReports
from zrt.actors.coordinator.subscribers import Subscribers
from zrt.actors.options import CoordinatorOptions
from zrt.runtime.actor.actor import Actor
from zrt.runtime.actor.actor_process import DOWN_STATUS
from zrt.runtime.cluster.file_loader import handed_over
from zrt.runtime.cluster.file_schema import Conf
from zrt.runtime.errors import ZrtError
from zrt.runtime.host_memory import resident_memory
from zrt.runtime.messages.client import Cluster
from zrt.runtime.messages.cluster import ActorInfo, pipeline_order
from zrt.runtime.messages.members import Shutdown
from zrt.runtime.models.architecture.spec import ModelSpec, read_spec
from zrt.runtime.models.checkpoint.layout import PAGE_TOKENS
from zrt.runtime.models.checkpoint.tensor_digests import TensorDigests
from zrt.runtime.models.fetch.resolve import resolve
from zrt.runtime.wire.limits import MAX_CLIENT_FRAME

log = logging.getLogger(__name__)

PORT_RETRY_S = 0.1


class Coordinator(Actor):
    """One cluster's coordinator, for the model in `folder`, by the (checked) cluster file `conf`.

    `cluster` is the id that its members know the cluster by; a coordinator that takes an earlier
    one's place has that one's id, and waits up to `port_s` seconds for its port, should that be
    taken.
    """

    def __init__(
        self, conf: Conf, folder: Path, spec: ModelSpec, requests: Requests, *, cluster: str = "", port_s: float = 0.0
    ) -> None:
        reached = conf.cluster
        super().__init__("coordinator", listen=reached.listen, advertise=reached.advertise, limit=MAX_CLIENT_FRAME)
        self.conf = conf
        self.spec = spec
        self.requests = requests
        self.roster = planned_roster(conf, spec)
        self.template = assignment_template(conf, spec, folder, requests.context)
        self.cluster = cluster or secrets.token_hex(8)
        self._has_parent = bool(cluster)
        self.event_log = EventLog()
        self._port_s = port_s
        self._fresh_beats = FreshBeats(self, self.roster)
        self._subscribers = Subscribers(self, self.snapshot, self._fresh_beats.gather, self.event_log)
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
            requests,
            admission,
            model=f"{folder} {conf.model.weights} {conf.model.dtype}",
            page_tokens=PAGE_TOKENS,
            lease_s=conf.limits.lease_s,
            idle_s=conf.limits.idle_s,
            event_log=self.event_log,
        )
        self.reports = StageReports(self, self.generations, admission)
        self.membership = Membership(
            self,
            conf,
            self.roster,
            self.generations,
            self.event_log,
            template=self.template,
            model=ServedModel(folder, spec, random=conf.model.weights == "random", digests=TensorDigests()),
            cluster=self.cluster,
            changed=self._subscribers.changed,
        )
        self.drains = Drains(self, self.roster, self.generations, self.event_log, changed=self.membership.changed)
        client_requests = ClientRequests(
            self,
            self,
            self.roster,
            self.membership,
            self.generations,
            self.drains,
            self._subscribers,
            self.event_log,
        )
        self.handle_bare(client_requests.receive)
        self.metrics = MetricsServer(conf.metrics.listen, self) if conf.metrics.listen else None

    async def start(self) -> None:
        await self._bind()
        if self.metrics is not None:
            await self.metrics.start()
        self.depend(self._subscribers.publish(), "publish")
        self.membership.start()

    async def _bind(self) -> None:
        """Bind the mailbox, and try again for a while: a passing connection may have got the port
        of a coordinator that died."""
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
        await self.requests.close()

    # ---- for whoever looks -----------------------------------------------------------------------

    def snapshot(self, request: str = "") -> Cluster:
        """Return the cluster as it is now, but for its event log, as the answer to this request."""
        return Cluster(
            id=request,
            name=self.conf.cluster.name,
            model=self.conf.model.ref,
            ready=self.roster.pipeline.ready,
            context=self.requests.context,
            num_blocks=self.spec.num_blocks,
            fault=self.roster.pipeline.fault(),
            actors=sorted([*self.roster.infos(time.monotonic()), self._info()], key=pipeline_order),
            sessions=list(self.generations.infos()),
            stale=self.reports.dropped_stale + self.roster.stale + self.counters.stale,
            up_ms=int((time.monotonic() - self.generations.began) * 1000),
            tokens=self.reports.tokens,
            incarnation=self.incarnation,
            errors=dict(self.event_log.errors),
            drains=self.drains.infos(),
        )

    async def fresh_snapshot(self, request: str = "") -> Cluster:
        """Return the cluster as `snapshot` does, once its processes have said how they are, as far
        as they answer at once."""
        await self._fresh_beats.gather()
        return self.snapshot(request)

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

    async def exposition(self) -> bytes:
        """Return the cluster's metrics, for Prometheus."""
        return exposition(await self.fresh_snapshot(), self.reports.latencies, self.drains.ended)

    def unready(self) -> str:
        """Return why the cluster is not ready; empty when it is."""
        return self.roster.pipeline.unready()

    def end(self) -> None:
        """Have `zrt up` end everything it started; without one, tell every process to end, and end
        this one."""
        self.membership.close()
        supervisors = self.roster.of_kind("supervisor")
        for record in supervisors or self.roster.of_kind("block_server"):
            self.membership.tell(record.address, Shutdown())
        if not supervisors:
            self.status = DOWN_STATUS if self._has_parent else 0
            self.ended.set()


def make(options: CoordinatorOptions) -> Coordinator:
    """Return the coordinator of a cluster file, as `zrt up` read it or as it is now. Its model must
    have been fetched. ZrtError bad_config, bad_model."""
    conf = options.read(handed_over())
    folder = resolve(conf.model.ref, weights=conf.model.weights == "files", text=False)
    spec = read_spec(folder)
    prompts = Requests(folder, spec, min(conf.model.context, spec.max_positions))
    return Coordinator(conf, folder, spec, prompts, cluster=options.cluster_id, port_s=options.port_wait)
