"""`zrt undrain`: let a drained block server serve again."""

import argparse

from zrt.runtime.cli.cluster_arguments import add_connect_argument
from zrt.runtime.cli.foreground import run_in_foreground
from zrt.runtime.client.client import Client

DESCRIPTION = "Let a drained block server serve again."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the block server's")
    add_connect_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    return run_in_foreground(lambda: _undrain(arguments.connect, arguments.name))


async def _undrain(endpoint: str | None, name: str) -> int:
    async with Client(endpoint) as client:
        await client.undrain(name)
    return 0
