"""The compute lane: one named thread that runs functions one at a time; the loop awaits them, or they tell others by themselves.

The thread is a daemon, so that a function that never returns cannot keep a process that was told to end.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, NamedTuple, ParamSpec, TypeVar

from zrt.runtime.errors import ZrtError

log = logging.getLogger(__name__)

_P = ParamSpec("_P")
_T = TypeVar("_T")


class _Work(NamedTuple):
    fn: Callable[[], Any]
    future: "asyncio.Future[Any] | None" = None


class Lane:
    """Functions run in the order they were given. Not tied to a loop: each call is answered on the loop that made it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._work: SimpleQueue[_Work | None] = SimpleQueue()
        self._closed = False
        self._busy_ns = 0
        self._started_ns = 0
        self._end: Future[None] = Future()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def busy_us(self) -> int:
        """Microseconds spent in functions so far, the one that runs now included."""
        started = self._started_ns
        running = time.perf_counter_ns() - started if started else 0
        return (self._busy_ns + running) // 1000

    async def run(self, fn: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """What `fn` returns or raises. ZrtError cancelled: the lane is closed.

        A cancelled caller leaves a function that has started to finish, and one that has not is never run.
        """
        self._check()
        future: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._work.put(_Work(lambda: fn(*args, **kwargs), future))
        return await future

    def post(self, fn: Callable[[], None]) -> None:
        """Run `fn`, unless the lane is closed before, and tell nobody: what it raises is logged. ZrtError cancelled: the lane is closed."""
        self._check()
        self._work.put(_Work(fn))

    def close(self) -> None:
        """Take nothing more, fail what waits with `cancelled`; the function that runs finishes. Does not wait: see `ended`."""
        if not self._closed:
            self._closed = True
            self._work.put(None)

    async def ended(self, timeout: float) -> bool:
        """After `close`: whether the thread ended within `timeout` seconds."""
        done, _ = await asyncio.wait([asyncio.wrap_future(self._end)], timeout=timeout)
        return bool(done)

    def _check(self) -> None:
        if self._closed:
            raise ZrtError("cancelled", f"the lane {self.name} is closed")

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            if self._closed:
                _answer(work, None, ZrtError("cancelled", f"the lane {self.name} is closed"))
            elif work.future is None or not work.future.cancelled():
                self._started_ns = time.perf_counter_ns()
                try:
                    result, error = work.fn(), None
                except BaseException as raised:  # whatever it is, it belongs to the caller, and the lane lives on
                    result, error = None, raised
                self._busy_ns += time.perf_counter_ns() - self._started_ns
                self._started_ns = 0
                _answer(work, result, error)
                del result, error
            del work  # an idle lane keeps nothing alive
        self._end.set_result(None)


def _answer(work: _Work, result: Any, error: BaseException | None) -> None:
    future = work.future
    if future is None:
        if error is not None and not isinstance(error, ZrtError):
            log.error("%s failed", work.fn, exc_info=error)
        return

    def settle() -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        elif isinstance(error, StopIteration):  # a future cannot carry it
            future.set_exception(RuntimeError("the function raised StopIteration"))
        else:
            future.set_exception(error)

    with suppress(RuntimeError):  # the loop is closed: nobody waits any more
        future.get_loop().call_soon_threadsafe(settle)
