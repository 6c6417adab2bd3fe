"""A layer worker as its master sees it: who it is, and questions with one answer each."""

from typing import Final, TypeVar

from zrt.actors.hop_times import HopTimes
from zrt.runtime.actor import Actor
from zrt.runtime.errors import KINDS, ZrtError
from zrt.runtime.messages.control import Address
from zrt.runtime.messages.layers import LayerMessage, LayerTraffic, WorkerError

HELLO_S: Final = 5.0
CHUNK_S: Final = 60.0
LOAD_S: Final = 1800.0
STEP_S: Final = 120.0

_Answer = TypeVar("_Answer", bound=LayerMessage)


class LentWorker:
    """One incarnation of a worker, asked by `actor`."""

    def __init__(self, actor: Actor, address: Address) -> None:
        self.actor = actor
        self.address = address
        self.hops = HopTimes()

    @property
    def name(self) -> str:
        return self.address.name

    async def ask(self, message: LayerTraffic, answer: type[_Answer], timeout: float) -> _Answer:
        """ZrtError: the worker's own; worker_failed: another answer than this, or none."""
        try:
            body = (await self.actor.ask(self.address, message, timeout=timeout)).body
        except ZrtError as error:
            raise self.failure(error.message) from None
        if isinstance(body, WorkerError):
            kind, _, text = body.message.partition(": ")
            raise ZrtError.of(kind if kind in KINDS else "worker_failed", text or body.message, self.name)
        if not isinstance(body, answer):
            raise self.failure(f"it answered {type(body).__name__}")
        return body

    def failure(self, why: str) -> ZrtError:
        return ZrtError("worker_failed", f"{self.name}: {why}", self.name)
