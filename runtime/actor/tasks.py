"""Tasks with an owner: none is forgotten, none fails in silence, none outlives its owner."""

import asyncio
import logging
from collections.abc import Awaitable, Coroutine
from typing import Any, Final, TypeVar

from zrt.runtime.errors import ZrtError

log = logging.getLogger(__name__)

MOST: Final = 16_384
"""The most tasks one owner may have, most of them handlers that wait."""

_T = TypeVar("_T")


class Tasks:
    """The tasks of one owner on the running loop; `owner` is the owner's name in the log."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(
        self, coro: Coroutine[Any, Any, _T], name: str, awaits: Awaitable[Any] | None = None
    ) -> "asyncio.Task[_T]":
        """Run `coro` as a task; an exception is logged. ZrtError cancelled: closed; overloaded:
        MOST are running.

        `awaits` is what `coro` was given to await; a coroutine given so is closed too if the task
        is refused, or cancelled before it began.
        """
        inner = awaits if isinstance(awaits, Coroutine) else None
        if self._closed or len(self._tasks) >= MOST:
            coro.close()
            if inner is not None:
                inner.close()
            if self._closed:
                raise ZrtError("cancelled", f"{name} is not started: its owner is stopping", self._owner)
            raise ZrtError("overloaded", f"{MOST} tasks are running already", self._owner)
        task = asyncio.get_running_loop().create_task(coro, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._over)
        if inner is not None:
            task.add_done_callback(lambda _: inner.close())
        return task

    async def close(self, seconds: float) -> None:
        """Cancel all tasks except the caller's, and wait up to `seconds` for them to end; log the
        names of those that do not."""
        self._closed = True
        tasks = self._tasks - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=seconds)
            for task in late:
                log.error("%s: task %s does not end", self._owner, task.get_name())

    def _over(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s: task %s failed", self._owner, task.get_name(), exc_info=error)


async def together(*coros: Coroutine[Any, Any, _T]) -> list[_T]:
    """Run coroutines at the same time and return their results in order; if one fails, raise its
    error once the others have been cancelled and have ended."""
    tasks = [asyncio.ensure_future(coro) for coro in coros]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
