"""The push of layers to a worker: what it lacks of an offer, in chunks, a few of them ahead of its answers."""

import asyncio
from collections.abc import Callable
from typing import Final

from zrt.actors.lent_worker import CHUNK_S, LentWorker
from zrt.runtime.layer_manifest import MANIFEST
from zrt.runtime.layer_offer import CHUNK_BYTES, Offer
from zrt.runtime.messages.layers import ModelDataChunk, ModelDataTaken

UNACKNOWLEDGED: Final = 4
"""Chunks that are on their way to one worker."""


async def push(worker: LentWorker, offer: Offer, report: Callable[[int, int], None]) -> None:
    """Send what the worker does not hold yet; `report(bytes held, bytes sent)` at first and as it gets on. ZrtError: the worker's, worker_failed.

    What is on its way lies in UNACKNOWLEDGED buffers, each read into again once the worker has answered what it held.
    """
    size = len(offer.manifest)
    await worker.ask(ModelDataChunk(MANIFEST, 0, size, memoryview(offer.manifest)), ModelDataTaken, CHUNK_S)
    held_before, sent = 0, 0
    buffer_bytes = min(CHUNK_BYTES, max(file.size for file in offer.files))
    free: asyncio.Queue[memoryview] = asyncio.Queue()
    for _ in range(UNACKNOWLEDGED):
        free.put_nowait(memoryview(bytearray(buffer_bytes)))

    async def send(chunk: ModelDataChunk, buffer: memoryview) -> None:
        nonlocal sent
        try:
            await worker.ask(chunk, ModelDataTaken, CHUNK_S)
        finally:
            free.put_nowait(buffer)
        sent += len(chunk.data)
        report(held_before + sent, sent)

    sends: list[asyncio.Task[None]] = []
    try:
        held_bytes = []
        for file in offer.files:
            probe = ModelDataChunk(file.name, 0, file.size, memoryview(b""))
            held_bytes.append((await worker.ask(probe, ModelDataTaken, CHUNK_S)).held)
        held_before = sum(held_bytes)
        report(held_before, 0)
        for file, held in zip(offer.files, held_bytes, strict=True):
            for offset, size in file.chunks(held):
                buffer = await free.get()
                _raise_first(sends)
                data = buffer[:size]
                await asyncio.to_thread(file.read, offset, data)
                sends.append(asyncio.ensure_future(send(ModelDataChunk(file.name, offset, file.size, data), buffer)))
        await asyncio.gather(*sends)
    finally:
        for task in sends:
            task.cancel()
        await asyncio.gather(*sends, return_exceptions=True)


def _raise_first(sends: list[asyncio.Task[None]]) -> None:
    """Forget the sends that are over; raise what the first that failed did: the others may have failed since it had."""
    for task in [task for task in sends if task.done()]:
        sends.remove(task)
        task.result()
