"""The compute executor: one named thread that runs functions one at a time, awaited from the loop.

The thread is a daemon, so that a function that never returns cannot keep a process that was told to
end. An executor whose device is lost ends the process: peers notice at once, and the process's
parent starts another.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Final, NamedTuple, ParamSpec, TypeVar

from zrt.runtime.errors import ZrtError
from zrt.runtime.hard_exit import leave

log = logging.getLogger(__name__)

LOST_DEVICE_STATUS: Final = 76

_P = ParamSpec("_P")
_T = TypeVar("_T")


class _Call(NamedTuple):
    loop: asyncio.AbstractEventLoop
    future: "asyncio.Future[Any]"
    fn: Callable[[], Any]


class ComputeExecutor:
    """A thread that runs functions in the order they were given. Not tied to a loop: each call is
    answered on the loop that made it.

    After an unexpected error, one that is no ZrtError, `lives` is called in the thread to find out
    whether the device still works.
    """

    def __init__(self, name: str, lives: Callable[[], bool] = lambda: True) -> None:
        self.name = name
        self._lives = lives
        self._work: SimpleQueue[_Call | None] = SimpleQueue()
        self._closed = False
        self._busy_ns = 0
        self._started_ns = 0
        self._end: Future[None] = Future()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def busy_us(self) -> int:
        """Microseconds spent in functions so far, including the one that runs now."""
        started = self._started_ns
        running = time.perf_counter_ns() - started if started else 0
        return (self._busy_ns + running) // 1000

    async def run(self, fn: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run `fn` in the thread, and return or raise what it does. ZrtError cancelled: the
        executor is closed.

        If the caller is cancelled, a function that has started still finishes; one that has not is
        never run.
        """
        if self._closed:
            raise ZrtError("cancelled", f"the executor {self.name} is closed")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_T] = loop.create_future()
        self._work.put(_Call(loop, future, lambda: fn(*args, **kwargs)))
        try:
            return await future
        finally:
            del future  # else its error's traceback holds this frame, and this frame the error

    def close(self) -> None:
        """Accept no more functions and fail the waiting ones with `cancelled`; the one that runs
        finishes. Does not wait for the thread: see `ended`."""
        if not self._closed:
            self._closed = True
            self._work.put(None)

    async def ended(self, timeout: float) -> bool:
        """Wait for the thread to end, after `close`; return whether it did within `timeout`
        seconds."""
        done, _ = await asyncio.wait([asyncio.wrap_future(self._end)], timeout=timeout)
        return bool(done)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            if self._closed:
                _answer(work, None, ZrtError("cancelled", f"the executor {self.name} is closed"))
            elif not work.future.cancelled():
                self._started_ns = time.perf_counter_ns()
                try:
                    result, error = work.fn(), None
                except BaseException as raised:  # whatever it is, it belongs to the caller, and the executor lives on
                    result, error = None, raised
                    self._check(raised)
                self._busy_ns += time.perf_counter_ns() - self._started_ns
                self._started_ns = 0
                _answer(work, result, error)
                del result, error
            del work  # an idle executor keeps nothing alive
        self._end.set_result(None)

    def _check(self, error: BaseException) -> None:
        if not isinstance(error, ZrtError) and not self._lives():
            log.critical("the device of %s does nothing any more, and only a new process helps: %s", self.name, error)
            leave(LOST_DEVICE_STATUS)


def _answer(work: _Call, result: Any, error: BaseException | None) -> None:
    def settle() -> None:
        if work.future.done():
            return
        if error is None:
            work.future.set_result(result)
        elif isinstance(error, StopIteration):  # a future cannot carry it
            work.future.set_exception(RuntimeError("the function raised StopIteration"))
        else:
            work.future.set_exception(error)

    with suppress(RuntimeError):  # the loop is closed: nobody waits any more
        work.loop.call_soon_threadsafe(settle)
