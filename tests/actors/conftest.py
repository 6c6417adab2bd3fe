"""Every test here runs on uvloop and on asyncio's own loop."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import pytest_asyncio
import uvloop
from support.peers import Start

from zrt.runtime.actor.actor import Actor


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}


@pytest_asyncio.fixture
async def start() -> AsyncIterator[Start]:
    """Starts an actor and stops it at the end of the test."""
    started: list[Actor] = []

    async def begin(actor: Actor) -> Actor:
        await actor.start()
        started.append(actor)
        return actor

    yield begin
    for actor in reversed(started):
        await actor.stop()
