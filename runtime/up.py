"""`zrt up`: the parent of a cluster's processes. It starts the coordinator and the block servers of a cluster file, shows how they load,
restarts what dies, and leaves nothing behind.

Sends to the coordinator: Register, Beat, ChildDied; as a client: Subscribe, Generate. Receives from it: Kill, Shutdown.
"""

import asyncio
import logging
import os
import signal
import subprocess
import sys
from contextlib import aclosing
from typing import Final

import msgspec

from zrt.runtime import running
from zrt.runtime.actor import Envelope
from zrt.runtime.asking import Question, answer
from zrt.runtime.client import Client
from zrt.runtime.compute.spec import read_spec
from zrt.runtime.compute.threads import thread_environment
from zrt.runtime.config import Conf, threads
from zrt.runtime.errors import ZrtError
from zrt.runtime.lifeline import READY_FD, Lifeline, hold
from zrt.runtime.member import Member
from zrt.runtime.messages.client import Cluster
from zrt.runtime.messages.control import ChildDied, Control, Done, Kill
from zrt.runtime.models import resolve
from zrt.runtime.roster import seat_name, stage_ranges
from zrt.runtime.show import Bars
from zrt.runtime.spawn import Ready
from zrt.runtime.supervise import Death, Restart, Supervisor

log = logging.getLogger(__name__)

STOP_S: Final = 5.0
"""How long a process may take to end in good order."""
TELL_S: Final = 3.0
READY_S: Final = 60.0
"""How long a process may take until its sockets are bound."""


def prepare(conf: Conf) -> None:
    """Fetch the model and check that the plan fits it, before any process starts. ZrtError bad_model, bad_config, unsupported."""
    with Bars() as bars:
        folder = resolve(conf.model.ref, weights=conf.model.weights == "files", progress=bars.update)
    stage_ranges(conf, read_spec(folder))


async def up(conf: Conf, words: list[str], question: Question | None) -> int:
    """Bring the cluster up; stay until it is told to go, or until `question` is answered. `words` are the conf's command line words."""
    parent = Parent(conf, words)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, parent.on_signal)
    lifeline = hold()
    work = asyncio.ensure_future(parent.serve(question, lifeline))
    try:
        await asyncio.wait({work, asyncio.ensure_future(parent.ended.wait())}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
        await asyncio.wait({work})
    finally:
        await parent.stop()
    if work.cancelled():
        if parent.fault is not None:
            raise parent.fault
        return 0 if parent.was_ready else 1
    return work.result()


class Parent:
    """The processes of one cluster. `ended` is set when it is to go: by `zrt down`, by a signal, or by a death that is final (`fault`)."""

    def __init__(self, conf: Conf, words: list[str]) -> None:
        self.conf = conf
        self.ended = asyncio.Event()
        self.fault: ZrtError | None = None
        self.was_ready = False
        self._words = words
        self._member: Member | None = None
        self._bars: Bars | None = None
        self._supervisor = Supervisor(self._on_death, sink=self._on_line)

    # ---- the cluster's life -------------------------------------------------------------------------------------

    async def serve(self, question: Question | None, lifeline: Lifeline) -> int:
        """Start everything, say when it is ready, and wait for the end or answer the question."""
        endpoint = await self._start()
        async with Client(endpoint) as client:
            await self._wait_ready(client)
            self.was_ready = True
            running.write(endpoint)
            lifeline.ready(endpoint, 0)
            if question is not None:
                return await answer(client, question)
        print(f"zrt: {self.conf.cluster.name} is ready at {endpoint}; Ctrl-C or `zrt down` ends it", file=sys.stderr)
        await self.ended.wait()
        return 0

    async def _start(self) -> str:
        """The coordinator first: block servers must find this one, not another that holds the port. Its endpoint."""
        coordinator = self._supervisor.spawn(
            "coordinator",
            [*_zrt("actor", "coordinator"), *self._words],
            env=thread_environment(1),
            ready_s=READY_S,
            restart=self._restart,
        )
        endpoint = (await coordinator.ready()).endpoint
        cores = len(os.sched_getaffinity(0))
        for stage, conf in enumerate(self.conf.stages):
            count = threads(self.conf, conf, cores)
            for replica in range(conf.replicas):
                name = seat_name(stage, replica, conf.replicas)
                words = ["--join", endpoint, "--name", name, "--device", conf.device, "--threads", str(count)]
                self._supervisor.spawn(
                    name,
                    [*_zrt("actor", "block-server"), *words],
                    env=thread_environment(count),
                    ready_s=READY_S,
                    restart=self._restart,
                )
        self._member = member = Member("up", "supervisor", join=endpoint)
        member.state = "ready"
        member.ended = self.ended
        member.handle(Kill, self._on_kill)
        await member.start()
        return endpoint

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
                            kind, _, message = cluster.fault.partition(": ")
                            raise ZrtError.of(kind, message)
                        _show_loading(bars, cluster)
                        if cluster.ready:
                            return
            finally:
                self._bars = None

    async def stop(self) -> None:
        """End every process, in good order where it does not take long."""
        self.ended.set()
        running.remove()
        if self._member is not None:
            await self._member.stop()
        await self._supervisor.stop(STOP_S)

    # ---- what happens meanwhile ---------------------------------------------------------------------------------

    def on_signal(self) -> None:
        """The first Ctrl-C ends the cluster in good order, the second at once."""
        if self.ended.is_set():
            self._supervisor.kill()
        self.ended.set()

    def _on_death(self, death: Death) -> None:
        if self.ended.is_set():
            return
        self._say(f"zrt: {death}" + ("; it is started again" if death.restarting else ""))
        if self._member is not None:
            report = ChildDied(death.name, death.incarnation, death.exit, death.restarting)
            self._member.spawn(self._tell_death(self._member, report), f"death of {death.name}")
        if not death.restarting:
            self.fault = ZrtError("stage_lost", f"{death}; it was started {self.conf.limits.restarts + 1} times")
            self.ended.set()

    async def _tell_death(self, member: Member, report: ChildDied) -> None:
        try:
            await member.ask_coordinator(report, timeout=TELL_S)
        except ZrtError as error:
            log.info("the coordinator did not hear that %s died: %s", report.name, error)

    def _on_kill(self, envelope: Envelope) -> Control:
        message = envelope.body
        assert isinstance(message, Kill)
        child = self._supervisor.children.get(message.name)
        if child is not None and child.incarnation == message.incarnation:
            child.kill()
        return Done()

    def _on_line(self, name: str, line: str) -> None:
        self._say(f"{name}: {line}")

    def _say(self, text: str) -> None:
        if self._bars is not None:
            self._bars.say(text)
        else:
            print(text, file=sys.stderr, flush=True)


def _show_loading(bars: Bars, cluster: Cluster) -> None:
    for actor in cluster.actors:
        if actor.stage >= 0 and actor.total_bytes:
            what = f"{actor.name} (blocks {actor.blocks})"
            bars.update(actor.done_bytes, actor.total_bytes, what)


def _zrt(*words: str) -> list[str]:
    return [sys.executable, "-m", "zrt.runtime.cli", *words]


def detach(words: list[str]) -> int:
    """Start `zrt up` in the background and return 0 when its cluster is ready; what it says goes to a log file."""
    from zrt.runtime.models import home

    path = home() / "run" / "up.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    reader, writer = os.pipe()
    with path.open("wb") as log_file, open(reader, "rb") as pipe:
        subprocess.Popen(
            _zrt("up", *words),
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=log_file,
            start_new_session=True,
            pass_fds=(writer,),
            env={**os.environ, READY_FD: str(writer)},
        )
        os.close(writer)
        line = pipe.readline()
    if not line:
        sys.stderr.write(path.read_text(errors="replace"))
        return 1
    ready = msgspec.json.decode(line, type=Ready)
    print(f"zrt: ready at {ready.endpoint}; its log is {path}", file=sys.stderr)
    return 0
