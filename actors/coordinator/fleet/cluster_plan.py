"""What the cluster file says of the fleet: the seats of its plan, their memory, and what all their
assignments have in common."""

from dataclasses import replace
from pathlib import Path

from zrt.actors.coordinator.fleet.roster import Roster
from zrt.runtime.cluster.file_schema import Conf
from zrt.runtime.cluster.memory import block_server_bytes
from zrt.runtime.cluster.seats import Seat, lends, seats, spare_names, stage_ranges
from zrt.runtime.messages.members import Assignment
from zrt.runtime.models.architecture.spec import ModelSpec
from zrt.runtime.models.checkpoint.split import kv_pages
from zrt.runtime.models.fetch.resolve import local_folder


class ModelMemory:
    """The StageMemory of one model, served as one (checked) cluster file says."""

    def __init__(self, conf: Conf, spec: ModelSpec) -> None:
        self._conf = conf
        self._spec = spec

    def needed_bytes(self, first: int, last: int) -> int:
        return block_server_bytes(self._conf, self._spec, first, last)

    def kv_pages(self, seat: Seat) -> int:
        conf = self._conf
        return kv_pages(self._spec, seat.last - seat.first + 1, conf.model.dtype, conf.kv.bytes, seat.tp)


def planned_seats(conf: Conf, spec: ModelSpec) -> list[Seat]:
    """Return the seats of the cluster file's stages, in pipeline order."""
    ranges = [(part.first, part.last) for part in stage_ranges(conf, spec)]
    return [
        replace(
            seat,
            tp=stage.tp,
            lend=lends(conf, seat.stage),
            helped=stage.backend == "layers",
            gpu_memory=stage.gpu_memory,
        )
        for seat in seats(ranges, [stage.replicas for stage in conf.stages])
        for stage in [conf.stages[seat.stage]]
    ]


def planned_roster(conf: Conf, spec: ModelSpec) -> Roster:
    """Return the roster of a cluster whose processes have yet to register."""
    return Roster(planned_seats(conf, spec), ModelMemory(conf, spec), spares=spare_names(conf))


def assignment_template(conf: Conf, spec: ModelSpec, folder: Path, context: int) -> Assignment:
    """Return what the assignments of all stages have in common; sessions hold `context` tokens at
    most.

    A model that the cluster file names by a path is the one in `folder`. A demo name or hub id is
    resolved by each machine itself.
    """
    return Assignment(
        serial=0,
        model=conf.model.ref if local_folder(conf.model.ref) is None else str(folder),
        weights=conf.model.weights,
        first=0,
        last=0,
        num_blocks=spec.num_blocks,
        dtype=conf.model.dtype,
        kv_bytes=conf.kv.bytes,
        context=context,
        sessions=conf.limits.sessions,
        chunk=conf.chunk,
        idle_s=conf.limits.idle_s,
    )
