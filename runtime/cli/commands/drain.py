"""`zrt drain` and `zrt undrain`: take a block server out of service, and let it serve again."""

import argparse
import asyncio

from zrt.runtime.cli import argument_types
from zrt.runtime.cli.cluster_arguments import add_connect_argument
from zrt.runtime.cli.foreground import run_in_foreground
from zrt.runtime.client.client import DRAIN_S, Client
from zrt.runtime.messages.client import Drained
from zrt.runtime.process.terminal import say

DESCRIPTION = """Take a block server out of service with nothing lost: its sessions move to another replica of its stage. Where there is none they
may finish; what still runs when the time is up is parked, and goes on when a replica, a restart or `zrt undrain` comes. The block server
keeps its weights. Ctrl-C ends this command, but not the drain: `zrt undrain` does."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", type=argument_types.word, metavar="NAME", help="the block server's name, as `zrt status` shows it"
    )
    parser.add_argument(
        "--timeout",
        type=argument_types.seconds,
        default=DRAIN_S,
        metavar="S",
        help=f"seconds sessions may go on there (default: {DRAIN_S:g})",
    )
    add_connect_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    return run_in_foreground(lambda: _drain(arguments.connect, arguments.name, arguments.timeout))


async def _drain(endpoint: str | None, name: str, timeout: float) -> int:
    """Take a block server out of service, and return the exit status. Progress and fate of its
    sessions go to stderr."""
    said = ""

    def tell(event: Drained) -> None:
        nonlocal said
        if (text := _drained(event)) != said:
            say(text)
            said = text

    async with Client(endpoint) as client:
        try:
            tell(await client.drain(name, timeout, progress=tell))
        except asyncio.CancelledError:
            if said:
                say(
                    f"zrt: the drain of {name} goes on: `zrt status` shows how it gets on, `zrt undrain {name}` ends it"
                )
            raise
    return 0


def _drained(event: Drained) -> str:
    counts = {"left": event.left, "moved": event.moved, "finished": event.finished, "parked": event.parked}
    told = [f"{count} {what}" for what, count in counts.items() if count]
    return f"zrt: {event.name} is {event.state}: {', '.join(told) or 'no session ran there'}"


class UndrainCommand:
    """The command `zrt undrain`, which undoes a drain."""

    DESCRIPTION = "Let a drained block server serve again."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("name", type=argument_types.word, metavar="NAME", help="the block server's name")
        add_connect_argument(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        return run_in_foreground(lambda: _undrain(arguments.connect, arguments.name))


async def _undrain(endpoint: str | None, name: str) -> int:
    async with Client(endpoint) as client:
        await client.undrain(name)
    return 0
