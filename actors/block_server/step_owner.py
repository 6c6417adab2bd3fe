"""What the turn loop asks of whoever owns a step: how it runs, and what becomes of its results."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from zrt.actors.block_server.step_queue import Waiting
from zrt.runtime.compute.engine import Holding
from zrt.runtime.compute.turn import Outcome, Passing, TurnResult, Work

_Step = TypeVar("_Step", contravariant=True)


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn that ran: its steps, what became of each, and its clock (`started` monotonic
    seconds, `spent_us` in the executor)."""

    engine: Holding
    steps: list[Waiting]
    result: TurnResult
    started: float
    spent_us: int


class StepOwner(Protocol[_Step]):
    """The owner of waiting steps of one kind: bare sessions, or the delivery of routed ones.
    `urgent`: its results go out before those of owners that are not."""

    urgent: bool

    def work(self, engine: Holding, step: _Step) -> Work:
        """Return the step's forward."""

    def passing(self, steps: Sequence[_Step]) -> Passing | None:
        """Return where the results of a turn of these steps alone go while it runs; None:
        nowhere."""

    async def deliver(self, turn: Turn, ran: Sequence[tuple[_Step, Outcome]]) -> None:
        """Hand on what came of the owner's steps of a turn."""
