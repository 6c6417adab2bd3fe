"""`zrt worker`: lend this machine's memory to a cluster."""

import argparse

from zrt.runtime.cli.commands.actor import add_member_arguments

DESCRIPTION = """Hold layers of the model for a cluster: one with a stage that takes help (backend = "layers"), or whose file has a [[worker]] of this
name. Nothing is needed on disk: what it holds is sent to it, and kept in the cache. It stays when the cluster goes, and serves the next one there."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_member_arguments(parser, "as in the cluster file (default: worker-HOST-PID)", "what there is, less a reserve")


def run(arguments: argparse.Namespace) -> int:
    from zrt.actors.main import run_worker

    return run_worker(
        arguments.name,
        join=arguments.join,
        device=arguments.device,
        threads=arguments.threads,
        listen=arguments.listen,
        advertise=arguments.advertise,
        insecure=arguments.insecure,
        cluster=arguments.cluster_id,
        memory=arguments.memory,
    )
