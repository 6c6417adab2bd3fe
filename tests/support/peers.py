"""The peers of actors under test: other actors, on this loop or on a loop of their own, and raw
sockets."""

import asyncio
import os
import resource
import select
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import zmq

from zrt.runtime.actor.actor import Actor
from zrt.runtime.messages.control import Address
from zrt.runtime.transport.mailbox import Mailbox
from zrt.runtime.transport.sockets import readable

Start = Callable[[Actor], Awaitable[Actor]]
PATIENCE_S = 20.0
"""Seconds after which a test no longer waits for what should have happened."""


async def until(condition: Callable[[], bool]) -> None:
    """Wait until the loop has made a condition true. TimeoutError after PATIENCE_S."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110  any condition will do, not only one that has an event
            await asyncio.sleep(0.002)


def arrives(mailbox: Mailbox, begin: Callable[[], object]) -> None:
    """Hold this loop up until what `begin` sets off has arrived at a mailbox, and leave that
    unread."""
    readable(mailbox._socket)  # no news is left of what came before
    begin()
    assert select.select([mailbox._fd], [], [], PATIENCE_S)[0]
    time.sleep(0.01)  # a send looks for news only a millisecond after the last look


@contextmanager
def no_descriptors() -> Iterator[Callable[[], None]]:
    """Take all file descriptors of this process for the length of the block. The function yielded
    takes those that have been closed since."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, limits[1]))

    def take() -> None:
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))

    try:
        take()
        yield take
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in taken:
            os.close(fd)


@asynccontextmanager
async def elsewhere(actor: Actor) -> AsyncIterator[Address]:
    """Run the actor on a loop and thread of its own, so that it goes on when this loop is held
    up."""
    started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    here = asyncio.get_running_loop()
    end: list[Callable[[], object]] = []

    async def live() -> None:
        ended = asyncio.Event()
        there = asyncio.get_running_loop()
        end.append(lambda: there.call_soon_threadsafe(ended.set))
        await actor.start()
        here.call_soon_threadsafe(started.set_result, None)
        await ended.wait()
        await actor.stop()

    thread = threading.Thread(target=asyncio.run, args=(live(),))
    thread.start()
    try:
        await asyncio.wait_for(started, PATIENCE_S)
        yield actor.address
    finally:
        end[0]()
        await asyncio.to_thread(thread.join, PATIENCE_S)


@contextmanager
def raw(kind: int, **options: int) -> Iterator["zmq.Socket[bytes]"]:
    """Open a plain pyzmq socket with a context of its own; `options` by their names, e.g.
    RCVHWM=1."""
    context = zmq.Context()
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
    socket.setsockopt(zmq.SNDTIMEO, int(PATIENCE_S * 1000))
    for name, value in options.items():
        socket.setsockopt(getattr(zmq, name), value)
    try:
        yield socket
    finally:
        socket.close()
        context.term()
