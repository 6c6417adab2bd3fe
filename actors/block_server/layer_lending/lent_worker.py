"""A layer worker as its master sees it: who it is, what it has and does, and questions with one
answer each."""

import statistics
import time
from collections import deque
from typing import Final, TypeVar

from zrt.runtime.actor.actor import Actor
from zrt.runtime.errors import KINDS, ZrtError
from zrt.runtime.messages.control import Address
from zrt.runtime.messages.layers import (
    Hello,
    LayerMessage,
    LayersPrepared,
    LayerTraffic,
    PrepareLayers,
    WorkerError,
    WorkerInfo,
)
from zrt.runtime.messages.stats import WorkerLoad
from zrt.runtime.version import release

HELLO_S: Final = 5.0
CHUNK_S: Final = 60.0
LOAD_S: Final = 1800.0
STEP_S: Final = 120.0

_Answer = TypeVar("_Answer", bound=LayerMessage)


class LentWorker:
    """One incarnation of a worker, asked by `actor`. `load` is what is known of the worker, `has`
    what it said when it was looked at."""

    def __init__(self, actor: Actor, address: Address) -> None:
        self.actor = actor
        self.address = address
        self.has = LayersPrepared()
        self._load = WorkerLoad(address.name, "reserve")
        self.hops = HopTimes()

    @property
    def name(self) -> str:
        return self.address.name

    @property
    def load(self) -> WorkerLoad:
        hops = self.hops
        self._load.hops, self._load.hop_us, self._load.overhead_us = hops.count, hops.hop_us, hops.overhead_us
        return self._load

    def reserve(self) -> None:
        """Note that the worker has none of the stage's layers."""
        load = self._load
        load.state, load.layers = "reserve", ""
        load.held_bytes = load.total_bytes = load.push_bytes = load.push_bytes_s = 0

    async def look(self, prepare: PrepareLayers) -> None:
        """Find out how far away the worker is, and what it has for layers of this model. ZrtError:
        the worker's; worker_failed, also for another version than this process's."""
        started = time.perf_counter()
        info = await self.ask(Hello(), WorkerInfo, HELLO_S)
        self._load.latency_us = int((time.perf_counter() - started) * 1e6)
        info.latency = self._load.latency_us // 1000
        if info.version != release():
            raise self.failure(f"it runs zrt {info.version}, this process {release()}")
        self.has = await self.ask(prepare, LayersPrepared, CHUNK_S)
        self._load.device, self._load.layer_us = self.has.device, self.has.layer_us
        self._load.free_mb, self._load.total_mb = self.has.free_bytes >> 20, self.has.total_bytes >> 20

    async def ask(self, message: LayerTraffic, answer: type[_Answer], timeout: float) -> _Answer:
        """Return the worker's answer to a message. ZrtError: the worker's own; worker_failed: an
        answer of another type, or none."""
        try:
            body = (await self.actor.ask(self.address, message, timeout=timeout)).body
        except ZrtError as error:
            raise self.failure(error.message) from None
        if isinstance(body, WorkerError):
            kind, _, text = body.message.partition(": ")
            known = kind if kind in KINDS else "worker_failed"
            raise ZrtError.of(known, f"{self.name}: {text or body.message}", self.name)
        if not isinstance(body, answer):
            raise self.failure(f"it answered {type(body).__name__}")
        return body

    def failure(self, why: str) -> ZrtError:
        """Return the error of a worker that failed."""
        return ZrtError("worker_failed", f"{self.name}: {why}", self.name)


RECENT: Final = 512
"""Hops whose times are kept."""


class HopTimes:
    """The times of one worker's hops, in microseconds. Medians are those of the last RECENT hops, 0
    before the first."""

    def __init__(self) -> None:
        self.count = 0
        self._recent: deque[tuple[int, int]] = deque(maxlen=RECENT)

    def add(self, hop_us: int, compute_us: int) -> None:
        self.count += 1
        self._recent.append((hop_us, hop_us - compute_us))

    @property
    def hop_us(self) -> int:
        return self._median(0)

    @property
    def overhead_us(self) -> int:
        """The median of what is not the worker's compute: encoding, sockets, wake-ups."""
        return self._median(1)

    def _median(self, column: int) -> int:
        return int(statistics.median(times[column] for times in self._recent)) if self._recent else 0
