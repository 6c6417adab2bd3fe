"""The ranks of a tensor-parallel group as threads of this process, joined by gloo."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, as_completed
from pathlib import Path
from typing import TypeVar

import torch

from support.chained import Pipeline
from zrt.runtime.compute.collectives.communicator import Communicator, Rendezvous, join
from zrt.runtime.compute.cpu.cpu_forward import cpu_decoder
from zrt.runtime.compute.decoder.shard import Shard
from zrt.runtime.compute.kv.slab_cache import SlabKVCache
from zrt.runtime.compute.weight_sources import Source, open_checkpoint
from zrt.runtime.models.architecture.spec import read_spec

T = TypeVar("T")
CPU = torch.device("cpu")
PATIENCE_S = 60.0


def on_ranks(world: int, work: Callable[[Communicator], T]) -> list[T]:
    """Return what `work` returns on each rank of a new group."""
    rendezvous = Rendezvous(CPU)

    def run(rank: int) -> T:
        group = rendezvous.join(world) if rank == 0 else join(rendezvous.comm_id, rank, world, CPU)
        return work(group)

    futures: list[Future[T]] = [Future() for _ in range(world)]

    def settle(rank: int) -> None:
        try:
            futures[rank].set_result(run(rank))
        except BaseException as error:
            futures[rank].set_exception(error)

    for rank in range(world):  # daemons: where one fails, the others may wait for it for long
        threading.Thread(target=settle, args=(rank,), daemon=True).start()
    for future in as_completed(futures, PATIENCE_S):
        future.result()
    return [future.result() for future in futures]


class RankedPipeline(Pipeline):
    """One rank's stages of a model that is cut into blocks and then split."""

    def __init__(
        self,
        folder: Path,
        cuts: Sequence[tuple[int, int]],
        group: Communicator,
        *,
        source: Source | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.spec = read_spec(folder)
        self.group = group
        self.stages = []
        for cut in cuts:
            shard = Shard.load(self.spec, source or open_checkpoint(folder), cut, dtype=dtype, group=group)
            cache = SlabKVCache(shard.spec, cut, dtype=dtype, budget=1 << 24, context=256, sessions=8)
            self.stages.append(cpu_decoder(shard, cache))

    def logits(self, key, seq_pos, ids, rope_length=0):  # type: ignore[no-untyped-def]
        """Return the leader's logits on every rank, so that all pick the same tokens."""
        logits = super().logits(key, seq_pos, ids, rope_length).clone()
        if self.group.rank:
            logits.zero_()
        self.group.all_reduce(logits)
        return logits
