"""`zrt up`: the parent of a cluster's processes. It starts the coordinator and the block servers of a cluster file, shows how they load,
restarts what dies, and leaves nothing behind.

Sends to the coordinator: Register, Beat, ChildDied; as a client: Subscribe, Generate, Down. Receives from it: Kill, Shutdown.
"""

import asyncio
import logging
import os
import secrets
import sys
import time
from contextlib import aclosing
from typing import Final

import msgspec

from zrt.runtime import running
from zrt.runtime.actor import Envelope
from zrt.runtime.asking import Question, answer
from zrt.runtime.client import LEAVE_S, Client
from zrt.runtime.cluster_file import Cluster, Conf, Spares, Stage, Worker
from zrt.runtime.compute.threads import thread_environment
from zrt.runtime.config import endpoint as listens_on
from zrt.runtime.config import threads
from zrt.runtime.connection import CONNECT_S
from zrt.runtime.counted import counted
from zrt.runtime.errors import KINDS, Kind, ZrtError
from zrt.runtime.foreground import ending_signals, listens, say
from zrt.runtime.lifeline import Lifeline
from zrt.runtime.logs import STAMP, VARIABLE
from zrt.runtime.member import Member
from zrt.runtime.messages.control import ChildDied, Control, Done, Kill
from zrt.runtime.seats import seat_name, spare_names
from zrt.runtime.show import Bars
from zrt.runtime.spawn import Ready, command
from zrt.runtime.supervise import Child, Death, Restart, Supervisor

log = logging.getLogger(__name__)

STOP_S: Final = 5.0
"""How long a process may take to end in good order."""
TELL_S: Final = 3.0
PORT_S: Final = 5.0
"""How long a coordinator waits for the port of the one whose place it takes."""
READY_S: Final = 30.0
"""How long a process may take until its sockets are bound: to start and import, not to load."""
COORDINATOR: Final = "coordinator"
HUNG_S: Final = 4.0
"""A coordinator that answers nothing for so long, less what our own loop was late, is taken for hung: it is asked once a second."""
WATCH_S: Final = 0.5


async def up(conf: Conf, words: list[str], question: Question | None, lifeline: Lifeline, *, detached: bool) -> int:
    """Bring the cluster up; stay until it is told to go, or until `question` is answered: the exit status.

    `words` are the conf's command line words; where it is `detached`, stderr is a log. ZrtError: why it did not come up, or ended by itself.
    """
    parent = Parent(conf, words, detached=detached)
    loop = asyncio.get_running_loop()
    for number in ending_signals():
        loop.add_signal_handler(number, parent.on_signal)
    ended = asyncio.ensure_future(parent.ended.wait())
    work = asyncio.ensure_future(parent.serve(question, lifeline))
    try:
        await asyncio.wait({work, ended}, return_when=asyncio.FIRST_COMPLETED)
        if question is None and work.done() and not work.exception():
            await ended
    finally:
        for task in (work, ended):
            task.cancel()
        await asyncio.wait({work, ended})
        await parent.stop()
    done = not work.cancelled() and not work.exception()
    if question is not None and done:
        return work.result()
    if parent.fault is not None:
        raise parent.fault
    if question is None and parent.was_ready:
        return 0
    if work.cancelled():
        until = "it was ready" if question is None else "the question was answered"
        raise ZrtError("cancelled", f"{conf.cluster.name} was told to end before {until}")
    return work.result()


class Parent:
    """The processes of one cluster. `ended` is set when it is to go: by `zrt down`, by a signal, or by a death that is final (`fault`): the
    coordinator's, or while it comes up that of any but a spare. Later a stage that is lost is told its sessions, and the cluster stays."""

    def __init__(self, conf: Conf, words: list[str], *, detached: bool) -> None:
        self.conf = conf
        self.detached = detached
        self.ended = asyncio.Event()
        self.fault: ZrtError | None = None
        self.was_ready = False
        self._answering = False
        self._words = words
        self._cluster = secrets.token_hex(8)
        self._spares = spare_names(conf)
        self._endpoint = ""
        self._leaving: asyncio.Task[None] | None = None
        self._member: Member | None = None
        self._bars: Bars | None = None
        self._supervisor = Supervisor(self._on_death, on_ready=self._on_ready, sink=self._on_line)
        self._coordinator_ready = 0.0
        self._unsaid = 0
        self._given_up: dict[str, ChildDied] = {}

    # ---- the cluster's life -------------------------------------------------------------------------------------

    async def serve(self, question: Question | None, lifeline: Lifeline) -> int:
        """Start everything, say when it is ready, and answer the question if there is one: the exit status."""
        endpoint = await self._start()
        async with Client(endpoint) as client:
            await self._wait_ready(client)
            self.was_ready = True
            if question is not None:
                lifeline.ready(endpoint, 0)
                self._answering = True
                return await answer(client, question)
        ends = "`zrt down` ends it" if self.detached else "Ctrl-C or `zrt down` ends it"
        self._say(f"zrt: {self.conf.cluster.name} is ready at {endpoint}; {ends}")
        lifeline.ready(endpoint, 0)
        return 0

    async def _start(self) -> str:
        """The coordinator first: block servers must find this one, not another that holds the port. Its endpoint."""
        coordinator = self._supervisor.spawn(
            COORDINATOR,
            [*command("actor", "coordinator"), *self._words, "--cluster-id", self._cluster],
            env=self._environment(1),
            ready_s=READY_S,
            restart=self._restart,
        )
        endpoint = (await coordinator.ready()).endpoint
        self._endpoint = endpoint
        # after a crash it must come back where everybody looks for it, and a passing connection may have that port
        coordinator.argv += ["--listen", _bound(self.conf.cluster, endpoint), "--port-wait", str(PORT_S)]
        self._leave_note(endpoint)
        for stage, conf in enumerate(self.conf.stages):
            for replica in range(conf.replicas):
                self._spawn_server(seat_name(stage, replica, conf.replicas), endpoint, conf)
        for name in self._spares:
            self._spawn_server(name, endpoint, self.conf.spares)
        for worker in self.conf.workers:
            if not worker.join:
                self._spawn_worker(worker, endpoint)
        self._member = member = Member("up", "supervisor", join=endpoint, cluster=self._cluster)
        member.state = "ready"
        member.ended = self.ended
        member.obey(Kill, self._on_kill)
        member.on_registered(self._on_registered)
        await member.start()
        member.every(WATCH_S, self._watch)
        return endpoint

    def _environment(self, threads: int) -> dict[str, str]:
        log = self.conf.log
        form = "dated" if log.format == "text" and self.detached else log.format
        return thread_environment(threads) | {VARIABLE: f"{log.level}:{form}"}

    def _spawn_server(self, name: str, endpoint: str, conf: Stage | Spares) -> None:
        alone, shared = threads(self.conf, conf, len(os.sched_getaffinity(0)))
        words = ["--join", endpoint, "--name", name, "--device", conf.device, "--cluster-id", self._cluster]
        words += ["--threads", str(alone), "--shared-threads", str(shared)]
        if conf.memory is not None:
            words += ["--memory", str(conf.memory)]
        self._supervisor.spawn(
            name,
            [*command("actor", "block-server"), *words],
            env=self._environment(alone),
            ready_s=READY_S,
            restart=self._restart,
        )

    def _spawn_worker(self, conf: Worker, endpoint: str) -> None:
        threads = conf.threads or len(os.sched_getaffinity(0))
        words = ["--join", endpoint, "--name", conf.name, "--device", conf.device, "--threads", str(threads)]
        if conf.memory is not None:
            words += ["--memory", str(conf.memory)]
        self._supervisor.spawn(
            conf.name,
            [*command("worker"), *words, "--cluster-id", self._cluster],
            env=self._environment(threads),
            ready_s=READY_S,
            restart=self._restart,
        )

    @property
    def _restart(self) -> Restart:
        return Restart(budget=self.conf.limits.restarts)

    async def _wait_ready(self, client: Client) -> None:
        """Show how the stages load. ZrtError as the cluster's fault says, when it will not become ready."""
        with Bars() as bars:
            self._bars = bars
            try:
                async with aclosing(client.watch()) as watch:
                    async for cluster in watch:
                        if cluster.fault:
                            raise _fault(cluster.fault)
                        bars.loading(cluster)
                        if cluster.ready:
                            return
            finally:
                self._bars = None

    def _leave_note(self, endpoint: str) -> None:
        try:
            running.write(endpoint, self.conf.cluster.name)
        except OSError as error:
            self._say(
                f"zrt: other commands will not find this cluster by themselves, say --connect {endpoint}: {error}"
            )

    async def stop(self) -> None:
        """End every process, in good order where it does not take long: the coordinator last, since all others talk to it."""
        self.ended.set()
        running.remove()
        if self._leaving is not None:
            self._leaving.cancel()
        try:
            if self._member is not None:
                await self._member.stop()
        finally:
            servers = [child for child in self._supervisor.children.values() if child.name != COORDINATOR]
            await asyncio.gather(*(child.stop(STOP_S) for child in servers), return_exceptions=True)
            await self._supervisor.stop(STOP_S)

    # ---- what happens meanwhile ---------------------------------------------------------------------------------

    def on_signal(self) -> None:
        """The first Ctrl-C ends the cluster in good order: sessions may finish for LEAVE_S. The second ends it at once."""
        if self.ended.is_set() or self._leaving is not None:
            self._supervisor.kill()
            self.ended.set()
        elif self._answering or not self.was_ready:
            self.ended.set()
        else:
            self._leaving = asyncio.ensure_future(self._leave())

    async def _leave(self) -> None:
        """Have the coordinator bring the cluster down as `zrt down` does; it tells us when to go."""
        try:
            async with asyncio.timeout(CONNECT_S + LEAVE_S), Client(self._endpoint) as client:
                if (await client.status()).sessions:
                    self._say(f"zrt: sessions may go on for {LEAVE_S:g} s; Ctrl-C again ends the cluster at once")
                await client.down(LEAVE_S)
        except (ZrtError, TimeoutError) as error:
            log.info("the coordinator does not bring the cluster down: %s", error)
        self.ended.set()

    def _on_ready(self, child: Child, ready: Ready) -> None:
        if child.name == COORDINATOR:
            self._coordinator_ready = time.monotonic()

    def _watch(self) -> None:
        """A hung coordinator is killed, and so starts again; of all other processes the coordinator says when they hang."""
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
        child = self._supervisor.children[death.name]
        brief = msgspec.structs.replace(death, words="")  # its words were shown as they came
        if death.restarting:
            self._say(f"zrt: {brief}; it is started again")
        report = ChildDied(death.name, death.incarnation, death.exit, death.restarting)
        if not death.restarting:
            self._given_up[death.name] = report
        if self._member is not None:
            self._report(self._member, report)
        if death.restarting:
            return
        final = _final(child, str(death), str(brief))
        if death.name == COORDINATOR or not (self.was_ready or death.name in self._spares):
            self.fault = final
            self.ended.set()
        else:
            self._say(f"zrt: {final}; the cluster stays")

    def _on_registered(self, again: bool) -> None:
        """Whoever is the coordinator now may not have heard of those that are not started again: it would wait for them."""
        for report in self._given_up.values():
            assert self._member is not None
            self._report(self._member, report)

    def _report(self, member: Member, report: ChildDied) -> None:
        member.spawn(self._tell_death(member, report), f"death of {report.name}")

    async def _tell_death(self, member: Member, report: ChildDied) -> None:
        try:
            await member.ask_coordinator(report, timeout=TELL_S)
        except ZrtError as error:
            log.info("the coordinator did not hear that %s died: %s", report.name, error)

    def _on_kill(self, envelope: Envelope) -> Control:
        message = envelope.body
        assert isinstance(message, Kill)
        child = self._supervisor.children.get(message.name)
        if child is None:
            raise ZrtError("bad_request", f"{message.name} was not started by this `zrt up`", "up")
        if child.incarnation == message.incarnation:
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


def _bound(cluster: Cluster, reached: str) -> str:
    """Where the coordinator that is reached there listens, its port included."""
    if cluster.advertise is None or listens_on(cluster.listen)[1]:
        return reached if cluster.advertise is None else cluster.listen
    return f"{cluster.listen.rpartition(':')[0]}:{listens_on(reached)[1]}"


def _final(child: Child, told: str, brief: str) -> ZrtError:
    """Why a child is not started again, from what its supervisor says of it."""
    error = child.fault or ZrtError("internal", told)
    kind: Kind = error.kind
    if kind == "internal":
        kind = "coordinator_lost" if child.name == COORDINATOR else "stage_lost"
    again = f", after {counted(child.restarts, 'restart')}" if child.restarts else ""
    where = "" if child.name == COORDINATOR else error.where  # what it refuses was said to `zrt up`
    return ZrtError(kind, error.message.replace(told, brief) + again, where)


def _fault(text: str) -> ZrtError:
    """A cluster's fault as an error."""
    kind, _, message = text.partition(": ")
    return ZrtError.of(kind, message) if kind in KINDS else ZrtError("stage_lost", text)
