"""`zrt up`: bring a cluster up, and stay with it or let it run on."""

import argparse
from functools import partial

from zrt.runtime.cli import argument_types
from zrt.runtime.cli.cluster_arguments import (
    add_cluster_arguments,
    add_listen_arguments,
    cluster_options,
    cluster_words,
)
from zrt.runtime.cli.question import add_question_arguments, describes_answer, read_question
from zrt.runtime.errors import ZrtError

DESCRIPTION = """Start a coordinator and the block servers of a cluster file, restart what dies, and stay until Ctrl-C or `zrt down`.
With --prompt or --token-ids: ask once, stream the answer, and bring the cluster down."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cluster_arguments(parser)
    add_listen_arguments(parser)
    parser.add_argument("--detach", action="store_true", help="return when the cluster is ready, and leave it running")
    parser.add_argument("--log", action="store_true", help=argparse.SUPPRESS)  # set by --detach
    parser.add_argument(
        "--prompt",
        type=argument_types.prompt,
        metavar="TEXT",
        help="ask once, stream the answer, bring the cluster down; '-' reads it from standard input",
    )
    add_question_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    from zrt.runtime.process.lifeline import hold
    from zrt.runtime.process.terminal import interruptible

    lifeline = hold()
    interruptible()
    from zrt.actors.node import node
    from zrt.runtime.cli import detach, log_lines, preflight
    from zrt.runtime.cli.answer import answer
    from zrt.runtime.cli.foreground import run_in_foreground
    from zrt.runtime.process import stderr

    options = cluster_options(arguments)
    conf = log_lines.as_told(options.read())
    options = options.elsewhere(conf)
    if not arguments.detach:
        stderr.wait_for_no_reader()
        log_lines.write(conf.log.format, detached=arguments.log)
    asks = arguments.prompt is not None or arguments.token_ids is not None
    if asks and arguments.detach:
        raise ZrtError("bad_config", "--prompt asks once and brings the cluster down: it does not go with --detach")
    if not asks and describes_answer(arguments):
        raise ZrtError("bad_config", "the options of an answer go with --prompt or --token-ids")
    question = read_question(arguments) if asks else None
    preflight.prepare(conf)
    if arguments.detach:
        return detach.detach(conf.cluster.name, cluster_words(options))
    ask = None if question is None else partial(answer, question=question)
    return run_in_foreground(lambda: node.up(conf, options, ask, lifeline, detached=arguments.log))
