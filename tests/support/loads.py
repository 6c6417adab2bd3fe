"""Sessions that run at once, half of them greedy and half at some temperature, each with its own
prompt and seed; and their tokens."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from support.clusters import local_cluster
from zrt.runtime.client.client import Client
from zrt.runtime.messages.client import Piece, Progress

WAIT_S = 60.0


class Load:
    """A load of sessions. `tokens` are those each session has so far, `phases` all phases that any
    of them was told."""

    def __init__(self, client: Client, count: int, length: int, heat: float) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(count)]
        self.phases: set[str] = set()
        self._client = client
        self._length = length
        self._heat = heat
        self._some = asyncio.Condition()
        self._tasks = [asyncio.create_task(self._run(index)) for index in range(count)]

    async def _run(self, index: int) -> None:
        prompt = random.Random(index).choices(range(3, 150), k=9 + index)
        stream = self._client.generate(
            token_ids=prompt, max_tokens=self._length, temperature=self._heat * (index % 2), seed=index, ignore_eos=True
        )
        while not stream.over:
            event = await stream.next_event()
            async with self._some:
                if isinstance(event, Piece):
                    self.tokens[index] += event.token_ids
                elif isinstance(event, Progress):
                    self.phases.add(event.phase)
                self._some.notify_all()

    async def have(self, count: int) -> None:
        """Wait until each session has `count` tokens more than now, or is over."""
        wanted = [min(len(tokens) + count, self._length) for tokens in self.tokens]
        await self._until(lambda: all(len(got) >= goal for got, goal in zip(self.tokens, wanted, strict=True)))

    async def in_phase(self, phase: str) -> None:
        """Wait until some session has been told of this phase."""
        await self._until(lambda: phase in self.phases)

    async def _until(self, condition: object) -> None:
        async with asyncio.timeout(WAIT_S), self._some:
            await self._some.wait_for(condition)  # type: ignore[arg-type]

    async def over(self) -> list[list[int]]:
        """Return all tokens of all sessions, at their end."""
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*self._tasks)
        return self.tokens

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()


@asynccontextmanager
async def load(client: Client, count: int, length: int, heat: float = 0.8) -> AsyncIterator[Load]:
    """Run `count` sessions of `length` tokens each, all of which have begun to decode."""
    made = Load(client, count, length, heat)
    try:
        await made.have(3)
        yield made
    finally:
        made.stop()


async def undisturbed(folder: Path, count: int, length: int, heat: float = 0.8) -> list[list[int]]:
    """Return the tokens of such a load where nothing disturbs it."""
    async with (
        local_cluster(folder, ["0-1", "2-3"], model_context=512) as cluster,
        load(cluster.client, count, length, heat) as made,
    ):
        return await made.over()
