"""The memory that a cluster file asks for, stage by stage, against what there is. Pure: numbers in,
numbers and words out.

A process takes its weights, its KV pool (in full, although its pages are touched only when sessions
come) and its own memory.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from zrt.runtime.cluster.file_schema import Conf, Stage
from zrt.runtime.cluster.layer_sharing import ranges
from zrt.runtime.cluster.partition import Blocks, Wish
from zrt.runtime.errors import ZrtError
from zrt.runtime.formatting import byte_size
from zrt.runtime.models.architecture.spec import ModelSpec
from zrt.runtime.models.checkpoint.formats.registry import format_of, item_bytes
from zrt.runtime.models.checkpoint.layout import PAGE_TOKENS, block_bytes, shard_bytes
from zrt.runtime.models.checkpoint.split import RankPart, kv_page_bytes, kv_pages, part_bytes

BLOCK_SERVER_BYTES: Final = 448 << 20
"""Bytes of a block server besides weights, KV and activations: 350 MiB resident measured when blank
(torch, and the compiler of the CPU kernels), 370 MiB at work, and more with more threads; the chunk
through which it loads weights is included."""
COORDINATOR_BYTES: Final = 128 << 20
"""Bytes of the coordinator: 80 MiB measured, and the room for a larger tokenizer."""


class LentNeeds(msgspec.Struct, frozen=True):
    """Needs of a layer worker with pinned blocks of a stage. With `joins` it takes another
    machine's memory, and its `device` is not known."""

    worker: str
    blocks: str
    joins: bool
    device: str
    weight_bytes: int
    kv_bytes: int
    process_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.process_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of this machine's memory that the worker takes."""
        if self.joins:
            return 0
        return self.total_bytes if self.device == "cpu" else self.process_bytes


class StageNeeds(msgspec.Struct, frozen=True):
    """Needs of one stage of the plan. Bytes and KV tokens are those of each replica, its `tp` ranks
    together, less those of the blocks it has `lent`; `own` are the blocks that the stage keeps,
    `memory` is the most it may take, None without a limit."""

    name: str
    blocks: Blocks
    replicas: int
    device: str
    weight_bytes: int
    kv_bytes: int
    kv_tokens: int
    kv_page_bytes: int
    process_bytes: int
    memory: int | None
    tp: int = 1
    lendable_bytes: int = 0
    """The part of the stage's bytes that layer workers may hold in its place."""
    own: str = ""
    lent: tuple[LentNeeds, ...] = ()

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.process_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of the machine's memory that the stage takes at least: a device other than the CPU
        has its own memory for weights and KV."""
        return self.total_bytes - self.lendable_bytes if self.device == "cpu" else self.process_bytes

    def __str__(self) -> str:
        return f"{self.name} (blocks {self.blocks})"


class Needs(msgspec.Struct, frozen=True):
    """Needs of a cluster in bytes: all stages, and the machine that runs them. `kv_tokens` is the
    room of the tightest stage; `spares_bytes` is what the spares take while they are blank (for
    weights and KV they have the memory that the process they replace leaves); `workers_bytes` is
    what this machine's layer workers without pinned blocks take, besides layers. `needed_bytes` is
    of this machine's memory, without that of its GPUs, and without what layer workers may hold in
    place of a stage that takes help."""

    stages: tuple[StageNeeds, ...]
    context: int
    kv_tokens: int
    coordinator_bytes: int
    spares_bytes: int
    workers_bytes: int
    needed_bytes: int
    available_bytes: int


def wishes(conf: Conf, spec: ModelSpec) -> list[Wish]:
    """Return what the stages of a cluster file ask of the plan. Where the stages say how much
    memory they may take, what this leaves for weights is both their weight and their room; else all
    stages are equal."""
    found = []
    for stage in conf.stages:
        if stage.memory is None:
            found.append(Wish(stage.blocks))
        else:
            room = max(1, stage.memory - conf.kv.bytes - process_bytes(conf, spec) * stage.tp)
            found.append(Wish(stage.blocks, float(room), None if stage.backend == "layers" else room))
    return found


def needs(conf: Conf, spec: ModelSpec, ranges: list[Blocks], available: int) -> Needs:
    """Return what each stage takes with these blocks, on a machine with `available` bytes of
    memory."""
    stages = tuple(
        _stage_needs(conf, spec, number, stage, blocks)
        for number, (stage, blocks) in enumerate(zip(conf.stages, ranges, strict=True))
    )
    pinned = {lent.worker for stage in stages for lent in stage.lent}
    here = sum(not worker.join and worker.name not in pinned for worker in conf.workers)
    spares_bytes = conf.spares.count * BLOCK_SERVER_BYTES
    workers_bytes = here * process_bytes(conf, spec)
    return Needs(
        stages=stages,
        context=min(conf.model.context, spec.max_positions),
        kv_tokens=min(stage.kv_tokens for stage in stages),
        coordinator_bytes=COORDINATOR_BYTES,
        spares_bytes=spares_bytes,
        workers_bytes=workers_bytes,
        needed_bytes=COORDINATOR_BYTES
        + spares_bytes
        + workers_bytes
        + sum(stage.replicas * stage.host_bytes + sum(lent.host_bytes for lent in stage.lent) for stage in stages),
        available_bytes=available,
    )


def shortage(needs: Needs) -> ZrtError | None:
    """Return `insufficient_memory` with the numbers, a line for each stage that lacks some and one
    for the machine; None if all fits."""
    lacks = []
    for stage in needs.stages:
        if not stage.kv_tokens:
            lacks.append(
                f"{stage}: {byte_size(stage.kv_bytes)} of KV memory hold no page of {PAGE_TOKENS} tokens, which takes "
                f"{byte_size(stage.kv_page_bytes)}: raise [kv] bytes or give it fewer blocks"
            )
        if stage.memory is not None and stage.total_bytes - stage.lendable_bytes > stage.memory:
            lacks.append(
                f"{_breakdown(stage)}; it may take {byte_size(stage.memory)}: {_ways_out([stage])}, or raise its memory"
            )
    if needs.needed_bytes > needs.available_bytes:
        takers: list[StageNeeds | LentNeeds] = []
        for stage in needs.stages:
            takers += [stage, *(lent for lent in stage.lent if not lent.joins)]
        ways = _ways_out(takers)
        each = "; ".join(_breakdown(taker) for taker in takers)
        others = {"spares": needs.spares_bytes, "layer workers": needs.workers_bytes}
        more = "".join(f"; {name} {byte_size(size)}" for name, size in others.items() if size)
        lacks.append(
            f"the cluster needs {byte_size(needs.needed_bytes)} of this machine's memory, and {byte_size(needs.available_bytes)} "
            f"are available. {each}; coordinator {byte_size(needs.coordinator_bytes)}{more}. {ways[0].upper()}{ways[1:]}"
        )
    return ZrtError("insufficient_memory", "\n".join(lacks)) if lacks else None


def block_server_bytes(conf: Conf, spec: ModelSpec, first: int, last: int) -> int:
    """Return the bytes that a block server with these blocks takes in all, with as many ranks as
    any stage has."""
    processes = max(stage.tp for stage in conf.stages) * process_bytes(conf, spec)
    return shard_bytes(spec, first, last, format_of(conf.model.dtype)) + conf.kv.bytes + processes


def process_bytes(conf: Conf, spec: ModelSpec) -> int:
    """Return the bytes that a block server takes besides weights and KV: itself, and the
    activations of its largest turn."""
    return BLOCK_SERVER_BYTES + turn_bytes(spec, conf.model.dtype, conf.chunk, conf.limits.sessions)


def turn_bytes(spec: ModelSpec, dtype: str, chunk: int, sessions: int) -> int:
    """Return the bytes of the activations of the largest turn."""
    width = 3 * spec.hidden_size + 3 * spec.num_heads * spec.head_dim + 2 * spec.intermediate_size
    return (chunk + sessions) * width * item_bytes(dtype)


def _ways_out(takers: Sequence[StageNeeds | LentNeeds]) -> str:
    """Return the ways to make `takers` take less of their memory, without those that would do
    nothing for any of them."""
    stages = [taker for taker in takers if isinstance(taker, StageNeeds)]
    ways = ["take a smaller dtype or model"]
    if any(taker.kv_bytes for taker in takers if not (isinstance(taker, StageNeeds) and taker.lendable_bytes)):
        ways.insert(0, "lower [kv] bytes")
    if any(stage.own and stage.tp == 1 and not stage.lendable_bytes for stage in stages):
        ways.append('let layer workers help (backend = "layers" in a [[stage]])')
    return ", ".join(ways)


def _stage_needs(conf: Conf, spec: ModelSpec, number: int, stage: Stage, blocks: Blocks) -> StageNeeds:
    dtype, tp = conf.model.dtype, stage.tp
    stored = format_of(dtype)
    weights = sum(part_bytes(spec, RankPart(rank, tp), blocks.first, blocks.last, stored) for rank in range(tp))
    block = block_bytes(spec, stored)
    lent = _lent(conf, spec, stage, blocks)
    away = {number for lend in stage.lend for number in lend.blocks.numbers}
    own = [number for number in blocks.numbers if number not in away]
    left = len(own)
    return StageNeeds(
        name=f"stage{number}",
        blocks=blocks,
        replicas=stage.replicas,
        device=stage.device,
        weight_bytes=weights - len(away) * block,
        kv_bytes=conf.kv.bytes * left // len(blocks),
        kv_tokens=kv_pages(spec, len(blocks), dtype, conf.kv.bytes, tp) * PAGE_TOKENS,
        kv_page_bytes=kv_page_bytes(spec, len(blocks), dtype, tp) * tp,
        process_bytes=process_bytes(conf, spec) * tp,
        memory=stage.memory,
        tp=tp,
        lendable_bytes=left * block + conf.kv.bytes * left // len(blocks) if stage.backend == "layers" else 0,
        own=ranges(own),
        lent=lent,
    )


def _lent(conf: Conf, spec: ModelSpec, stage: Stage, blocks: Blocks) -> tuple[LentNeeds, ...]:
    """Return the workers that blocks of the stage are pinned to, in the order of their blocks."""
    workers = {worker.name: worker for worker in conf.workers}
    held: dict[str, list[int]] = {}
    for lend in sorted(stage.lend, key=lambda lend: lend.blocks.first):
        held.setdefault(lend.worker, []).extend(lend.blocks.numbers)
    return tuple(
        LentNeeds(
            worker=name,
            blocks=ranges(numbers),
            joins=workers[name].join,
            device="" if workers[name].join else workers[name].device,
            weight_bytes=len(numbers) * block_bytes(spec, format_of(conf.model.dtype)),
            kv_bytes=conf.kv.bytes * len(numbers) // len(blocks),
            process_bytes=process_bytes(conf, spec),
        )
        for name, numbers in held.items()
    )


def _breakdown(needs: StageNeeds | LentNeeds) -> str:
    if isinstance(needs, LentNeeds):
        who, times = f"layer worker {needs.worker} (blocks {needs.blocks})", ""
    else:
        who, times = str(needs), f"{needs.replicas} x " if needs.replicas > 1 else ""
        if needs.lendable_bytes:
            left = needs.total_bytes - needs.lendable_bytes
            return (
                f"{who} needs {times}{byte_size(left)} even if layer workers hold blocks {needs.own} and their KV "
                f"(weights {byte_size(left - needs.process_bytes)}, the process {byte_size(needs.process_bytes)})"
            )
    return (
        f"{who} needs {times}{byte_size(needs.total_bytes)} (weights {byte_size(needs.weight_bytes)}, "
        f"KV {byte_size(needs.kv_bytes)}, the process {byte_size(needs.process_bytes)})"
    )
