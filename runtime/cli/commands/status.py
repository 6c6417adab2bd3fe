"""`zrt status`: show a running cluster."""

import argparse

from zrt.runtime.cli.cluster_arguments import add_connect_argument
from zrt.runtime.cli.foreground import run_in_foreground

DESCRIPTION = "Show the cluster's processes and sessions."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout; with --watch, one per line")
    parser.add_argument("--watch", action="store_true", help="print again and again, until Ctrl-C")
    add_connect_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    from zrt.tui.status import status

    try:
        return run_in_foreground(lambda: status(arguments.connect, json=arguments.json, watch=arguments.watch))
    except KeyboardInterrupt:
        if not arguments.watch:
            raise
        return 0  # Ctrl-C is how a watch ends
