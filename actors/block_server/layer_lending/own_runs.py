"""The runs of blocks of a stage that lends some: how the stage is cut into them, and how those of
its own are read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from zrt.actors.block_server.backend import Progress, options_of
from zrt.actors.block_server.layer_lending.layer_setup import LentModel
from zrt.runtime.compute.decoder.linear import Linear
from zrt.runtime.compute.engine import Engine, Holding
from zrt.runtime.compute.loading import LoadWatch, engine_of_ends, read_engine
from zrt.runtime.messages.members import Assignment, Lend
from zrt.runtime.models.checkpoint.formats.registry import format_of
from zrt.runtime.models.checkpoint.layout import block_bytes, embedding_bytes, ends_bytes
from zrt.runtime.models.checkpoint.split import kv_pages


@dataclass(frozen=True, slots=True)
class OwnRun:
    """A run of the stage's own: blocks first..last (none: last is first - 1), with what of the
    model's ends is beside them."""

    first: int
    last: int
    embedding: bool = False
    head: bool = False

    def device(self, device: str) -> str:
        """Return where the run computes, of a stage on `device`: ends alone are on the CPU."""
        return device if self.last >= self.first else "cpu"

    def nbytes(self, model: LentModel) -> int:
        """Return the bytes of the run's weights."""
        weights = format_of(model.assignment.dtype)
        blocks = (self.last - self.first + 1) * block_bytes(model.spec, weights)
        return blocks + ends_bytes(model.spec, self.embedding, self.head, weights)


def read_bytes(model: LentModel, runs: Sequence[OwnRun], device: str) -> list[int]:
    """Return the bytes that each own run takes: an embedding that is the head as well counts with
    the first run on each device."""
    sizes, held = [], set()
    for run in runs:
        size, place = run.nbytes(model), run.device(device)
        if model.spec.tied and (run.embedding or run.head):
            size -= embedding_bytes(model.spec, format_of(model.assignment.dtype)) if place in held else 0
            held.add(place)
        sizes.append(size)
    return sizes


def stage_holding(first: Engine, last: Engine) -> Holding:
    """Return what a stage of several engines holds: it takes what its first run takes, and gives
    what its last one gives."""
    shard = replace(first.shard, last=last.shard.last, final_norm=last.shard.final_norm, head=last.shard.head)
    return Holding(shard, first.cache)


def cut(assignment: Assignment, lends: Sequence[Lend]) -> list[OwnRun | Lend]:
    """Return the runs of a stage in order. At least one is the stage's own, if only without blocks:
    whatever comes in is checked there."""
    first, last, end = assignment.first, assignment.last, assignment.num_blocks - 1
    ordered = sorted(lends, key=lambda lend: lend.first)
    runs: list[OwnRun | Lend] = []
    at = first
    for lend in ordered:
        if at < lend.first:
            runs.append(OwnRun(at, lend.first - 1, embedding=at == 0))
        runs.append(lend)
        at = lend.last + 1
    if at <= last:
        runs.append(OwnRun(at, last, embedding=at == 0, head=last == end))
    elif last == end:
        runs.append(OwnRun(end + 1, end, head=True))
    if isinstance(runs[0], Lend) and (first == 0 or all(isinstance(run, Lend) for run in runs)):
        runs.insert(0, OwnRun(first, first - 1, embedding=first == 0))
    return runs


def held_table(engines: Sequence[Engine], device: str) -> Linear | None:
    """Return an embedding or head that is held on a device, if any is."""
    shards = [engine.shard for engine in engines if engine.shard.device == torch.device(device)]
    return next((table for shard in shards for table in (shard.embedding, shard.head) if table is not None), None)


def read_run(
    model: LentModel,
    run: OwnRun,
    device: str,
    table: Linear | None,
    progress: Progress,
    cancelled: Callable[[], bool],
) -> Engine:
    """Return the engine of an own run; `table` is an embedding or head that another one holds on
    its device. ZrtError: as read_engine."""
    given = model.assignment
    options = replace(options_of(given, device), ends=(run.embedding, run.head))
    if run.last < run.first:
        pages = kv_pages(model.spec, given.last - given.first + 1, given.dtype, given.kv_bytes, 1)
        return engine_of_ends(model.spec, model.source, run.first, options, pages=pages, table=table)
    return read_engine(
        model.spec,
        model.source,
        (run.first, run.last),
        replace(options, kv_bytes=model.kv_bytes(run.last - run.first + 1)),
        table=table,
        watch=LoadWatch(progress=progress, cancelled=cancelled),
    )
