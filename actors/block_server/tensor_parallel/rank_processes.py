"""The processes of a tensor-parallel group's ranks, as their leader keeps them: started,
recognised, watched, ended."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final, TypeVar

import torch

from zrt.actors.block_server.tensor_parallel.group_stats import GroupStats
from zrt.actors.options import RankOptions, command_line
from zrt.runtime.actor.actor import Actor
from zrt.runtime.compute.devices import device_memory
from zrt.runtime.compute.threads import thread_environment
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.control import Address
from zrt.runtime.messages.ranks import (
    Bye,
    Ping,
    Pong,
    QueryVram,
    RankError,
    RankMessage,
    RankShutdown,
    Unloaded,
    UnloadModel,
    VramInfo,
    WorkerRequest,
)
from zrt.runtime.messages.stats import RankLoad
from zrt.runtime.process.supervisor import Child, ChildObserver, Death, Supervisor

log = logging.getLogger(__name__)

READY_S: Final = 30.0
"""How long a rank may take until its sockets are bound: to start and import, not to load."""
IDENTIFY_S: Final = 10.0
PING_S: Final = 0.5
SILENCE_S: Final = 3.0
"""How long a rank may leave a ping unanswered before it is taken for hung, beyond what our own loop
is late."""
MEMORY_S: Final = 2.0
"""How often memory is asked for."""
END_S: Final = 2.0
"""How long a rank may take to end in good order."""

Response = TypeVar("Response", bound=RankMessage)


class RankProcess:
    """Rank `rank` as its leader has it: a child process."""

    def __init__(self, rank: int, child: Child, load: RankLoad) -> None:
        self.rank = rank
        self.child = child
        self.address = Address(child.name, 0, "")
        self.load = load


class RankProcesses(ChildObserver):
    """Ranks 1 to `world` - 1 of a group, children of this process; `failed(error)` hears of each
    that dies or is silent."""

    def __init__(
        self, actor: Actor, stats: GroupStats, device: torch.device, threads: int, failed: Callable[[ZrtError], None]
    ) -> None:
        self.members: list[RankProcess] = []
        self._actor = actor
        self._stats = stats
        self._device = device
        self._threads = threads
        self._failed = failed
        self._supervisor = Supervisor(self)
        self._watches: list[asyncio.Task[None]] = []
        self._ending = False

    @property
    def world(self) -> int:
        return len(self._stats.ranks)

    async def start(self) -> None:
        """Start all ranks, and see that each is who it should be. ZrtError: why one is not."""
        for rank in range(1, self.world):
            self.members.append(RankProcess(rank, self._spawn(rank), self._stats.ranks[rank]))
        for member in self.members:
            member.load.pid = member.child.pid
            ready = await member.child.ready()
            member.address = Address(member.child.name, ready.incarnation, ready.endpoint)
        for member in self.members:
            pong = await self.ask(member, Ping(), Pong, IDENTIFY_S)
            if (pong.rank, pong.world_size) != (member.rank, self.world):
                said = f"rank {pong.rank} of {pong.world_size}"
                text = f"{member.child.name} says it is {said}, not {member.rank} of {self.world}"
                raise ZrtError("rank_failed", text)
            self._watches.append(self._actor.spawn(self._watch(member), f"watch {member.child.name}"))
        self._watches.append(self._actor.spawn(self._measure(), "memory of ranks"))

    async def ask(self, member: RankProcess, request: WorkerRequest, reply: type[Response], timeout: float) -> Response:
        """Return a rank's reply to a request. ZrtError: the rank's own; rank_failed: another reply
        than this, or none."""
        try:
            answer = (await self._actor.ask(member.address, request, timeout=timeout)).body
        except ZrtError as error:
            raise ZrtError("rank_failed", f"{member.child.name}: {error.message}", member.child.name) from None
        if isinstance(answer, RankError):
            raise ZrtError.of(answer.kind, answer.message, member.child.name)
        if not isinstance(answer, reply):
            raise ZrtError("rank_failed", f"{member.child.name} answered {type(answer).__name__}", member.child.name)
        return answer

    async def end(self, *, asked: bool) -> None:
        """Reap all ranks, in good order if they are `asked` to unload and shut down first. Those
        that do not end in time are killed."""
        self._ending = True
        for watch in self._watches:
            watch.cancel()
        for request, reply in ((UnloadModel(""), Unloaded), (RankShutdown(), Bye)) if asked else ():
            heard = [member for member in self.members if member.address.endpoint]
            answers = (self.ask(member, request, reply, END_S) for member in heard)
            for answer in await asyncio.gather(*answers, return_exceptions=True):
                if isinstance(answer, BaseException):
                    log.info("a rank was not told %s: %s", type(request).__name__, answer)
        await self._supervisor.stop(END_S)
        for member in self.members:
            self._actor.forget(member.address)

    def kill(self) -> None:
        """SIGKILL all ranks; `failed` does not hear of it."""
        self._supervisor.kill()

    def _spawn(self, rank: int) -> Child:
        device = str(self._device) if self._device.index is None else f"cuda:{self._device.index + rank}"
        name = f"{self._actor.name}.rank{rank}"
        options = RankOptions(name=name, device=device, threads=self._threads, rank=rank, world=self.world)
        environment = thread_environment(self._threads)
        return self._supervisor.spawn(name, command_line(options), env=environment, ready_s=READY_S)

    def on_death(self, child: Child, death: Death) -> None:
        if not self._ending:
            member = next(member for member in self.members if member.child is child)
            self._lost(member, str(death))

    async def _watch(self, member: RankProcess) -> None:
        """Ping a rank for as long as it lives; one that is silent is hung."""
        while True:
            try:
                await self.ask(member, Ping(), Pong, SILENCE_S + self._actor.lag_ms / 1000)
            except ZrtError as error:
                self._lost(member, f"{member.child.name} is silent: {error.message}")
                return
            await asyncio.sleep(PING_S)

    def _lost(self, member: RankProcess, text: str) -> None:
        error = ZrtError("rank_failed", text, self._actor.name)
        self._stats.blame(member.rank, error)
        self._failed(error)

    async def _measure(self) -> None:
        """Ask for the memory of all devices now and then."""
        own = self._stats.ranks[0]
        while True:
            free, total = await asyncio.to_thread(device_memory, self._device)  # a driver may hold it up
            own.free_mb, own.total_mb = free >> 20, total >> 20
            for member in self.members:
                try:
                    memory = await self.ask(member, QueryVram(), VramInfo, SILENCE_S)
                except ZrtError:
                    continue  # whether it lives is for its pings to tell
                member.load.free_mb, member.load.total_mb = memory.free_mb, memory.total_mb
            await asyncio.sleep(MEMORY_S)
