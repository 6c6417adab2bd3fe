"""Runner of a command's coroutine, until it ends or a signal ends it."""

from collections.abc import Callable, Coroutine
from typing import Any

from zrt.runtime.process.terminal import Foreground


def run_in_foreground(work: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Run `work()` and return its exit status. KeyboardInterrupt, once it has cleaned up after a
    signal."""
    with Foreground() as foreground:
        return foreground.run(work)
