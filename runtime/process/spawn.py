"""One child process and every descriptor that ties it to us: its pidfd, the death pipe, the ready
pipe, and its stderr where we keep that."""

import asyncio
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final, Protocol

import msgspec
from msgspec import Struct

from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.control import Fault
from zrt.runtime.process.lifeline import DEATH_FD, PARENT, READY_FD
from zrt.runtime.process.python_command import FOLDER, environment

WORDS: Final = 20
"""The number of lines of output that are kept."""
WORD_BYTES: Final = 2000
"""The bytes of one line that are kept; a line without an end is passed on in pieces of this
size."""

_CHUNK: Final = 65536
_READY_BYTES: Final = 65536
_LAST_CHUNKS: Final = 64


def ended_by(exit_status: int) -> str:
    """Return how a process ended, in words. The status is negative for a signal."""
    return f"was ended by signal {-exit_status}" if exit_status < 0 else f"ended with status {exit_status}"


class Ready(Struct, frozen=True):
    """The one line a child writes to its ready pipe: where it is reached, or why it will not be."""

    endpoint: str = ""
    incarnation: int = 0
    fault: Fault | None = None


class ProcessOwner(Protocol):
    """The part that starts a process and is told of it, on the loop."""

    def on_ready(self, ready: Ready) -> None:
        """Take the report of the process that it is ready or failed; called once."""

    def on_exit(self, process: "Process") -> None:
        """Learn that the process is gone and reaped; called once."""


class Process:
    """A child process, which the constructor starts in a session of its own (a terminal's Ctrl-C
    reaches only us), in the folder of all children. The object stays alive until the process is
    reaped.

    `sink(name, line)` gets the process's stdout and stderr line by line; without a sink both go to
    our stderr. What the process leaves behind in its process group is killed with it.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        owner: ProcessOwner,
        *,
        sink: Callable[[str, str], None] | None,
        stdin: int = subprocess.DEVNULL,
    ) -> None:
        """Start the process. `env` is added to our own environment; `stdin` is the descriptor that
        becomes its standard input.

        ZrtError bad_config: the program cannot be run; internal: no descriptors or memory left, or
        not called on the main thread.
        """
        if threading.current_thread() is not threading.main_thread():
            # The kernel takes the end of the thread that started a child for the death of its
            # parent (pdeathsig).
            raise ZrtError("internal", f"{name} was to be started from a thread other than the main one")
        self.name = name
        self.exit = 0
        self.ready: Ready | None = None
        self._sink = sink
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._gone = self._loop.create_future()
        self._heard = b""
        self._line = b""
        self._words: deque[str] = deque(maxlen=WORDS)
        self._readers: set[int] = set()
        self._start(argv, env, stdin)

    @property
    def words(self) -> str:
        """The process's last lines of output; empty without a sink."""
        return "\n".join(self._words)

    def terminate(self) -> None:
        with suppress(ProcessLookupError):  # it has died, and is about to be reaped
            signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process and its process group (SIGKILL)."""
        # Until the process is reaped the id of its group cannot have become another's.
        if self._popen.returncode is None:
            os.killpg(self.pid, signal.SIGKILL)

    async def gone(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for the process to end; return whether it is gone and
        reaped."""
        done, _ = await asyncio.wait([self._gone], timeout=timeout)
        return bool(done)

    # ---- start -----------------------------------------------------------------------------------

    def _start(self, argv: Sequence[str], env: Mapping[str, str], stdin: int) -> None:
        ours: list[int] = []
        theirs: list[int] = []
        try:
            death_out, self._death = _pipe(theirs, ours)
            self._ready_fd, ready_in = _pipe(ours, theirs)
            output = 2
            if self._sink is not None:
                self._output, output = _pipe(ours, theirs)
            names = {PARENT: str(os.getpid()), DEATH_FD: str(death_out), READY_FD: str(ready_in)}
            self._popen = subprocess.Popen(
                argv,
                cwd=FOLDER,
                env={**environment(os.environ), **env, **names},
                stdin=stdin,
                stdout=output,
                stderr=output,
                pass_fds=(death_out, ready_in),
                start_new_session=True,
            )
            self.pid = self._popen.pid
            try:
                self._pidfd = os.pidfd_open(self.pid)
            except OSError:
                self._popen.kill()
                self._popen.wait()
                raise
        except OSError as error:
            _close(ours)
            if isinstance(error, FileNotFoundError | PermissionError):
                raise ZrtError("bad_config", f"{self.name} cannot be started: {argv[0]}: {error.strerror}") from None
            raise ZrtError("internal", f"{self.name} cannot be started: {error}") from None
        finally:
            _close(theirs)
        for fd in ours:
            os.set_blocking(fd, False)
        self._watch(self._pidfd, self._on_dead)
        self._watch(self._ready_fd, self._on_heard)
        if self._sink is not None:
            self._watch(self._output, self._on_output)

    def _watch(self, fd: int, fn: Callable[[], object]) -> None:
        self._readers.add(fd)
        self._loop.add_reader(fd, fn)

    def _unwatch(self, fd: int) -> None:
        self._readers.discard(fd)
        self._loop.remove_reader(fd)
        os.close(fd)

    # ---- what it says ----------------------------------------------------------------------------

    def _on_heard(self) -> None:
        chunk = _read(self._ready_fd)
        if chunk is None:
            return
        self._heard += chunk
        if chunk and b"\n" not in self._heard and len(self._heard) < _READY_BYTES:
            return
        self._unwatch(self._ready_fd)
        try:
            self.ready = msgspec.json.decode(self._heard.partition(b"\n")[0], type=Ready)
        except msgspec.DecodeError:
            return  # it closed the pipe without a word, so it will not be ready: its deadline or its death says so
        self._owner.on_ready(self.ready)

    def _on_output(self) -> bool:
        """Read one chunk of output; return False when there is none now."""
        chunk = _read(self._output)
        if chunk is None:
            return False
        if not chunk:
            self._end_output()
            return False
        *lines, self._line = (self._line + chunk).split(b"\n")
        for line in lines:
            self._pass_on(line)
        while len(self._line) >= WORD_BYTES:
            self._pass_on(self._line[:WORD_BYTES])
            self._line = self._line[WORD_BYTES:]
        return True

    def _end_output(self) -> None:
        if self._output in self._readers:
            self._unwatch(self._output)
            if self._line:
                self._pass_on(self._line)

    def _pass_on(self, line: bytes) -> None:
        text = line.decode(errors="replace")
        self._words.append(text[:WORD_BYTES])
        if self._sink is not None:
            self._sink(self.name, text)

    # ---- the end ---------------------------------------------------------------------------------

    def _on_dead(self) -> None:
        self.kill()
        self.exit = self._popen.wait()  # the pidfd is readable, so this returns at once
        if self._ready_fd in self._readers:
            self._on_heard()
        if self._sink is not None and self._output in self._readers:
            for _ in range(_LAST_CHUNKS):
                if not self._on_output():
                    break
            self._end_output()
        for fd in list(self._readers):
            self._unwatch(fd)
        os.close(self._death)
        self._gone.set_result(None)
        self._owner.on_exit(self)


def _pipe(reader: list[int], writer: list[int]) -> tuple[int, int]:
    ends = os.pipe()
    reader.append(ends[0])
    writer.append(ends[1])
    return ends


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _read(fd: int) -> bytes | None:
    """Return what can be read now: b"" at the end, None when there is nothing yet."""
    try:
        return os.read(fd, _CHUNK)
    except BlockingIOError:
        return None
