"""`zrt top`: watch a running cluster, and act on it."""

import argparse
import sys

from zrt.runtime.cli.cluster_arguments import add_connect_argument
from zrt.runtime.errors import ZrtError

DESCRIPTION = """Watch the cluster in the terminal: processes, sessions, drains, events and throughput, live; cancel, drain, restart and chat by keys.
`?` lists them. It reconnects by itself when the coordinator is lost."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_connect_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    from zrt.runtime.client.client import find_endpoint

    endpoint = find_endpoint(arguments.connect)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ZrtError("bad_config", "`zrt top` needs a terminal; `zrt status --watch --json` is for scripts")
    from zrt.tui.app import run as watch

    return watch(endpoint)
