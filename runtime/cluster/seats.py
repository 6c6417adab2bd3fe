"""The seats of a plan: which block servers, by name, hold which blocks, and how a stage is cut in
two. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zrt.runtime.cluster.file_checks import outside
from zrt.runtime.cluster.file_schema import Conf
from zrt.runtime.cluster.memory import wishes
from zrt.runtime.cluster.partition import Blocks, plan
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.members import GPU_MEMORY, Lend
from zrt.runtime.models.architecture.spec import ModelSpec
from zrt.runtime.models.checkpoint.formats.registry import format_of
from zrt.runtime.models.checkpoint.layout import block_bytes, embedding_bytes, head_bytes
from zrt.runtime.models.checkpoint.split import check_split


@dataclass(frozen=True, slots=True)
class Seat:
    """A place in the plan: replica `replica` of stage `stage`, for blocks first..last, usually
    taken by the actor called `name`, with `tp` ranks. The blocks of `lend` are within first..last;
    with `helped` the seat may lend more, to workers that join."""

    name: str
    stage: int
    replica: int
    first: int
    last: int
    tp: int = 1
    lend: tuple[Lend, ...] = ()
    helped: bool = False
    gpu_memory: float = GPU_MEMORY

    @property
    def lends(self) -> bool:
        """Whether the seat's block server may have layer workers."""
        return bool(self.lend) or self.helped


def seat_name(stage: int, replica: int, replicas: int) -> str:
    """Return a replica's name: a stage's only replica is called `stage0`, several are `stage0.0`,
    `stage0.1`."""
    return f"stage{stage}" if replicas == 1 else f"stage{stage}.{replica}"


def spare_names(conf: Conf) -> list[str]:
    """Return the names of a cluster file's blank block servers: `spare0`, `spare1`."""
    return [f"spare{number}" for number in range(conf.spares.count)]


def stage_ranges(conf: Conf, spec: ModelSpec) -> list[Blocks]:
    """Return which blocks of the model each stage of the cluster file gets. ZrtError bad_config: a
    line for each setting that does not fit the model."""
    weights = format_of(conf.model.dtype)
    wrong = []
    of_tp: dict[int, list[int]] = {}
    for number, stage in enumerate(conf.stages, 1):
        of_tp.setdefault(stage.tp, []).append(number)
    for tp, numbers in of_tp.items():
        try:
            check_split(spec, tp)
        except ZrtError as error:
            wrong.append(f"[[stage]] {', '.join(map(str, numbers))}: {error.message}")
    try:
        ranges = plan(
            [block_bytes(spec, weights)] * spec.num_blocks,
            embedding_bytes(spec, weights),
            head_bytes(spec, weights),
            wishes(conf, spec),
        )
    except ZrtError as error:
        wrong.append(error.message)
        ranges = [Blocks(0, spec.num_blocks - 1)] * len(conf.stages)
    for number, (stage, blocks) in enumerate(zip(conf.stages, ranges, strict=True), 1):
        wrong += outside(number, stage, stage.blocks or blocks)
    if wrong:
        raise ZrtError("bad_config", "\n".join(wrong), conf.where)
    return ranges


def lends(conf: Conf, stage: int) -> tuple[Lend, ...]:
    """Return the runs of blocks that a stage of the cluster file lends."""
    return tuple(Lend(lend.worker, lend.blocks.first, lend.blocks.last) for lend in conf.stages[stage].lend)


def seats(ranges: Sequence[tuple[int, int]], replicas: Sequence[int]) -> list[Seat]:
    """Return one seat per replica, in pipeline order."""
    return [
        Seat(seat_name(stage, replica, count), stage, replica, first, last)
        for stage, ((first, last), count) in enumerate(zip(ranges, replicas, strict=True))
        for replica in range(count)
    ]


def cut_stage(seat: Seat, stage: int, cut: int) -> list[Seat]:
    """Return the seats that replace a seat when `stage` is cut before block `cut`: a seat of that
    stage becomes two, seats of later stages move on by one."""
    if seat.stage < stage:
        return [seat]
    if seat.stage > stage:
        return [replace(seat, stage=seat.stage + 1)]
    return [replace(seat, last=cut - 1), replace(seat, stage=stage + 1, first=cut)]
