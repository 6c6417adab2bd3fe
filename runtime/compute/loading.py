"""Engines as they are made: from a model's files, or with random weights, for the blocks and the
device that they are asked for.

The weights are read, the KV pool is allocated, and on a GPU the graphs are captured. Every call
blocks.
"""

import gc
from collections.abc import Callable
from pathlib import Path

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
from zrt.runtime.compute.tensors import DTYPES, dtype_name
from zrt.runtime.compute.weight_sources import RandomCheckpoint, Source, open_checkpoint
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.members import GPU_MEMORY, Assignment
from zrt.runtime.models.architecture.spec import ModelSpec, read_spec
from zrt.runtime.models.checkpoint.layout import PAGE_TOKENS
from zrt.runtime.models.checkpoint.split import RankPart, part_bytes
from zrt.runtime.models.fetch.resolve import home


def load_engine(
    folder: Path,
    assignment: Assignment,
    *,
    device: str,
    group: Collectives | None = None,
    progress: Callable[[int, int], None],
    captured: Callable[[int, int], None] | None = None,
    cancelled: Callable[[], bool],
) -> Engine:
    """Read the assignment's shard from `folder` and allocate its KV pool; of a `group`, this rank's
    part of both.

    `progress(bytes read, bytes in all)`; on a GPU, then, `captured(graphs, graphs in all)`.
    ZrtError: bad_model, unsupported, bad_config, insufficient_memory, cancelled.
    """
    spec = read_spec(folder)
    if spec.num_blocks != assignment.num_blocks:
        there = assignment.num_blocks
        raise ZrtError("bad_model", f"{folder} has {spec.num_blocks} blocks here, {there} at the coordinator")
    source = RandomCheckpoint(spec) if assignment.weights == "random" else open_checkpoint(folder)
    return read_engine(
        spec,
        source,
        (assignment.first, assignment.last),
        dtype=DTYPES[assignment.dtype],
        kv_bytes=assignment.kv_bytes // (1 if group is None else group.world),
        context=assignment.context,
        sessions=assignment.sessions,
        device=device,
        gpu_memory=assignment.gpu_memory,
        group=group,
        progress=progress,
        captured=captured,
        cancelled=cancelled,
    )


def read_engine(
    spec: ModelSpec,
    source: Source,
    blocks: tuple[int, int],
    *,
    dtype: torch.dtype,
    kv_bytes: int,
    context: int,
    sessions: int,
    device: str,
    gpu_memory: float = GPU_MEMORY,
    ends: tuple[bool, bool] | None = None,
    table: Linear | None = None,
    group: Collectives | None = None,
    progress: Callable[[int, int], None] | None = None,
    captured: Callable[[int, int], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> Engine:
    """As `load_engine`, from a source that is open; `kv_bytes` are this process's own, `ends` and
    `table` as `Shard.load` has them."""
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        _check_gpu(torch.device(device), spec, blocks, dtype, kv_bytes, gpu_memory, group)
        from zrt.runtime.compute.cuda import batch_sampler  # needs Triton, which comes with torch for CUDA

        has_head = blocks[1] == spec.num_blocks - 1 if ends is None else ends[1]
        compiling = batch_sampler.compiling(spec.vocab_size, torch.device(device)) if has_head else None
    shard = Shard.load(
        spec,
        source,
        blocks,
        dtype=dtype,
        device=device,
        ends=ends,
        table=table,
        group=group,
        progress=progress,
        cancelled=cancelled,
    )
    if on_gpu:
        from zrt.runtime.compute.cuda.gpu_forward import GpuForward

        pages = PagedKVCache(
            shard.spec,
            blocks,
            dtype=dtype,
            device=shard.device,
            budget=kv_bytes,
            context=context,
            sessions=sessions,
        )
        forward = GpuForward(shard, pages, sessions)
        if compiling is not None:
            compiling.join()
        forward.capture(home() / "gpu", captured)
        return Engine(shard, pages, Decoder(shard, pages, forward))
    cache = SlabKVCache(shard.spec, blocks, dtype=dtype, budget=kv_bytes, context=context, sessions=sessions)
    return Engine(shard, cache, cpu_decoder(shard, cache))


def engine_of_ends(
    spec: ModelSpec,
    source: Source,
    place: int,
    *,
    embedding: bool,
    head: bool,
    dtype: torch.dtype,
    pages: int,
    context: int,
    sessions: int,
    table: Linear | None = None,
) -> Engine:
    """No blocks, but what of the model's ends is asked for, on the CPU: what stands before block
    `place`, where others run all blocks.

    It holds no KV, and counts `pages` of it, so that it takes the sessions that they take.
    """
    shard = Shard.load(spec, source, (place, place - 1), dtype=dtype, ends=(embedding, head), table=table)
    cache = PageCount(pages, page_tokens=PAGE_TOKENS, context=context, sessions=sessions)
    return Engine(shard, cache, Decoder(shard, cache, CpuForward(shard, None)))


def _check_gpu(
    device: torch.device,
    spec: ModelSpec,
    blocks: tuple[int, int],
    dtype: torch.dtype,
    kv_bytes: int,
    gpu_memory: float,
    group: Collectives | None,
) -> None:
    """`unsupported` where this device or group cannot serve; `insufficient_vram` when weights and
    KV are more than the budget or what is free."""
    check_device(device)
    torch.cuda.set_device(device)
    gc.collect()  # what an engine before this one held is free, and not only torch's
    torch.cuda.empty_cache()
    part = RankPart() if group is None else RankPart(group.rank, group.world)
    weights = part_bytes(spec, part, *blocks, dtype_name(dtype))
    free, total = torch.cuda.mem_get_info(device)
    budget = min(free, int(total * gpu_memory))
    if weights + kv_bytes > budget:
        raise ZrtError(
            "insufficient_vram",
            f"blocks {blocks[0]}-{blocks[1]} need {weights} bytes for weights and {kv_bytes} for KV on {device}; {budget} may be used "
            f"({free} of {total} are free, gpu_memory is {gpu_memory}). Give [kv] fewer bytes, or cut the model into more stages",
        )
