"""The loading of engines: from a model's files or with random weights, for given blocks and a given
device.

The weights are read, the KV pool is allocated, and on a GPU the graphs are captured. Every call
blocks.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Final

import torch

from zrt.runtime.compute.cpu.cpu_forward import CpuForward, cpu_decoder
from zrt.runtime.compute.decoder.decoder import Decoder
from zrt.runtime.compute.decoder.linear import Linear
from zrt.runtime.compute.decoder.shard import Shard
from zrt.runtime.compute.decoder.tp_linear import Collectives
from zrt.runtime.compute.devices import check_device
from zrt.runtime.compute.engine import Engine
from zrt.runtime.compute.kv.paged_cache import PagedKVCache
from zrt.runtime.compute.kv.session_cache import PageCount
from zrt.runtime.compute.kv.slab_cache import SlabKVCache
from zrt.runtime.compute.tensors import dtype_name
from zrt.runtime.compute.weight_sources import RandomCheckpoint, Source, open_checkpoint
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.members import GPU_MEMORY
from zrt.runtime.models.architecture.spec import ModelSpec, read_spec
from zrt.runtime.models.checkpoint.formats.registry import format_of
from zrt.runtime.models.checkpoint.layout import PAGE_TOKENS, held_ends
from zrt.runtime.models.checkpoint.split import RankPart, part_bytes
from zrt.runtime.paths import home


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The settings of one process's engine. `kv_bytes` is this process's own KV budget; `context`
    is in tokens; `sessions` is the most that are open at once.

    `gpu_memory` is the fraction of a CUDA device's memory that weights and KV may take. `ends` says
    whether embedding and head are held, as in `Shard.load`.
    """

    dtype: torch.dtype
    kv_bytes: int
    context: int
    sessions: int
    device: str
    gpu_memory: float = GPU_MEMORY
    ends: tuple[bool, bool] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWatch:
    """The callbacks of a load: `progress(bytes read, bytes in all)`; after it, on a GPU,
    `captured(graphs, graphs in all)`; `cancelled` says whether to stop."""

    progress: Callable[[int, int], None] | None = None
    captured: Callable[[int, int], None] | None = None
    cancelled: Callable[[], bool] | None = None


UNWATCHED: Final = LoadWatch()


def load_engine(
    folder: Path,
    blocks: tuple[int, int],
    options: EngineOptions,
    *,
    num_blocks: int,
    random: bool = False,
    group: Collectives | None = None,
    watch: LoadWatch = UNWATCHED,
) -> Engine:
    """Read blocks first..last of the model in `folder`, which must have `num_blocks` blocks, or
    draw `random` weights for them, and allocate their KV pool; in a `group`, only this rank's part
    of both.

    ZrtError: bad_model, unsupported, bad_config, insufficient_memory, cancelled.
    """
    spec = read_spec(folder)
    if spec.num_blocks != num_blocks:
        raise ZrtError("bad_model", f"{folder} has {spec.num_blocks} blocks here, {num_blocks} at the coordinator")
    source = RandomCheckpoint(spec) if random else open_checkpoint(folder)
    return read_engine(spec, source, blocks, options, group=group, watch=watch)


def read_engine(
    spec: ModelSpec,
    source: Source,
    blocks: tuple[int, int],
    options: EngineOptions,
    *,
    table: Linear | None = None,
    group: Collectives | None = None,
    watch: LoadWatch = UNWATCHED,
) -> Engine:
    """Read blocks first..last from an open source. `table` is as in `Shard.load`; errors are those
    of `load_engine`."""

    def load() -> Shard:
        return Shard.load(
            spec,
            source,
            blocks,
            dtype=options.dtype,
            device=options.device,
            ends=options.ends,
            table=table,
            group=group,
            progress=watch.progress,
            cancelled=watch.cancelled,
        )

    if torch.device(options.device).type == "cuda":
        _check_gpu(spec, blocks, options, group)
        return _gpu_engine(spec, blocks, options, load, watch)
    shard = load()
    cache = SlabKVCache(
        shard.spec,
        blocks,
        dtype=options.dtype,
        budget=options.kv_bytes,
        context=options.context,
        sessions=options.sessions,
    )
    return Engine(shard, cache, cpu_decoder(shard, cache))


def engine_of_ends(
    spec: ModelSpec, source: Source, place: int, options: EngineOptions, *, pages: int, table: Linear | None = None
) -> Engine:
    """Read no blocks, only the requested ones of the model's ends (embedding, head), to the CPU:
    the ends that stand before block `place`, where other processes run all blocks.

    The engine holds no KV, but counts `pages` of it, so that it accepts the same sessions as the
    processes that hold the blocks.
    """
    shard = Shard.load(spec, source, (place, place - 1), dtype=options.dtype, ends=options.ends, table=table)
    cache = PageCount(pages, page_tokens=PAGE_TOKENS, context=options.context, sessions=options.sessions)
    return Engine(shard, cache, Decoder(shard, cache, CpuForward(shard, None)))


def _gpu_engine(
    spec: ModelSpec,
    blocks: tuple[int, int],
    options: EngineOptions,
    load: Callable[[], Shard],
    watch: LoadWatch,
) -> Engine:
    """Load a shard to a GPU while the sampler's kernels compile, and capture its graphs."""
    from zrt.runtime.compute.cuda.gpu_forward import GpuForward  # needs Triton, which comes with torch for CUDA

    compiling = _compile_sampler(spec, blocks, options)
    shard = load()
    pages = PagedKVCache(
        shard.spec,
        blocks,
        dtype=options.dtype,
        device=shard.device,
        budget=options.kv_bytes,
        context=options.context,
        sessions=options.sessions,
    )
    forward = GpuForward(shard, pages, options.sessions)
    if compiling is not None:
        compiling.join()
    forward.capture(home() / "gpu", watch.captured)
    return Engine(shard, pages, Decoder(shard, pages, forward))


def _compile_sampler(spec: ModelSpec, blocks: tuple[int, int], options: EngineOptions) -> Thread | None:
    """Start the thread that compiles the sampler's kernels; return None where no head is held."""
    from zrt.runtime.compute.cuda import batch_sampler

    _, has_head = held_ends(spec, *blocks) if options.ends is None else options.ends
    return batch_sampler.compiling(spec.vocab_size, torch.device(options.device)) if has_head else None


def _check_gpu(spec: ModelSpec, blocks: tuple[int, int], options: EngineOptions, group: Collectives | None) -> None:
    """Raise ZrtError unsupported where this device or group cannot serve, insufficient_vram when
    weights and KV need more than the budget or than what is free."""
    device = torch.device(options.device)
    check_device(device)
    torch.cuda.set_device(device)
    gc.collect()  # frees the memory of an earlier engine, not only torch's
    torch.cuda.empty_cache()
    part = RankPart() if group is None else RankPart(group.rank, group.world)
    weights = part_bytes(spec, part, *blocks, format_of(dtype_name(options.dtype)))
    free, total = torch.cuda.mem_get_info(device)
    budget = min(free, int(total * options.gpu_memory))
    if weights + options.kv_bytes > budget:
        raise ZrtError(
            "insufficient_vram",
            f"blocks {blocks[0]}-{blocks[1]} need {weights} bytes for weights and {options.kv_bytes} for KV on {device}; "
            f"{budget} may be used ({free} of {total} are free, gpu_memory is {options.gpu_memory}). "
            "Give [kv] fewer bytes, or cut the model into more stages",
        )
