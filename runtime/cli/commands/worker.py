"""`zrt worker`: lend this machine's memory to a cluster."""

import argparse
from typing import NoReturn

from zrt.runtime.cli.cluster_arguments import options_from
from zrt.runtime.cli.commands.actor import add_member_arguments, run_with

DESCRIPTION = """Hold layers of the model for a cluster: one with a stage that takes help (backend = "layers"), or whose file has a [[worker]] of this
name. Nothing is needed on disk: what it holds is sent to it, and kept in the cache. It stays when the cluster goes, and serves the next one there."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_member_arguments(parser, "as in the cluster file (default: worker-HOST-PID)", "what there is, less a reserve")


def run(arguments: argparse.Namespace) -> NoReturn:
    from zrt.actors.options import LayerWorkerOptions

    run_with(options_from(arguments, LayerWorkerOptions))
