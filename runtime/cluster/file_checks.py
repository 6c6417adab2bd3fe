"""Checks for mistakes in a cluster file that no value shows by itself, before the model is known.
Pure."""

from collections.abc import Mapping, Sequence

from zrt.runtime.cluster.file_schema import ClusterSettings, LendSettings, Metrics, Stage, Worker
from zrt.runtime.cluster.partition import Blocks, misfits
from zrt.runtime.cluster.toml_tables import Read
from zrt.runtime.endpoints import endpoint, is_loopback, port_unknown

Stages = Mapping[int, Read[Stage]]
"""Stages by their number, from 1 on; stages that are no tables are left out."""


def contradictions(
    cluster: Read[ClusterSettings] | None,
    metrics: Read[Metrics] | None,
    stages: Sequence[Read[Stage] | None],
    workers: Sequence[Read[Worker] | None] | None,
) -> list[str]:
    """Return the contradictions in a cluster file, a line each. A table that is None, and all that
    depends on a key that could not be read, is not checked."""
    numbered = {number: stage for number, stage in enumerate(stages, 1) if stage is not None}
    wrong = _open("cluster", cluster, cluster) + _open("metrics", metrics, cluster) + _advertises(cluster)
    wrong += misfits({number: stage.table.blocks for number, stage in numbered.items() if stage.has("blocks")})
    wrong += _lends(numbered)
    if workers is not None and None not in workers:
        names = [worker.table.name for worker in workers if worker is not None]
        wrong += _workers(numbered, names, sure=len(numbered) == len(stages))
    return wrong + _memories(numbered)


def outside(number: int, stage: Stage, blocks: Blocks) -> list[str]:
    """Return a line for each run of blocks that a stage lends but does not hold."""
    return [
        f"[[stage]] {number} lend: blocks {lend.blocks} of {lend.worker} are not within the stage's {blocks}"
        for lend in stage.lend
        if lend.blocks.first < blocks.first or lend.blocks.last > blocks.last
    ]


def _open(
    name: str, table: Read[ClusterSettings] | Read[Metrics] | None, cluster: Read[ClusterSettings] | None
) -> list[str]:
    if table is None or cluster is None or not (table.has("listen") and cluster.has("insecure")):
        return []
    listen = table.table.listen
    if cluster.table.insecure or not listen or is_loopback(endpoint(listen)[0]):
        return []
    return [
        f"[{name}] listen: {listen} can be reached from other machines and nothing is encrypted; "
        "listen on 127.0.0.1, or set insecure = true in [cluster]"
    ]


def _advertises(cluster: Read[ClusterSettings] | None) -> list[str]:
    if cluster is None or not cluster.has("listen", "advertise"):
        return []
    text = port_unknown(cluster.table.advertise, cluster.table.listen)
    return [f"[cluster] advertise: {text}"] if text else []


def _memories(stages: Stages) -> list[str]:
    planned = {
        number: stage.table.memory
        for number, stage in stages.items()
        if stage.has("blocks", "memory") and stage.table.blocks is None
    }
    without = [number for number, memory in planned.items() if memory is None]
    if not without or len(without) == len(planned):
        return []
    return [
        f"[[stage]] {without[0]} has no memory, but others do: blocks are planned by it, so say it for every stage "
        "whose blocks are planned, or for none"
    ]


def _lends(stages: Stages) -> list[str]:
    """Return a line for each mistake in what the stages lend."""
    wrong = []
    for number, read in stages.items():
        stage, at = read.table, f"[[stage]] {number} lend"
        if stage.lend and stage.tp > 1:
            wrong.append(f"{at}: a stage with tp {stage.tp} lends nothing")
        if stage.lend and stage.replicas > 1:
            wrong.append(f"{at}: a worker serves one block server, so a stage that lends has one replica")
        if stage.backend == "layers" and stage.tp > 1:
            wrong.append(f"[[stage]] {number} backend: a stage with tp {stage.tp} lends nothing")
        if stage.blocks is not None:
            wrong += outside(number, stage, stage.blocks)
        before: LendSettings | None = None
        for lend in sorted(stage.lend, key=lambda lend: lend.blocks.first):
            if before is not None and lend.blocks.first <= before.blocks.last:
                wrong.append(f"{at}: {lend.blocks} of {lend.worker} and {before.blocks} of {before.worker} overlap")
            before = lend
    return wrong


def _workers(stages: Stages, names: Sequence[str], *, sure: bool) -> list[str]:
    """Return a line for each worker that a stage lends to and that is not in the file, and for each
    worker that nothing is lent to; the latter only if it is `sure` that these are all stages."""
    several = sorted({name for name in names if names.count(name) > 1})
    names = list(dict.fromkeys(names))
    wrong = [
        f"[[worker]] {name}: several have this name; give each one of its own, or leave out all but one"
        for name in several
    ]
    taken: dict[str, int] = {}
    for number, stage in stages.items():
        at = f"[[stage]] {number} lend"
        for lend in stage.table.lend:
            if lend.worker not in names:
                known = ", ".join(names) or "none"
                wrong.append(f"{at}: there is no [[worker]] {lend.worker}; there are: {known}")
            if taken.setdefault(lend.worker, number) != number:
                wrong.append(f"{at}: {lend.worker} serves [[stage]] {taken[lend.worker]} already")
    sure = sure and all(stage.has("lend", "backend") for stage in stages.values())
    if sure and not any(stage.table.backend == "layers" for stage in stages.values()):
        text = 'no [[stage.lend]] names it, and no [[stage]] has backend = "layers"'
        wrong += [f"[[worker]] {name}: {text}" for name in names if name not in taken]
    return wrong
