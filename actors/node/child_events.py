"""What it is to a cluster that a process of it is not started again, or that it says what is wrong
with it."""

from typing import Final

from zrt.runtime.cluster.file_schema import Conf
from zrt.runtime.errors import KINDS, Kind, ZrtError
from zrt.runtime.formatting import counted
from zrt.runtime.process.supervisor import Child

COORDINATOR: Final = "coordinator"


def final_loss(child: Child, conf: Conf, told: str, brief: str) -> ZrtError:
    """The error that the loss of this child is, whose supervisor has `told` of its death, in
    `brief` where its last words are known.

    It is of the kind that clients get, where the process did not say itself what is wrong.
    """
    error = child.fault or ZrtError("internal", told)
    kind: Kind = error.kind
    if kind == "internal":
        kind = _kind(child.name, conf)
    again = f", after {counted(child.restarts, 'restart')}" if child.restarts else ""
    where = "" if child.name == COORDINATOR else error.where  # what it refuses was said to `zrt up`
    return ZrtError(kind, error.message.replace(told, brief) + again, where)


def final_fault(text: str) -> ZrtError:
    """A cluster's fault as an error."""
    kind, _, message = text.partition(": ")
    return ZrtError.of(kind, message) if kind in KINDS else ZrtError("stage_lost", text)


def _kind(name: str, conf: Conf) -> Kind:
    if name == COORDINATOR:
        return "coordinator_lost"
    return "worker_failed" if any(worker.name == name for worker in conf.workers) else "stage_lost"
