"""A block server's loop answers while its executor loads the demo model, prefills and decodes."""

from pathlib import Path

import pytest
from support.clusters import cluster_file, make_coordinator, make_server, until_ready
from support.stalls import EmptyLoop, StallMeter

from zrt.runtime.client.client import Client
from zrt.runtime.cluster.file_loader import parse

ALLOWED_MS = 50.0


@pytest.mark.demo
async def test_the_loop_never_stalls(demo_model: Path) -> None:
    """The coordinator's own start (it reads the tokenizer before it binds) is not part of this."""
    coordinator = make_coordinator(parse(cluster_file(demo_model, [None], model_context=1024), "test"), demo_model)
    await coordinator.start()
    async with Client(coordinator.endpoint) as client:
        server = make_server("stage0", coordinator.endpoint)
        async with EmptyLoop() as empty:
            with StallMeter() as meter:
                await server.start()
                await until_ready(client)
                ids = []
                async for piece in client.generate(token_ids=range(100, 700), max_tokens=16, temperature=0.0):
                    ids += piece.token_ids
    await server.stop()
    await coordinator.stop()
    assert len(ids) == 16
    assert meter.worst_ms - empty.worst_ms <= ALLOWED_MS
