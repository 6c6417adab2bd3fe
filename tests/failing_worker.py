"""A layer worker's process that sends itself a signal in the midst of something. Words: ENDPOINT NAME CACHE PHASE SIGNAL.

Phases: assignment, push (the second piece of a layer came, and is not written), load, prefill, decode (the fifth token).
"""

import os
import signal
import sys
from pathlib import Path

from zrt.actors.layer_worker import LayerWorker
from zrt.runtime.lifeline import hold
from zrt.runtime.messages.layers import Batch, LayerAssignment, LayerTraffic, ModelDataChunk, ModelDataDone
from zrt.runtime.process import run_actor

COUNTS = {"assignment": 1, "push": 2, "load": 1, "prefill": 1, "decode": 5}


class Failing(LayerWorker):
    def __init__(self, name: str, join: str, cache: Path, phase: str, number: int) -> None:
        super().__init__(name, join=join, cache=cache, device="cpu", threads=1, listen="tcp://127.0.0.1:0")
        self._phase = phase
        self._signal = number
        self._left = COUNTS[phase]

    def _work(self, message: LayerTraffic, *rest: object) -> LayerTraffic:
        self._left -= phase_of(message) == self._phase
        if self._left == 0:
            os.kill(os.getpid(), self._signal)
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


if __name__ == "__main__":
    endpoint, name, cache, phase, number = sys.argv[1:]
    run_actor(
        lambda: Failing(name, endpoint, Path(cache), phase, signal.Signals[number]),
        hold(),
    )
