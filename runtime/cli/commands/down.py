"""`zrt down`: bring a cluster down."""

import argparse
import asyncio
import os
from contextlib import suppress
from typing import Final

from zrt.runtime.cli import argument_types
from zrt.runtime.cli.cluster_arguments import add_connect_argument
from zrt.runtime.cli.foreground import run_in_foreground
from zrt.runtime.client.client import DOWN_S, LEAVE_S, Client
from zrt.runtime.errors import ZrtError
from zrt.runtime.process import runfiles
from zrt.runtime.process.terminal import say

DESCRIPTION = """Bring the cluster down, and return when it is gone. No session is taken any more; those that are there may finish until the time
is up. A second `zrt down` does not wait for them."""
NAME_S: Final = 1.0
"""Seconds that a cluster that is to end may take to say its name."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--timeout",
        type=argument_types.seconds,
        default=LEAVE_S,
        metavar="S",
        help=f"seconds sessions may go on (default: {LEAVE_S:g})",
    )
    add_connect_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    return run_in_foreground(lambda: bring_down(arguments.connect, arguments.timeout))


async def bring_down(endpoint: str | None, timeout: float) -> int:
    """Bring the cluster down, once no session runs or the time is up, and return the exit status
    when the cluster is gone, with its `zrt up` if that runs on this machine."""
    async with Client(endpoint) as client:
        parent = runfiles.parent_of(client.endpoint)
        ended = None if parent is None else _end_of(parent)
        name = "the cluster"
        with suppress(ZrtError, TimeoutError):  # a cluster without an answer is told to end all the same
            name = (await asyncio.wait_for(client.status(), NAME_S)).name
        try:
            await client.down(timeout)
            if ended is not None:
                await asyncio.wait_for(ended, DOWN_S)
        except (ZrtError, TimeoutError) as error:
            if parent is None or (isinstance(error, ZrtError) and error.kind != "deadline"):
                raise
            text = f"`zrt up` (process {parent}) does not end: `kill -9 {parent}` ends it and all it started"
            raise ZrtError("deadline", text) from None
    say(f"zrt: {name} is down")
    return 0


def _end_of(pid: int) -> "asyncio.Future[None]":
    """Return a future that is done when the process has ended."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        ended.set_result(None)
        return ended

    def over() -> None:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        if not ended.done():
            ended.set_result(None)

    loop.add_reader(pidfd, over)
    return ended
