"""Children: command lines that are kept running, restarted within a budget, and ended in good order
or at once."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from msgspec import Struct

from zrt.runtime.errors import ZrtError
from zrt.runtime.process.lifeline import RESTARTS
from zrt.runtime.process.spawn import Process, Ready, ended_by

log = logging.getLogger(__name__)

KILLED_S: Final = 5.0
"""How long a killed process may take to be gone; only the kernel can hold it longer."""
NO_START: Final = 127
"""The exit status reported of a process that could not be started again."""


class RestartPolicy(Struct, frozen=True):
    """The rule for starting a child that died again: after `first_s` seconds, then twice as long
    each time, at most `most_s`; at most `budget` times in `window_s` seconds."""

    budget: int = 5
    window_s: float = 300.0
    first_s: float = 0.2
    most_s: float = 5.0


class Death(Struct, frozen=True):
    """The end of one process of a child. `incarnation` is 0 if the process was never ready; `exit`
    is its exit status, negative for a signal. `pid` is 0 if the process could not even be started,
    and `words` say why."""

    name: str
    incarnation: int
    pid: int
    exit: int
    restarting: bool
    words: str
    late_s: float = 0.0
    """The seconds after which the process was killed because it was not ready; 0: it was not killed
    for that."""

    def __str__(self) -> str:
        if not self.pid:
            return self.words
        how = f"was not ready within {self.late_s:g} s and was killed" if self.late_s else ended_by(self.exit)
        last = f"; its last words:\n{self.words}" if self.words else ""
        return f"{self.name} (process {self.pid}) {how}{last}"


class ChildObserver:
    """The part of a parent that is told of its children; each method does nothing by default."""

    def on_ready(self, child: "Child", ready: Ready) -> None:
        """Learn that a process of `child` is ready; called each time one is."""

    def on_death(self, child: "Child", death: Death) -> None:
        """Learn that a process of `child` is gone, before its successor starts."""


class Child:
    """One command line and its processes, one after another; made by `Supervisor.spawn`. A change
    of `argv` takes effect with the next process."""

    def __init__(
        self,
        supervisor: "Supervisor",
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        ready_s: float,
        restart: RestartPolicy,
    ) -> None:
        self.name = name
        self.argv = list(argv)
        self.restarts = 0
        self.fault: ZrtError | None = None
        """Why the child is not started again; None while it may be."""
        self._env = dict(env)
        self._ready_s = ready_s
        self._restart = restart
        self._supervisor = supervisor
        self._loop = asyncio.get_running_loop()
        self._process: Process | None = None
        self._ready: asyncio.Future[Ready] = self._loop.create_future()
        self._deadline: asyncio.TimerHandle | None = None
        self._late = False
        self._next: asyncio.TimerHandle | None = None
        self._starts: deque[float] = deque()
        self._dismissed = False

    @property
    def pid(self) -> int:
        """The id of the running process; 0 while none runs."""
        return self._process.pid if self._process is not None else 0

    @property
    def incarnation(self) -> int:
        """The incarnation that the running process gave when it was ready; 0 before."""
        said = self._process.ready if self._process is not None else None
        return said.incarnation if said is not None else 0

    async def ready(self) -> Ready:
        """Wait until a process of the child says that its sockets are bound, and return its report.
        Restarts are waited for; each has its own deadline.

        ZrtError: the fault a process reported, which is final (it would be met again); or, when the
        child is not started again: deadline if its process was not ready in time and so was killed,
        internal if it died.
        """
        try:
            return await asyncio.shield(self._ready)
        except ZrtError as error:
            raise error.anew() from None

    def kill(self) -> None:
        """Kill the process (SIGKILL). The observer is told of its death, and the child starts
        again, as after any other."""
        if self._process is not None:
            self._process.kill()

    async def stop(self, timeout: float) -> None:
        """End the process by SIGTERM, after `timeout` seconds by SIGKILL, and start none again.
        ZrtError internal: the kernel does not let the process go."""
        self.dismiss()
        process = self._process
        if process is None:
            return
        process.terminate()
        if await process.gone(timeout):
            return
        log.warning("%s (process %d) did not end within %g s and is killed", self.name, process.pid, timeout)
        process.kill()
        if not await process.gone(KILLED_S):
            raise ZrtError("internal", f"{self.name} (process {process.pid}) cannot be killed")

    def dismiss(self) -> None:
        """Never start a process again."""
        self._dismissed = True
        if self._next is not None:
            self._next.cancel()
            self._next = None
            self._give_up(ZrtError("cancelled", f"{self.name} is not started again: it is being stopped"))

    def start(self) -> None:
        """Start a process. ZrtError as for `Process`."""
        self._late = False
        self._process = Process(
            self.name,
            self.argv,
            self._env | {RESTARTS: str(self.restarts)},
            self,
            sink=self._supervisor.sink,
        )
        self._deadline = self._loop.call_later(self._ready_s, self._on_late)

    def on_ready(self, ready: Ready) -> None:
        """Take the process's report that it is ready or failed."""
        if ready.fault is None and self._deadline is not None:
            self._deadline.cancel()
            self._ready.set_result(ready)
            self._supervisor.observer.on_ready(self, ready)

    def _on_late(self) -> None:
        self._deadline = None
        self._late = True
        self.kill()

    def on_exit(self, process: Process) -> None:
        """Start the next process, or give up."""
        self._process = None
        if self._deadline is not None:
            self._deadline.cancel()
        if self._ready.done():
            self._ready = self._loop.create_future()  # from now on the future stands for the next process
        fault = process.ready.fault if process.ready is not None else None
        pause = self._pause() if fault is None else None
        incarnation = process.ready.incarnation if process.ready is not None else 0
        late = self._ready_s if self._late else 0.0
        death = Death(self.name, incarnation, process.pid, process.exit, pause is not None, process.words, late)
        if pause is not None:
            self._next = self._loop.call_later(pause, self._start_again)
        elif fault is not None:
            self._give_up(ZrtError.of(fault.kind, fault.message, fault.where or self.name))
        elif self._late:
            last = f"; its last words:\n{process.words}" if process.words else ""
            self._give_up(
                ZrtError("deadline", f"{self.name} was not ready within {self._ready_s:g} s and was killed{last}")
            )
        else:
            self._give_up(ZrtError("internal", str(death)))
        self._supervisor.observer.on_death(self, death)

    def _pause(self) -> float | None:
        """Return the seconds until the next start; None if there will be none."""
        rule = self._restart
        now = time.monotonic()
        while self._starts and self._starts[0] < now - rule.window_s:
            self._starts.popleft()
        if self._dismissed or len(self._starts) >= rule.budget:
            return None
        self._starts.append(now)
        return float(min(rule.first_s * 2 ** (len(self._starts) - 1), rule.most_s))

    def _start_again(self) -> None:
        self._next = None
        self.restarts += 1
        try:
            self.start()
        except ZrtError as error:
            # a program that is gone stays gone, but descriptors and memory may come back
            pause = self._pause() if error.kind == "internal" else None
            if pause is not None:
                self._next = self._loop.call_later(pause, self._start_again)
            else:
                self._give_up(error)
            death = Death(self.name, 0, 0, NO_START, pause is not None, error.message)
            self._supervisor.observer.on_death(self, death)

    def _give_up(self, error: ZrtError) -> None:
        self.fault = error
        self._ready.set_exception(error)
        self._ready.exception()  # there may be nobody who waits for it


class Supervisor:
    """The children of this process, started and watched on the main thread's loop; `observer` is
    told of them.

    `sink(name, line)` gets what children write to stdout and stderr, line by line, and their last
    lines are kept for `Death.words`; without a sink they write to our stderr.
    """

    def __init__(self, observer: ChildObserver, *, sink: Callable[[str, str], None] | None = None) -> None:
        self.children: dict[str, Child] = {}
        self.observer = observer
        self.sink = sink
        self._stopping = False

    def spawn(
        self,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        ready_s: float = 60.0,
        restart: RestartPolicy | None = None,
    ) -> Child:
        """Start a child; `await child.ready()` for its endpoint. `env` is added to our environment.
        By default the child is not restarted.

        A process that is not ready within `ready_s` seconds is killed. ZrtError bad_config: the
        program cannot be run, or the name is taken; internal: not on the main thread; cancelled:
        the supervisor is stopping.
        """
        if self._stopping:
            raise ZrtError("cancelled", f"{name} is not started: everything is being stopped")
        if name in self.children:
            raise ZrtError("bad_config", f"there is a child called {name} already")
        child = Child(self, name, argv, env or {}, ready_s, restart or RestartPolicy(budget=0))
        child.start()
        self.children[name] = child
        return child

    async def stop(self, timeout: float) -> None:
        """End all children, the last one first, by SIGTERM, after `timeout` seconds by SIGKILL, and
        reap them. A second call meanwhile sends SIGKILL at once.

        ZrtError internal: the kernel does not let a process go.
        """
        if self._stopping:
            self.kill()
        self._stopping = True
        ends = [asyncio.ensure_future(child.stop(timeout)) for child in reversed(list(self.children.values()))]
        results = await asyncio.gather(*ends, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def pids(self) -> dict[str, int]:
        """Return the process id of each child by name; 0 while none runs."""
        return {name: child.pid for name, child in self.children.items()}

    def kill(self) -> None:
        """Kill all processes (SIGKILL), and start none again."""
        self._stopping = True
        for child in self.children.values():
            child.dismiss()
            child.kill()

    def remove(self, child: Child) -> None:
        """Forget a child that was stopped, so that its name is free."""
        if child.pid:
            raise ZrtError("internal", f"{child.name} still runs")
        child.dismiss()
        del self.children[child.name]
