"""From its options to a blank block server; imported in a block server's own process."""

import os

from zrt.actors.block_server.block_server import BlockServer
from zrt.actors.options import BlockServerOptions


def make(options: BlockServerOptions) -> BlockServer:
    """Return a blank block server that joins the coordinator."""
    alone = options.num_threads
    return BlockServer(
        options.name or f"block-server-{os.getpid()}",
        join=options.join,
        device=options.device,
        threads=(alone, options.shared_threads or alone),
        listen=options.listen,
        advertise=options.advertise,
        cluster=options.cluster_id,
        memory_bytes=options.memory,
    )
