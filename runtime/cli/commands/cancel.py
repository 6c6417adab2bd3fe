"""`zrt cancel`: end a session."""

import argparse

from zrt.runtime.cli import argument_types
from zrt.runtime.cli.cluster_arguments import add_connect_argument
from zrt.runtime.cli.foreground import run_in_foreground
from zrt.runtime.client.client import Client

DESCRIPTION = "End a session."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "session", type=argument_types.session, metavar="SESSION", help="the session's id, as `zrt status` shows it"
    )
    add_connect_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    return run_in_foreground(lambda: _cancel(arguments.connect, arguments.session))


async def _cancel(endpoint: str | None, session: int) -> int:
    async with Client(endpoint) as client:
        await client.cancel(session)
    return 0
