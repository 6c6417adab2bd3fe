"""`zrt generate`: ask a running cluster once."""

import argparse

from zrt.runtime.cli import argument_types
from zrt.runtime.cli.answer import answer
from zrt.runtime.cli.cluster_arguments import add_connect_argument
from zrt.runtime.cli.foreground import run_in_foreground
from zrt.runtime.cli.question import Question, add_question_arguments, read_question
from zrt.runtime.client.client import Client

DESCRIPTION = "Stream one answer to stdout; how fast it came goes to stderr. Ctrl-C ends it, at the cluster too."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompt",
        type=argument_types.prompt,
        metavar="TEXT",
        nargs="?",
        help="what to ask; '-' reads it from standard input",
    )
    add_question_arguments(parser)
    add_connect_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    question = read_question(arguments)
    return run_in_foreground(lambda: _ask(arguments.connect, question))


async def _ask(endpoint: str | None, question: Question) -> int:
    async with Client(endpoint) as client:
        return await answer(client, question)
