"""What a block server does with rows that others leave in memory for it."""

from collections.abc import AsyncIterator

import pytest
from support.clusters import make_server
from support.handing import Writer

from zrt.actors.block_server.block_server import BlockServer
from zrt.actors.block_server.memory_channels import MemoryChannels
from zrt.runtime.actor.executor import ComputeExecutor
from zrt.runtime.compute.shared_rows.channel import PLACES
from zrt.runtime.messages.header import HandedOver, Header


@pytest.fixture
async def server() -> AsyncIterator[BlockServer]:
    made = make_server("stage1", "tcp://127.0.0.1:1")
    await made.start()
    yield made
    await made.stop()


async def test_rows_of_a_message_that_nobody_wants_take_no_place(server: BlockServer) -> None:
    """Be it the first that comes of that process."""
    executor, writer = ComputeExecutor("handovers"), Writer()
    try:
        memory_channels = MemoryChannels(server, executor)
        memory_channels.near = "this machine"
        for number in range(3 * PLACES):
            handed = writer.put([number])
            assert isinstance(handed, HandedOver)
            memory_channels.dismiss(Header(1, "stage0", 5, handed=handed))
        memory_channels.stop()
    finally:
        executor.close()
        writer.end()
