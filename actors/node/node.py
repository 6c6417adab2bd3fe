"""`zrt up`: the parent of a cluster's processes. It starts the coordinator and the block servers of
a cluster file, shows how they load, restarts what dies, and leaves nothing behind.

Sends to the coordinator: Register, Beat, ChildDied; as a client: Subscribe, Status, Generate, Down.
Receives from it: Kill, GoingDown, Shutdown.
"""

import asyncio
import logging
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, suppress
from typing import Final

import msgspec

from zrt.actors.node.absentees import Absentees
from zrt.actors.node.child_events import COORDINATOR, final_fault, final_loss
from zrt.actors.node.command_lines import CommandLines, Line
from zrt.actors.node.recovery import Recoveries
from zrt.runtime.actor.actor_process import DOWN_STATUS
from zrt.runtime.actor.envelope import Envelope
from zrt.runtime.actor.member import Member
from zrt.runtime.cli.answer import answer
from zrt.runtime.cli.progress import Bars
from zrt.runtime.cli.question import Question
from zrt.runtime.client.client import LEAVE_S, Client
from zrt.runtime.client.connection import CONNECT_S
from zrt.runtime.cluster.file_schema import Conf
from zrt.runtime.cluster.seats import seat_name, spare_names
from zrt.runtime.errors import ZrtError
from zrt.runtime.formatting import counted
from zrt.runtime.messages.client import Cluster
from zrt.runtime.messages.control import Control, Done
from zrt.runtime.messages.members import ChildDied, GoingDown, Kill
from zrt.runtime.process import runfiles
from zrt.runtime.process.lifeline import Lifeline
from zrt.runtime.process.logs import STAMP
from zrt.runtime.process.spawn import Ready
from zrt.runtime.process.supervisor import Child, Death, RestartPolicy, Supervisor
from zrt.runtime.process.terminal import ending_signals, listens, say

log = logging.getLogger(__name__)

STOP_S: Final = 5.0
"""How long a process may take to end in good order."""
HURRY_S: Final = 1.0
"""Likewise a coordinator that nobody wants to wait for: its last words are on their way."""
TELL_S: Final = 3.0
READY_S: Final = 30.0
"""How long a process may take until its sockets are bound: to start and import, not to load."""
HUNG_S: Final = 4.0
"""A coordinator that answers nothing for so long, less what our own loop was late, is taken for
hung: it is asked once a second."""
WATCH_S: Final = 0.5


async def up(conf: Conf, words: list[str], question: Question | None, lifeline: Lifeline, *, detached: bool) -> int:
    """Bring the cluster up; stay until it is told to go, or until `question` is answered: the exit
    status.

    `words` are the conf's command line words; where it is `detached`, stderr is a log. ZrtError:
    why it did not come up, or ended by itself.
    """
    parent = Node(conf, words, detached=detached)
    loop = asyncio.get_running_loop()
    for number in ending_signals():
        loop.add_signal_handler(number, parent.on_signal, number)
    ended = asyncio.ensure_future(parent.ended.wait())
    work = asyncio.ensure_future(parent.serve(question, lifeline))
    try:
        await asyncio.wait({work, ended}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (work, ended):
            task.cancel()
        await asyncio.wait({work, ended})
        await parent.stop()
    if question is not None and not work.cancelled() and not work.exception():
        return work.result()
    if parent.fault is not None:
        raise parent.fault
    if question is None and parent.was_ready:
        parent.say_goodbye()
        return 0
    if work.cancelled():
        until = "it was ready" if question is None else "the question was answered"
        raise ZrtError("cancelled", f"{conf.cluster.name} was told to end before {until}")
    return work.result()


class Node:
    """The processes of one cluster. `ended` is set when it is to go: by `zrt down`, by a signal, or
    by a death that is final (`fault`): the coordinator's, or while it comes up that of any but a
    spare. Later a stage that is lost is told its sessions, and the cluster stays."""

    def __init__(self, conf: Conf, words: list[str], *, detached: bool) -> None:
        self.conf = conf
        self.detached = detached
        self.ended = asyncio.Event()
        self.fault: ZrtError | None = None
        self.was_ready = False
        self._answering = False
        self._cluster = secrets.token_hex(8)
        self._lines = CommandLines(conf, words, self._cluster, detached=detached)
        self._spares = spare_names(conf)
        self._endpoint = ""
        self._leaving: asyncio.Task[None] | None = None
        self._hurried = False
        self._ended_by = "zrt down"
        self._member: Member | None = None
        self._bars: Bars | None = None
        self._supervisor = Supervisor(self._on_death, on_ready=self._on_ready, sink=self._on_line)
        self._coordinator_ready = 0.0
        self._unsaid = 0
        self._recoveries = Recoveries()
        self._away: dict[str, ChildDied] = {}
        """The last death of each child that is not back, or will not be."""
        self._going_down: asyncio.TimerHandle | None = None

    # ---- the cluster's life ----------------------------------------------------------------------

    async def serve(self, question: Question | None, lifeline: Lifeline) -> int:
        """Start everything, say when it is ready, and answer the question: the exit status. Without
        one it stays, and says what comes back."""
        member = await self._start()
        async with AsyncExitStack() as stack:
            client = await self._client(stack)
            member.spawn(Absentees(member, self._supervisor, self._say).follow(client), "roll call")
            with Bars() as self._bars:
                try:
                    async with aclosing(client.watch()) as watch:
                        cluster = await self._until_ready(watch, self._bars)
                        self._bars.finish(cluster)
                        if question is None:
                            ends = "`zrt down` ends it" if self.detached else "Ctrl-C or `zrt down` ends it"
                            self._say(f"zrt: {self.conf.cluster.name} is ready at {self._endpoint}; {ends}")
                            lifeline.ready(self._endpoint, 0)
                            await self._until_loaded(cluster, watch, self._bars)
                finally:
                    self._bars = None
            if question is None:
                await self._recoveries.follow(client, self._supervisor.pids, self._say)
            lifeline.ready(self._endpoint, 0)
            self._answering = True
            return await answer(client, question)

    async def _client(self, stack: AsyncExitStack) -> Client:
        """Of the coordinator. ZrtError bad_config: it runs, and what it is to be reached by leads
        elsewhere."""
        try:
            return await stack.enter_async_context(Client(self._endpoint))
        except ZrtError as error:
            if error.kind != "coordinator_lost" or self.conf.cluster.advertise is None:
                raise
            text = f"[cluster] advertise: {self._endpoint} does not lead to this machine, or not from here, and the cluster's processes meet there"
            raise ZrtError("bad_config", text) from error

    async def _start(self) -> Member:
        """The coordinator first: block servers must find this one, not another that holds the port.
        Ourselves as its member."""
        coordinator = self._spawn(COORDINATOR, self._lines.coordinator())
        endpoint = self._endpoint = (await coordinator.ready()).endpoint
        coordinator.argv += self._lines.coordinator_again(endpoint)
        self._leave_note(endpoint)
        for stage, conf in enumerate(self.conf.stages):
            for replica in range(conf.replicas):
                name = seat_name(stage, replica, conf.replicas)
                self._spawn(name, self._lines.server(name, endpoint, conf))
        for name in self._spares:
            self._spawn(name, self._lines.server(name, endpoint, self.conf.spares))
        for worker in self.conf.workers:
            if not worker.join:
                self._spawn(worker.name, self._lines.worker(endpoint, worker))
        self._member = member = Member("up", "supervisor", join=endpoint, cluster=self._cluster)
        member.state = "ready"
        member.ended = self.ended
        member.obey(Kill, self._on_kill)
        member.obey(GoingDown, self._on_going_down)
        member.on_registered(self._on_registered)
        await member.start()
        member.every(WATCH_S, self._watch)
        return member

    def _spawn(self, name: str, line: Line) -> Child:
        restart = RestartPolicy(budget=self.conf.limits.restarts)
        return self._supervisor.spawn(name, line.argv, env=line.environment, ready_s=READY_S, restart=restart)

    async def _until_ready(self, watch: AsyncIterator[Cluster], bars: Bars) -> Cluster:
        """Show how the stages load. ZrtError as the cluster's fault says, when it will not become
        ready."""
        async for cluster in watch:
            if cluster.fault:
                raise final_fault(cluster.fault)
            bars.loading(cluster)
            if cluster.ready:
                self.was_ready = True
                return cluster
        raise ZrtError("internal", "the coordinator says no more of its cluster")

    async def _until_loaded(self, cluster: Cluster, watch: AsyncIterator[Cluster], bars: Bars) -> None:
        """Show how the other replicas load, whom a cluster that is ready has not waited for."""
        with suppress(ZrtError, StopAsyncIteration):  # the coordinator is gone, and with it who says
            while any(actor.stage >= 0 and actor.state == "loading" for actor in cluster.actors):
                cluster = await anext(watch)
                bars.loading(cluster)

    def _leave_note(self, endpoint: str) -> None:
        try:
            runfiles.write(endpoint, self.conf.cluster.name)
        except OSError as error:
            self._say(f"zrt: other commands do not find this cluster without --connect {endpoint}: {error}")

    async def stop(self) -> None:
        """End every process, in good order where it does not take long: the coordinator last, since
        all others talk to it."""
        self.ended.set()
        runfiles.remove()
        if self._leaving is not None:
            self._leaving.cancel()
        if self._going_down is not None:
            self._going_down.cancel()
        try:
            if self._member is not None:
                await self._member.stop()
        finally:
            servers = [child for child in self._supervisor.children.values() if child.name != COORDINATOR]
            patience = STOP_S
            if self._hurried:
                patience = HURRY_S
                for child in servers:
                    child.dismiss()
                    child.kill()
            await asyncio.gather(*(child.stop(STOP_S) for child in servers), return_exceptions=True)
            await self._supervisor.stop(patience)

    # ---- what happens meanwhile ------------------------------------------------------------------

    def on_signal(self, number: signal.Signals) -> None:
        """The first Ctrl-C ends the cluster in good order: sessions may finish for LEAVE_S. The
        second waits for nothing but that clients are told; the third, or one while processes end,
        kills them.
        """
        self._ended_by = "Ctrl-C" if number is signal.SIGINT else number.name
        if self.ended.is_set() or self._hurried:
            self._supervisor.kill()
            self.ended.set()
        elif self._answering or not self.was_ready:
            self.ended.set()
        elif self._leaving is None:
            self._leaving = asyncio.ensure_future(self._leave(LEAVE_S, CONNECT_S + LEAVE_S))
        else:
            self._hurried = True
            self._leaving.cancel()
            self._leaving = asyncio.ensure_future(self._leave(0.0, TELL_S))

    async def _leave(self, seconds: float, timeout: float) -> None:
        """Have the coordinator bring the cluster down as `zrt down` does; it tells us when to
        go."""
        try:
            async with asyncio.timeout(timeout), Client(self._endpoint) as client:
                if seconds and (await client.status()).sessions:
                    self._say(f"zrt: sessions may go on for {seconds:g} s; Ctrl-C again ends the cluster at once")
                await client.down(seconds)
        except (ZrtError, TimeoutError) as error:
            log.info("the coordinator does not bring the cluster down: %s", error)
        self.ended.set()

    def say_goodbye(self) -> None:
        self._say(f"zrt: {self.conf.cluster.name} is down ({self._ended_by})")

    def _on_ready(self, child: Child, ready: Ready) -> None:
        self._away.pop(child.name, None)
        if child.name == COORDINATOR:
            self._coordinator_ready = time.monotonic()

    def _watch(self) -> None:
        """A hung coordinator is killed, and so starts again; of the others it says when they hang,
        if it ever knew them (see Absentees)."""
        sys.stderr.flush()  # the rest of what a reader has begun to take before it paused
        member, child = self._member, self._supervisor.children[COORDINATOR]
        if member is None or child.incarnation == 0:
            return
        silent = time.monotonic() - max(member.heard, self._coordinator_ready)
        if silent > HUNG_S + member.lag_ms / 1000:
            self._say(f"zrt: {child.name} (process {child.pid}) has been silent for {silent:.1f} s and is killed")
            child.kill()

    def _on_death(self, death: Death) -> None:
        if self.ended.is_set():
            return
        if death.name == COORDINATOR and (self._going_down is not None or death.exit == DOWN_STATUS):
            self.ended.set()
            return
        child = self._supervisor.children[death.name]
        brief = msgspec.structs.replace(death, words="") if death.pid else death  # its words were shown as they came
        if death.restarting:
            self._recoveries.lost(death.name, time.monotonic())
            self._say(f"zrt: {brief}; it is started again")
        report = ChildDied(death.name, death.incarnation, death.exit, death.restarting)
        self._away[death.name] = report
        if not death.restarting:
            self._recoveries.given_up(death.name)
        if self._member is not None:
            self._report(self._member, report)
        if death.restarting:
            return
        final = final_loss(child, self.conf, str(death), str(brief))
        if death.name == COORDINATOR or not (self.was_ready or death.name in self._spares):
            self.fault = final
            self.ended.set()
        else:
            self._say(f"zrt: {final}; the cluster stays")

    def _on_registered(self, again: bool) -> None:
        """Whoever is the coordinator now may not have heard of those that are not there: it would
        wait for them, and spare no other for their blocks. One that was it before knows of those
        that are started again."""
        for report in self._away.values():
            assert self._member is not None
            if report.name != COORDINATOR and not (again and report.restarting):
                self._report(self._member, report)

    def _report(self, member: Member, report: ChildDied) -> None:
        member.spawn(self._tell_death(member, report), f"death of {report.name}")

    async def _tell_death(self, member: Member, report: ChildDied) -> None:
        try:
            await member.ask_coordinator(report, timeout=TELL_S)
        except ZrtError as error:
            log.info("the coordinator did not hear that %s died: %s", report.name, error)

    def _on_going_down(self, message: GoingDown, envelope: Envelope) -> Control:
        """The coordinator tells us when to go; should it die or hang before, we go all the same."""
        if self._member is not None:
            self._member.goes_down = True
        if self._going_down is not None:
            self._going_down.cancel()
        self._going_down = asyncio.get_running_loop().call_later(message.within_ms / 1000 + TELL_S, self.ended.set)
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

    def _on_line(self, name: str, line: str) -> None:
        logged = line.startswith("{") if self.conf.log.format == "json" else STAMP.match(line)
        self._say(line if logged else f"{name}: {line}")

    def _say(self, text: str) -> None:
        """Whoever looks after processes does not wait for those who read what it says."""
        if not listens(sys.stderr):
            self._unsaid += 1
            return
        if self._unsaid:
            text, self._unsaid = f"zrt: nobody read on: {counted(self._unsaid, 'line')} dropped\n{text}", 0
        (self._bars.say if self._bars is not None else say)(text)
