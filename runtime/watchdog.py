"""Calls that block, in threads of their own, which are left when they take too long."""

from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import Thread
from typing import TypeVar

_Result = TypeVar("_Result")


def beside(name: str, work: Callable[[], _Result], look: Callable[[], None], every_s: float) -> _Result:
    """Return the result of `work`, done in a daemon thread while `look` is called every so many
    seconds; what that raises gives it up.

    A thread that is given up ends by its own time-outs, or with the process.
    """
    future: Future[_Result] = Future()
    Thread(target=_settle, args=(future, work), name=name, daemon=True).start()
    try:
        while not wait([future], every_s).done:
            look()
        return future.result()
    finally:
        del future  # its error would know itself by this frame, and all that was at work when it was raised


def _settle(future: "Future[_Result]", work: Callable[[], _Result]) -> None:
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
    finally:
        del future, work  # as above
