"""From its options to a layer worker; imported in a layer worker's own process."""

import os
import socket

from zrt.actors.layer_worker.layer_worker import LayerWorker
from zrt.actors.options import LayerWorkerOptions
from zrt.runtime.paths import home


def make(options: LayerWorkerOptions) -> LayerWorker:
    """Return a layer worker, which waits for a master. What it is sent of a model is kept in the
    cache."""
    return LayerWorker(
        options.name or f"worker-{socket.gethostname()}-{os.getpid()}",
        join=options.join,
        cache=home() / "layers",
        device=options.device,
        threads=options.num_threads,
        listen=options.listen,
        advertise=options.advertise,
        cluster=options.cluster_id,
        memory_bytes=options.memory,
    )
