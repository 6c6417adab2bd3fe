"""Blocking calls, each in a thread of its own, given up when they take too long."""

from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import Thread
from typing import TypeVar

_Result = TypeVar("_Result")


def beside(name: str, work: Callable[[], _Result], look: Callable[[], None], every_s: float) -> _Result:
    """Run `work` in a daemon thread and return its result; meanwhile call `look` every `every_s`
    seconds, and give `work` up if `look` raises.

    A thread that is given up ends by its own time-outs, or with the process.
    """
    future: Future[_Result] = Future()
    Thread(target=_settle, args=(future, work), name=name, daemon=True).start()
    try:
        while not wait([future], every_s).done:
            look()
        return future.result()
    finally:
        del future  # else its error's traceback holds this frame, and this frame the error


def _settle(future: "Future[_Result]", work: Callable[[], _Result]) -> None:
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
    finally:
        del future, work  # as in `beside`
