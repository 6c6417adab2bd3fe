"""A TP rank: one of the processes that a block server's blocks are split over.

Receives from its leader, and bare from any peer: the requests of messages/ranks.py; sends one
response to each, in order of arrival. The event loop answers Ping, QueryVram and Shutdown, so that
a rank shows signs of life while it computes; everything else runs in the executor (rank.py).
"""

import asyncio
import logging
import os
from collections.abc import Hashable
from functools import partial
from typing import get_args

import torch

from zrt.actors.options import RankOptions
from zrt.actors.tp_rank.rank import Rank
from zrt.runtime.actor.actor import Actor
from zrt.runtime.actor.envelope import Bare, Envelope
from zrt.runtime.actor.executor import ComputeExecutor
from zrt.runtime.compute.devices import device_lives, device_memory, out_of_memory
from zrt.runtime.compute.threads import configure_threads
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.ranks import (
    Bye,
    Ping,
    Pong,
    QueryVram,
    RankError,
    RankMessage,
    RankShutdown,
    VramInfo,
    WorkerRequest,
    WorkerResponse,
)
from zrt.runtime.wire.ranks import decode_rank_request, encode_rank

log = logging.getLogger(__name__)


class TpRank(Actor):
    """The actor of rank `rank` of `world`; `device` is a torch device, `threads` how many threads
    its GEMMs may use."""

    def __init__(self, name: str, *, rank: int, world: int, device: str, threads: int, listen: str) -> None:
        super().__init__(name, listen=listen)
        if not 0 <= rank < world:
            raise ZrtError("bad_config", f"rank {rank} is not one of a group of {world}: 0 to {world - 1}")
        self._rank = Rank(rank, world, device)
        self._threads = threads
        self._executor = ComputeExecutor(f"{name}-{device}", partial(device_lives, self._rank.device))
        for kind in get_args(WorkerRequest):
            self.handle(kind, self._on_request)
        self.handle_bare(self._on_bare)

    async def start(self) -> None:
        configure_threads(self._threads)
        await super().start()

    async def stop(self) -> None:
        await super().stop()
        self._executor.close()

    async def _on_request(self, request: WorkerRequest, envelope: Envelope) -> RankMessage:
        steps = envelope.header.steps
        session: Hashable = steps[0].session if steps else envelope.peer
        return await self._serve(request, session)

    def _on_bare(self, bare: Bare) -> None:
        self.spawn(self._answer_bare(bare), "a bare request")

    async def _answer_bare(self, bare: Bare) -> None:
        response: WorkerResponse
        try:
            request = decode_rank_request(bare.frame)
        except ZrtError as error:
            response = RankError(error.kind, error.message)
        else:
            response = await self._serve(request, bare.peer)
        self.reply_bare(bare, encode_rank(response))

    async def _serve(self, request: WorkerRequest, session: Hashable) -> WorkerResponse:
        """Return the response to a request. Never raises: a failure is answered with a
        RankError."""
        match request:
            case Ping():
                return Pong(self._rank.rank, self._rank.world, self._rank.device.index or 0)
            case QueryVram():
                return await asyncio.to_thread(_memory, self._rank.device)  # a driver may hold it up
            case RankShutdown():
                self._loop.call_soon(self.ended.set)
                return Bye()
        try:
            return await self._executor.run(self._rank.serve, request, session)
        except ZrtError as error:
            return RankError(error.kind, error.message)
        except Exception as error:
            log.exception("%s: %s failed", self.name, type(request).__name__)
            known = out_of_memory(error)
            if known is not None:
                return RankError(known.kind, known.message)
            return RankError("internal", f"{type(request).__name__} failed: {type(error).__name__}: {error}")


def _memory(device: torch.device) -> VramInfo:
    free, total = device_memory(device)
    return VramInfo(free >> 20, total >> 20)


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
