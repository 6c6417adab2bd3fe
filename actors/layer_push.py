"""The push of layers to a worker: what it lacks of an offer, in chunks, a few of them ahead of its answers."""

import asyncio
from collections.abc import Callable
from typing import Final

from zrt.actors.lent_worker import CHUNK_S, LentWorker
from zrt.runtime.layer_files import MANIFEST, PIECE_BYTES, Offer
from zrt.runtime.messages.layers import ModelDataChunk, ModelDataTaken

UNACKNOWLEDGED: Final = 4
"""Chunks that are on their way to one worker."""


async def push(worker: LentWorker, offer: Offer, report: Callable[[int, int], None]) -> None:
    """Send what the worker does not hold yet; `report(bytes held, bytes sent)` at first and as it gets on. ZrtError: the worker's, worker_failed."""
    size = len(offer.manifest)
    await worker.ask(ModelDataChunk(MANIFEST, 0, size, memoryview(offer.manifest)), ModelDataTaken, CHUNK_S)
    held_before, sent = 0, 0
    window = asyncio.Semaphore(UNACKNOWLEDGED)

    async def send(chunk: ModelDataChunk) -> None:
        nonlocal sent
        try:
            await worker.ask(chunk, ModelDataTaken, CHUNK_S)
        finally:
            window.release()
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
            for offset in range(held, file.size, PIECE_BYTES):
                await window.acquire()
                data = await asyncio.to_thread(file.read, offset, PIECE_BYTES)
                chunk = ModelDataChunk(file.name, offset, file.size, memoryview(data))
                sends.append(asyncio.ensure_future(send(chunk)))
        await asyncio.gather(*sends)
    finally:
        for task in sends:
            task.cancel()
        await asyncio.gather(*sends, return_exceptions=True)
