"""What clients ask of the coordinator, and who does it.

Receives from clients (single frames, messages/client.py): Generate, Resume, Cancel, Status,
Subscribe, Follow, Unsubscribe, Drain, Undrain, Restart, Down. Sends to clients: events. To `zrt
up`: Kill.
"""

import logging
from typing import Final, Protocol

from msgspec.structs import replace

from zrt.actors.coordinator.event_log import EventLog
from zrt.actors.coordinator.fleet.drains import Drains
from zrt.actors.coordinator.fleet.membership import Membership
from zrt.actors.coordinator.fleet.roster import Roster
from zrt.actors.coordinator.sessions.delivery import caller_name
from zrt.actors.coordinator.sessions.generations import Generations
from zrt.actors.coordinator.subscribers import Subscribers
from zrt.runtime.actor.actor import Actor
from zrt.runtime.actor.envelope import Bare
from zrt.runtime.actor.log_limiter import LogLimiter
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.client import (
    Cancel,
    ClientEvent,
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
from zrt.runtime.messages.members import Kill
from zrt.runtime.wire.clients import decode_client, encode_event
from zrt.runtime.wire.decode_errors import WireError

log = logging.getLogger(__name__)

KILL_DEADLINE_S = 5.0

PromptlyServed = Generate | Resume | Cancel | Subscribe | Follow | Unsubscribe
LastingRequest = Status | Drain | Undrain | Restart | Down
LASTING: Final = (Status, Drain, Undrain, Restart, Down)
"""The requests that are answered once other processes have."""


class RunningCluster(Protocol):
    """A cluster that can be looked at and ended."""

    async def fresh_snapshot(self, request: str) -> Cluster:
        """Return the cluster as it is now, but for its event log, as the answer to this request;
        its processes are asked how they are."""
        ...

    def end(self) -> None:
        """End all processes of the cluster."""
        ...


class ClientRequests:
    """The requests that reach the coordinator `actor`, each served as a task of its own."""

    def __init__(
        self,
        actor: Actor,
        cluster: RunningCluster,
        roster: Roster,
        membership: Membership,
        generations: Generations,
        drains: Drains,
        subscribers: Subscribers,
        event_log: EventLog,
    ) -> None:
        self._actor = actor
        self._cluster = cluster
        self._roster = roster
        self._membership = membership
        self._generations = generations
        self._drains = drains
        self._subscribers = subscribers
        self._event_log = event_log
        self._log_limiter = LogLimiter(actor.name)

    def receive(self, bare: Bare) -> None:
        """Decode a request, and serve it: at once and in order of arrival, or as a task of its own
        where it waits for others. Refuse what does not decode."""
        try:
            request = decode_client(bare.frame)
        except WireError as error:
            self._refuse(bare, error.id, error, self._actor.name)
            return
        try:
            if isinstance(request, LASTING):
                self._actor.spawn(self._serve(bare, request), f"client {request.id}")
            else:
                self._obey(bare, request)
        except ZrtError as error:
            self._refuse(bare, request.id, error, error.where or self._actor.name)
        except Exception as error:
            log.exception("a request is not served")
            failed = ZrtError("internal", f"the request is not served: {error!r}")
            self._refuse(bare, request.id, failed, self._actor.name)

    async def _serve(self, bare: Bare, request: LastingRequest) -> None:
        try:
            await self._obey_in_time(bare, request)
        except ZrtError as error:
            self._refuse(bare, request.id, error, error.where)

    def _refuse(self, bare: Bare, request: str, error: ZrtError | WireError, where: str) -> None:
        self._event_log.add("refusal", caller_name(bare), error.message, error.kind)
        self._tell_client(bare, Error(id=request, kind=error.kind, message=error.message, where=where))

    def _obey(self, bare: Bare, request: PromptlyServed) -> None:
        match request:
            case Generate():
                self._generations.start(bare, request)
            case Resume():
                self._generations.resume(bare, request)
            case Cancel():
                self._cancel(bare, request)
                self._tell_client(bare, Ok(id=request.id))
            case Subscribe():
                self._subscribers.add(bare, request)
            case Follow():
                self._generations.follow(bare, request)
            case Unsubscribe():
                self._subscribers.remove(bare.peer, request.id)
                self._generations.unfollow(bare.peer, request.id)
                self._tell_client(bare, Ok(id=request.id))

    async def _obey_in_time(self, bare: Bare, request: LastingRequest) -> None:
        match request:
            case Status():
                cluster = await self._cluster.fresh_snapshot(request.id)
                self._tell_client(bare, replace(cluster, happened=self._event_log.since(0)))
            case Drain():
                self._tell_client(
                    bare,
                    await self._drains.drain(request, caller_name(bare), lambda event: self._tell_client(bare, event)),
                )
            case Undrain():
                await self._drains.undrain(request.name)
                self._tell_client(bare, Ok(id=request.id))
            case Restart():
                await self._restart(request.name)
                self._tell_client(bare, Ok(id=request.id))
            case Down():
                self._tell_client(bare, Ok(id=request.id))
                await self._go_down(caller_name(bare), request.timeout_ms / 1000)

    async def _go_down(self, asker: str, within: float) -> None:
        """End the cluster once its sessions have finished, or after `within` seconds."""
        self._event_log.add("down", asker, f"the cluster goes down, in {within:g} s at most")
        self._membership.go_down(within)
        await self._drains.all_finished(within)
        gone = ZrtError("cancelled", "the cluster was shut down")
        self._generations.fail_all(gone)
        self._subscribers.end(gone)
        self._cluster.end()

    def _cancel(self, bare: Bare, request: Cancel) -> None:
        if request.session is not None and request.request is None:
            self._generations.cancel(request.session)
        elif request.request is not None and request.session is None:
            self._generations.cancel_of(bare, request.request)
        else:
            raise ZrtError("bad_request", "give exactly one of session, request")

    def _tell_client(self, bare: Bare, event: ClientEvent) -> bool:
        """Send an event; return False when the client is gone or does not read."""
        try:
            return self._actor.reply_bare(bare, encode_event(event))
        except ZrtError as error:
            self._log_limiter.add("client", f"a client takes no replies: {error}")
            return False

    async def _restart(self, name: str) -> None:
        """Have a process killed by its parent, which starts it again. ZrtError as `Restart`
        says."""
        address = self._roster.server_or_worker(name).address
        supervisors = self._roster.of_kind("supervisor")
        if not supervisors:
            raise ZrtError("unsupported", f"there is no `zrt up` here that could start {name} again", self._actor.name)
        await self._actor.ask(supervisors[0].address, Kill(name, address.incarnation), timeout=KILL_DEADLINE_S)
