"""From its options to a rank of a tensor-parallel group; imported in a rank's own process."""

import os

from zrt.actors.options import RankOptions
from zrt.actors.tp_rank.tp_rank import TpRank


def make(options: RankOptions) -> TpRank:
    """Return a rank, which waits for its leader."""
    return TpRank(
        options.name or f"rank{options.rank}-{os.getpid()}",
        rank=options.rank,
        world=options.world,
        device=options.device,
        threads=options.num_threads,
        listen=options.listen,
    )
