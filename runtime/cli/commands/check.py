"""`zrt check`: say whether a model can be run."""

import argparse

from zrt.runtime.cli import argument_types
from zrt.runtime.errors import ZrtError

DESCRIPTION = """Say what a model is, and list all that keeps it from being run: from its config, its tokenizer and the headers of its weights.
Nothing is started except ranks with --tp. Exit status 1 when it cannot be run. `zrt up` checks the weights first, too."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=argument_types.word, metavar="MODEL", help="a demo name, a folder, or a hub id")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument(
        "--tp",
        type=argument_types.positive,
        metavar="N",
        default=1,
        help="also start N ranks, and test that they can sum",
    )
    parser.add_argument(
        "--device",
        type=argument_types.device,
        default="cpu",
        help="the first rank's device: cpu, cuda:0, … (default: cpu)",
    )


def run(arguments: argparse.Namespace) -> int:
    from zrt.runtime.process.terminal import interruptible

    interruptible()
    from zrt.runtime.cli import preflight

    def trial(tp: int) -> ZrtError | None:
        from zrt.actors.block_server.tensor_parallel.trial import try_group

        return try_group(tp, arguments.device)

    return preflight.check(arguments.model, json=arguments.json, tp=arguments.tp, trial=trial)
