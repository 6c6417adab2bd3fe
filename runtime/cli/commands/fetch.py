"""`zrt fetch`: download a model."""

import argparse

from zrt.runtime.cli import argument_types

DESCRIPTION = "Download a model into the cache, and print its folder."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=argument_types.word, metavar="MODEL", help="a demo name, a folder, or a hub id")


def run(arguments: argparse.Namespace) -> int:
    from zrt.runtime.process.terminal import interruptible

    interruptible()
    from zrt.runtime.models.fetch.resolve import resolve
    from zrt.runtime.process.load_bars import Bars

    with Bars() as bars:
        folder = resolve(arguments.model, progress=bars.update, say=bars.warn)
    print(folder)
    return 0
