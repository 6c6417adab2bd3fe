"""The child's side of supervision: a child never outlives its parent, and reports when it is ready.

`hold` is the first thing a child calls, before heavy imports; this module imports only the standard
library. A parent's death reaches the child in two ways: the kernel kills the child when the thread
that started it ends (pdeathsig), and a pipe whose other end only the parent holds reads as ended.
The pipe also works where the signal was lost, or where the parent died before the child called
`hold`.
"""

import ctypes
import json
import os
import signal
import threading
from collections.abc import MutableMapping
from typing import Final

PARENT: Final = "ZRT_PARENT_PID"
DEATH_FD: Final = "ZRT_DEATH_FD"
READY_FD: Final = "ZRT_READY_FD"
RESTARTS: Final = "ZRT_RESTARTS"

_PR_SET_PDEATHSIG: Final = 1
_ORPHAN_STATUS: Final = 1


class Lifeline:
    """A child's line to the parent that started it; inert in a process started by hand. `restarts`:
    how often the child was started again before. `awaited`: a parent waits for `ready` or
    `failed`."""

    def __init__(self, ready_fd: int | None, restarts: int = 0) -> None:
        self._ready_fd = ready_fd
        self.awaited = ready_fd is not None
        self.restarts = restarts

    def ready(self, endpoint: str, incarnation: int) -> None:
        """Tell the parent that this process can be reached. Only the first `ready` or `failed`
        counts."""
        self._say({"endpoint": endpoint, "incarnation": incarnation})

    def failed(self, kind: str, message: str, where: str = "") -> None:
        """Tell the parent why this process ends without having become ready."""
        self._say({"fault": {"kind": kind, "message": message, "where": where}})

    def _say(self, words: dict[str, object]) -> None:
        fd, self._ready_fd = self._ready_fd, None
        if fd is None:
            return
        try:
            os.write(fd, json.dumps(words).encode() + b"\n")  # short enough for one write to a pipe
        except BrokenPipeError:
            pass  # the parent no longer listens: either it gave us up, or it is dead and we are next
        finally:
            os.close(fd)


def hold(environ: MutableMapping[str, str] = os.environ) -> Lifeline:
    """Tie this process to the parent named in the environment, and remove the variables from there:
    they are not for our own children.

    Exits at once if the parent is gone already.
    """
    parent = environ.pop(PARENT, None)
    death = environ.pop(DEATH_FD, None)
    ready = environ.pop(READY_FD, None)
    restarts = int(environ.pop(RESTARTS, "0"))
    if parent is not None:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != int(parent):
            os._exit(_ORPHAN_STATUS)
    if death is not None:
        os.set_inheritable(int(death), False)
        threading.Thread(target=_watch, args=(int(death),), name="lifeline", daemon=True).start()
    if ready is None:
        return Lifeline(None, restarts)
    os.set_inheritable(int(ready), False)
    return Lifeline(int(ready), restarts)


def _watch(fd: int) -> None:
    while os.read(fd, 64):
        pass
    os._exit(_ORPHAN_STATUS)
