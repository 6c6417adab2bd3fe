"""`zrt up`: the parent of a cluster's processes. It starts the coordinator and the block servers of
a cluster file, shows how they load, restarts what dies, and leaves nothing behind.

Sends to the coordinator: Register, Beat, ChildDied; as a client: Subscribe, Status, Generate, Down.
Receives from it: Kill, GoingDown, Shutdown.
"""

import asyncio
import logging
import secrets
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, suppress
from typing import Final, Protocol

from zrt.actors.node.absentees import Absentees
from zrt.actors.node.command_lines import CommandLines, Line
from zrt.actors.node.console import Console
from zrt.actors.node.departure import Departure
from zrt.actors.node.process_losses import COORDINATOR, ProcessLosses, final_fault
from zrt.actors.options import ClusterOptions
from zrt.runtime.actor.envelope import Envelope
from zrt.runtime.actor.member import Member
from zrt.runtime.client.client import Client
from zrt.runtime.cluster.file_schema import Conf
from zrt.runtime.cluster.seats import seat_name, spare_names
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.client import Cluster
from zrt.runtime.messages.control import Control, Done
from zrt.runtime.messages.members import GoingDown, Kill
from zrt.runtime.process import runfiles
from zrt.runtime.process.lifeline import Lifeline
from zrt.runtime.process.load_bars import Bars
from zrt.runtime.process.supervisor import Child, RestartPolicy, Supervisor
from zrt.runtime.process.terminal import ending_signals

log = logging.getLogger(__name__)

STOP_S: Final = 5.0
"""How long a process may take to end in good order."""
HURRY_S: Final = 1.0
"""How long the coordinator may take when the departure is hurried: its last words are on their
way."""
READY_S: Final = 30.0
"""How long a process may take until its sockets are bound: to start and import, not to load."""
WATCH_S: Final = 0.5
"""How often the coordinator is checked for signs of life."""


class Ask(Protocol):
    """A question that `zrt up` asks its cluster once that is ready."""

    async def __call__(self, client: Client) -> int:
        """Ask, show the answer, and return the exit status."""


async def up(conf: Conf, options: ClusterOptions, ask: Ask | None, lifeline: Lifeline, *, detached: bool) -> int:
    """Bring the cluster up; stay until it is told to go, or until `ask`, if given, has its answer.
    Return the exit status.

    `conf` is what `options` read; `detached` says that stderr is a log. ZrtError: why the cluster
    did not come up, or ended by itself.
    """
    node = Node(conf, options, detached=detached)
    loop = asyncio.get_running_loop()
    for number in ending_signals():
        loop.add_signal_handler(number, node.on_signal, number)
    ended = asyncio.ensure_future(node.departure.ended.wait())
    work = asyncio.ensure_future(node.serve(ask, lifeline))
    try:
        await asyncio.wait({work, ended}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (work, ended):
            task.cancel()
        await asyncio.wait({work, ended})
        await node.stop()
    if ask is not None and not work.cancelled() and not work.exception():
        return work.result()
    if node.departure.fault is not None:
        raise node.departure.fault
    if ask is None and node.was_ready:
        node.departure.say_goodbye(conf.cluster.name)
        return 0
    if work.cancelled():
        until = "it was ready" if ask is None else "the question was answered"
        raise ZrtError("cancelled", f"{conf.cluster.name} was told to end before {until}")
    return work.result()


class Node:
    """The processes of one cluster: started, shown as they load, and ended when the cluster is to
    go (see Departure). `member` belongs to the coordinator, and is None until that is ready;
    `was_ready`: the cluster has been ready."""

    def __init__(self, conf: Conf, options: ClusterOptions, *, detached: bool) -> None:
        self.conf = conf
        self.detached = detached
        self.was_ready = False
        self.member: Member | None = None
        self.console = Console(conf.log.format)
        self.departure = Departure(self.console)
        self._events = ProcessLosses(conf, self, self.departure, self.console)
        self._supervisor = Supervisor(self._events, sink=self.console.on_line)
        self._cluster = secrets.token_hex(8)
        self._lines = CommandLines(conf, options, self._cluster, detached=detached)
        self._endpoint = ""
        self._answering = False

    # ---- the cluster's life ----------------------------------------------------------------------

    async def serve(self, ask: Ask | None, lifeline: Lifeline) -> int:
        """Start everything, say when the cluster is ready, and return the exit status of `ask`.
        Without a question, stay and say what comes back."""
        member = await self._start()
        async with AsyncExitStack() as stack:
            client = await self._client(stack)
            member.spawn(Absentees(member, self._supervisor, self.console).follow(client), "roll call")
            with Bars() as bars:
                self.console.bars = bars
                try:
                    async with aclosing(client.watch()) as watch:
                        cluster = await self._until_ready(watch, bars)
                        bars.finish(cluster)
                        if ask is None:
                            ends = "`zrt down` ends it" if self.detached else "Ctrl-C or `zrt down` ends it"
                            self.console.say(f"zrt: {self.conf.cluster.name} is ready at {self._endpoint}; {ends}")
                            lifeline.ready(self._endpoint, 0)
                            await self._until_loaded(cluster, watch, bars)
                finally:
                    self.console.bars = None
            if ask is None:
                await self._events.recoveries.follow(client, self._supervisor, self.console)
            lifeline.ready(self._endpoint, 0)
            self._answering = True
            return await ask(client)

    async def _client(self, stack: AsyncExitStack) -> Client:
        """Return a client of the coordinator. ZrtError bad_config: the coordinator runs, and its
        advertised endpoint leads elsewhere."""
        try:
            return await stack.enter_async_context(Client(self._endpoint))
        except ZrtError as error:
            if error.kind != "coordinator_lost" or self.conf.cluster.advertise is None:
                raise
            text = f"[cluster] advertise: {self._endpoint} does not lead to this machine, or not from here, and the cluster's processes meet there"
            raise ZrtError("bad_config", text) from error

    async def _start(self) -> Member:
        """Start every process, and return our own membership. The coordinator comes first: block
        servers must find it, not another that holds the port."""
        coordinator = self._spawn(COORDINATOR, self._lines.coordinator())
        endpoint = self._endpoint = (await coordinator.ready()).endpoint
        coordinator.argv = self._lines.coordinator_again(endpoint).argv
        self._leave_note(endpoint)
        for stage, conf in enumerate(self.conf.stages):
            for replica in range(conf.replicas):
                name = seat_name(stage, replica, conf.replicas)
                self._spawn(name, self._lines.server(name, endpoint, conf))
        for name in spare_names(self.conf):
            self._spawn(name, self._lines.server(name, endpoint, self.conf.spares))
        for worker in self.conf.workers:
            if not worker.join:
                self._spawn(worker.name, self._lines.worker(endpoint, worker))
        self.member = member = Member("up", "supervisor", join=endpoint, cluster=self._cluster)
        member.state = "ready"
        member.ended = self.departure.ended
        member.obey(Kill, self._on_kill)
        member.obey(GoingDown, self._on_going_down)
        member.on_registered(self._events.on_registered)
        await member.start()
        member.every(WATCH_S, self._watch)
        return member

    def _spawn(self, name: str, line: Line) -> Child:
        restart = RestartPolicy(budget=self.conf.limits.restarts)
        return self._supervisor.spawn(name, line.argv, env=line.environment, ready_s=READY_S, restart=restart)

    async def _until_ready(self, watch: AsyncIterator[Cluster], bars: Bars) -> Cluster:
        """Show how the stages load, until the cluster is ready. ZrtError, as the cluster's fault
        says: it will not become ready."""
        async for cluster in watch:
            if cluster.fault:
                raise final_fault(cluster.fault)
            bars.loading(cluster)
            if cluster.ready:
                self.was_ready = True
                return cluster
        raise ZrtError("internal", "the coordinator says no more of its cluster")

    async def _until_loaded(self, cluster: Cluster, watch: AsyncIterator[Cluster], bars: Bars) -> None:
        """Show how the remaining replicas load: a cluster is ready with one of each stage."""
        with suppress(ZrtError, StopAsyncIteration):  # the coordinator is gone, and with it who says
            while any(actor.stage >= 0 and actor.state == "loading" for actor in cluster.actors):
                cluster = await anext(watch)
                bars.loading(cluster)

    def _leave_note(self, endpoint: str) -> None:
        try:
            runfiles.write(endpoint, self.conf.cluster.name)
        except OSError as error:
            self.console.say(f"zrt: other commands do not find this cluster without --connect {endpoint}: {error}")

    async def stop(self) -> None:
        """End every process, in good order where that does not take long: the coordinator last,
        since all others talk to it."""
        self.departure.begin()
        runfiles.remove()
        try:
            if self.member is not None:
                await self.member.stop()
        finally:
            servers = [child for child in self._supervisor.children.values() if child.name != COORDINATOR]
            patience = STOP_S
            if self.departure.hurried:
                patience = HURRY_S
                for child in servers:
                    child.dismiss()
                    child.kill()
            await asyncio.gather(*(child.stop(STOP_S) for child in servers), return_exceptions=True)
            await self._supervisor.stop(patience)

    # ---- what happens meanwhile ------------------------------------------------------------------

    def on_signal(self, number: signal.Signals) -> None:
        """End the cluster by a signal. The first Ctrl-C ends it in good order: sessions may finish
        for LEAVE_S. The second waits only until clients are told; the third, or one while processes
        end, kills them."""
        departure = self.departure
        departure.signalled(number)
        if departure.ended.is_set() or departure.hurried:
            self._supervisor.kill()
            departure.ended.set()
        elif self._answering or not self.was_ready:
            departure.ended.set()
        else:
            departure.leave(self._endpoint)

    def _watch(self) -> None:
        self.console.flush()
        self._events.watch()

    def _on_going_down(self, message: GoingDown, envelope: Envelope) -> Control:
        """Let the coordinator bring the cluster down."""
        if self.member is not None:
            self.member.goes_down = True
        self.departure.expect(message.within_ms / 1000)
        return Done()

    def _on_kill(self, message: Kill, envelope: Envelope) -> Control:
        child = self._supervisor.children.get(message.name)
        if child is None:
            text = f"{message.name} was not started by this `zrt up`"
            if envelope.header.request:
                raise ZrtError("bad_request", text, "up")
            log.debug("no Kill: %s", text)  # the coordinator tells us of whoever is silent
        elif child.incarnation == message.incarnation:
            child.kill()
        return Done()
