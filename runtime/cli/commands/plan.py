"""`zrt plan`: show what a cluster file asks for."""

import argparse

from zrt.runtime.cli.cluster_arguments import add_cluster_arguments, cluster_options

DESCRIPTION = """Show which stage of a cluster file gets which blocks, and what memory that takes of what there is. Nothing is started; of the
model, no weights are needed. Exit status 1 when memory is short, or a GPU is not there."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cluster_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(arguments: argparse.Namespace) -> int:
    from zrt.runtime.process.terminal import interruptible

    interruptible()
    from zrt.runtime.cli import preflight

    return preflight.plan(cluster_options(arguments).read(), json=arguments.json)
