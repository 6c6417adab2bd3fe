"""A layer worker's process that sends itself a signal in the midst of something. Arguments:
ENDPOINT NAME CACHE PHASE SIGNAL [DEVICE].

With LOST_DEVICE in place of a signal, the worker's GPU stops working for it.

Phases: assignment, push (the second piece of a layer came, and is not written), load, prefill,
decode (the fifth token).
"""

import os
import signal
import sys
from pathlib import Path

import torch

from zrt.actors.layer_worker.layer_worker import LayerWorker
from zrt.runtime.actor.actor_process import run_actor
from zrt.runtime.messages.layers import Batch, LayerAssignment, LayerTraffic, ModelDataChunk, ModelDataDone
from zrt.runtime.process.lifeline import hold

COUNTS = {"assignment": 1, "push": 2, "load": 1, "prefill": 1, "decode": 5}


class Failing(LayerWorker):
    def __init__(self, name: str, join: str, cache: Path, phase: str, fault: str, device: str = "cpu") -> None:
        super().__init__(name, join=join, cache=cache, device=device, threads=1, listen="tcp://127.0.0.1:0")
        self._phase = phase
        self._fault = fault
        self._left = COUNTS[phase]

    def _work(self, message: LayerTraffic, *rest: object) -> LayerTraffic:
        self._left -= phase_of(message) == self._phase
        if self._left == 0:
            if self._fault == "LOST_DEVICE":
                lose_device(self._device)
            else:
                os.kill(os.getpid(), signal.Signals[self._fault])
        return super()._work(message, *rest)  # type: ignore[arg-type]


def phase_of(message: LayerTraffic) -> str:
    match message:
        case LayerAssignment():
            return "assignment"
        case ModelDataChunk() if message.filename != "manifest.json" and len(message.data):
            return "push"
        case ModelDataDone():
            return "load"
        case Batch():
            return "prefill" if message.x.shape[1] > 1 else "decode"
    return ""


def lose_device(device: torch.device) -> None:
    """Run a kernel that indexes out of bounds, and so asserts."""
    torch.zeros(1, device=device)[torch.tensor([1 << 20], device=device)]


if __name__ == "__main__":
    endpoint, name, cache, *how = sys.argv[1:]
    run_actor(lambda: Failing(name, endpoint, Path(cache), *how), hold())
