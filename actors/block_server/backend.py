"""What runs a block server's turns: its own executor alone, or its executor together with TP ranks
(group.py) or with layer workers (lending_backend.py)."""

from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Protocol

from zrt.runtime.actor.executor import ComputeExecutor
from zrt.runtime.compute.decoder.tp_linear import Collectives
from zrt.runtime.compute.engine import Engine, Holding
from zrt.runtime.compute.loading import EngineOptions, LoadWatch, load_engine
from zrt.runtime.compute.tensors import DTYPES
from zrt.runtime.compute.turn import Passing, TurnResult, Work
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.members import Assignment

Progress = Callable[[int, int], None]
"""Told how many bytes of how many are loaded."""


class BackendListener(Protocol):
    """Whoever is told what becomes of a backend: the block server that it serves."""

    def backend_lost(self, error: ZrtError) -> None:
        """Hear that the ranks or workers broke by themselves; all their KV is gone."""

    def progress_changed(self) -> None:
        """Hear that loading has got on, or what it waits for has changed."""


class Backend(Protocol):
    """The blocks at work. `engine` is this process's own part of them. Errors are those of the
    engine, `rank_failed` and `worker_failed`; `broken` is the one that it broke with by itself."""

    @property
    def engine(self) -> Holding: ...

    @property
    def broken(self) -> ZrtError | None: ...

    async def open(self, key: Hashable, length: int, names: Sequence[int], prompt: int) -> int:
        """Open a session, as Engine.open."""

    async def close(self, key: Hashable, names: Sequence[int] | None) -> None:
        """Close a session, as Engine.close."""

    async def turn(self, works: Sequence[Work], threads: int) -> TurnResult:
        """Run a turn, as Engine.turn."""


class LocalBackend:
    """A backend whose blocks are all in this process, and do not break by themselves."""

    broken: ZrtError | None = None

    def __init__(self, executor: ComputeExecutor, engine: Engine) -> None:
        self.engine = engine
        self._executor = executor

    async def open(self, key: Hashable, length: int, names: Sequence[int], prompt: int) -> int:
        return await self._executor.run(self.engine.open, key, length, names, prompt)

    async def close(self, key: Hashable, names: Sequence[int] | None) -> None:
        await self._executor.run(self.engine.close, key, names)

    async def turn(self, works: Sequence[Work], threads: int, passing: Passing | None = None) -> TurnResult:
        return await self._executor.run(self.engine.turn, works, threads, passing)


def options_of(assignment: Assignment, device: str, world: int = 1) -> EngineOptions:
    """Return the settings of an engine on `device` for the assigned blocks; each of `world` ranks
    has an equal share of the KV memory."""
    return EngineOptions(
        dtype=DTYPES[assignment.dtype],
        kv_bytes=assignment.kv_bytes // world,
        context=assignment.context,
        sessions=assignment.sessions,
        device=device,
        gpu_memory=assignment.gpu_memory,
    )


def load_assigned(
    folder: Path,
    assignment: Assignment,
    *,
    device: str,
    group: Collectives | None = None,
    progress: Callable[[int, int], None] | None = None,
    captured: Callable[[int, int], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> Engine:
    """Load the assigned blocks of the model in `folder`; of a `group`, this rank's part of them.
    The hooks are those of LoadWatch. ZrtError as load_engine."""
    return load_engine(
        folder,
        (assignment.first, assignment.last),
        options_of(assignment, device, 1 if group is None else group.world),
        num_blocks=assignment.num_blocks,
        random=assignment.weights == "random",
        group=group,
        watch=LoadWatch(progress=progress, captured=captured, cancelled=cancelled),
    )
