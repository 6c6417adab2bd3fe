"""A command and its terminal: signals that end the command in good order, standard streams that
exist, and output that nobody reads."""

import asyncio
import errno
import os
import resource
import select
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from io import TextIOWrapper
from types import FrameType, TracebackType
from typing import Any, Final, Self, TextIO, TypeVar

import uvloop

from zrt.runtime.formatting import escaped

ENDS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""The error numbers of a disk that takes nothing now and may do so later."""

_T = TypeVar("_T")


def open_streams() -> None:
    """Put /dev/null where a standard stream is closed, so that no pipe or socket of ours takes its
    number."""
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, mode, closefd=False))  # noqa: SIM115
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that is not UTF-8 shows a "?", and that is all


def all_descriptors() -> None:
    """Raise this process's limit of descriptors, and so its children's, to the most the system
    allows: connections soon reach a shell's limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # more than the kernel itself allows
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class _Interrupt:
    """A signal handler that raises KeyboardInterrupt, and remembers the signal: Python drops what
    is raised inside an import's or a collector's callback."""

    def __init__(self) -> None:
        self.came = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        raise KeyboardInterrupt


def interruptible() -> None:
    """Make SIGTERM, and SIGHUP where it is not ignored (nohup), raise KeyboardInterrupt as Ctrl-C
    does."""
    interrupt = _Interrupt()
    for number in ending_signals():
        signal.signal(number, interrupt)


def ending_signals() -> list[signal.Signals]:
    """Return the signals that end a command: all of ENDS, but not SIGHUP in a process that was
    started to outlive its terminal."""
    return [number for number in ENDS if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN]


def say(text: str) -> None:
    """Write a line on stderr. A command's work does not end because its output is not read: a line
    that a full disk does not take is dropped, and once the reader is gone nothing more is
    written."""
    try:
        print(escaped(text, breaks=True), file=sys.stderr, flush=True)
    except OSError as error:
        if error.errno in FULL:
            drop_held_back(sys.stderr)
        else:
            mute(sys.stderr)


def listens(stream: TextIO) -> bool:
    """Return whether a line can be written now. A pager or a terminal that is paused takes none,
    and would hold the writer up."""
    ready = select.poll()
    try:
        ready.register(stream.fileno(), select.POLLOUT)
        return bool(ready.poll(0))
    except (OSError, ValueError):
        return True  # no descriptor that could be waited for: it does not hold anybody up


def mute(stream: TextIO) -> None:
    """Discard what is still written to a stream, and what the stream's buffer holds."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def drop_held_back(stream: TextIO) -> None:
    """Discard what a stream's buffer holds: else each further line would try it again, and at the
    end it would make the exit status one of Python's own."""
    fd = stream.fileno()
    kept = os.dup(fd)
    try:
        mute(stream)
        stream.flush()
    finally:
        os.dup2(kept, fd)
        os.close(kept)


class Foreground:
    """A context manager with a loop that runs a command's coroutines, one after the other."""

    def __enter__(self) -> Self:
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._runner.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runner.__exit__(kind, error, trace)

    def run(self, work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Run `work()` and return its result. A signal that ends a command cancels the coroutine;
        KeyboardInterrupt is raised once that has cleaned up."""
        try:
            return self._runner.run(_cancelled_by_signals(work))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None


async def _cancelled_by_signals(work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    numbers = ending_signals()
    earlier = signal.getsignal(signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, task.cancel)
    try:
        if isinstance(earlier, _Interrupt) and earlier.came:
            raise asyncio.CancelledError
        return await work()
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
        interruptible()
