"""`zrt actor KIND`: start one process by hand."""

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from zrt.runtime.cli import argument_types
from zrt.runtime.cli.cluster_arguments import (
    add_advertise_arguments,
    add_cluster_arguments,
    add_listen_arguments,
    options_from,
)

if TYPE_CHECKING:
    from zrt.actors.options import ActorOptions

DESCRIPTION = "Start one process by hand."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(required=True, metavar="KIND")
    _add_block_server(kinds)
    _add_tp_rank(kinds)
    _add_coordinator(kinds)


def run(arguments: argparse.Namespace) -> int:
    return int(arguments.run_kind(arguments))


def _add_kind(
    kinds: Any, name: str, run_kind: Callable[[argparse.Namespace], int], about: str
) -> argparse.ArgumentParser:
    kind: argparse.ArgumentParser = kinds.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
    kind.set_defaults(run_kind=run_kind)
    return kind


def _add_block_server(kinds: Any) -> None:
    about = "a block server: blank until the coordinator gives it blocks"
    server = _add_kind(kinds, "block-server", block_server, about)
    add_member_arguments(server, "default: block-server-PID", "what there is")
    server.add_argument(
        "--shared-threads",
        type=argument_types.positive,
        metavar="N",
        help="threads while other stages of this machine compute as well (default: as --threads)",
    )


def _add_tp_rank(kinds: Any) -> None:
    about = "a tensor-parallel rank: takes its requests from its leader, or as JSON from any peer"
    rank = _add_kind(kinds, "tp-rank", tp_rank, about)
    rank.add_argument(
        "--rank", type=argument_types.count, metavar="R", required=True, help="its place in the group, from 1 on"
    )
    rank.add_argument(
        "--world", type=argument_types.positive, metavar="N", required=True, help="number of ranks in the group"
    )
    _add_process_arguments(rank, "default: rankR-PID")


def _add_coordinator(kinds: Any) -> None:
    parser = _add_kind(kinds, "coordinator", coordinator, "the coordinator of a cluster file")
    add_cluster_arguments(parser)
    add_listen_arguments(parser)
    parser.add_argument(
        "--port-wait",
        type=argument_types.seconds,
        default=0.0,
        metavar="S",
        help="seconds to wait for a port that is taken",
    )
    _add_cluster_id(parser)


def _add_process_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the arguments of every process that computes."""
    parser.add_argument("--name", type=argument_types.name, help=name)
    parser.add_argument("--device", type=argument_types.device, default="cpu", help="cpu, cuda:0, … (default: cpu)")
    parser.add_argument(
        "--threads",
        type=argument_types.positive,
        metavar="N",
        help="CPU threads for matrix products (default: one for each core)",
    )
    parser.add_argument(
        "--listen",
        type=argument_types.word,
        metavar="ENDPOINT",
        default="tcp://127.0.0.1:0",
        help="default: loopback, any port",
    )


def add_member_arguments(parser: argparse.ArgumentParser, name: str, memory: str) -> None:
    """Add the arguments of a process that joins a coordinator; `name` and `memory` are help texts:
    the default of `--name`, and of `--memory`."""
    parser.add_argument(
        "--join",
        type=argument_types.word,
        metavar="ENDPOINT",
        required=True,
        help="the coordinator's endpoint, such as tcp://10.0.0.1:7411",
    )
    _add_process_arguments(parser, name)
    parser.add_argument(
        "--memory",
        type=argument_types.size,
        default=0,
        metavar="SIZE",
        help=f"the most it may take, such as 8GiB (default: {memory})",
    )
    add_advertise_arguments(parser)
    _add_cluster_id(parser)


def _add_cluster_id(parser: argparse.ArgumentParser) -> None:
    text = "id of the cluster it belongs to; a replacement has its predecessor's (default: a new one, or that of the cluster it joins first)"
    parser.add_argument("--cluster-id", type=argument_types.word, metavar="ID", help=text)


def block_server(arguments: argparse.Namespace) -> NoReturn:
    """Run a block server."""
    from zrt.actors.options import BlockServerOptions

    run_with(options_from(arguments, BlockServerOptions))


def tp_rank(arguments: argparse.Namespace) -> NoReturn:
    """Run a rank of a tensor-parallel group."""
    from zrt.actors.options import RankOptions

    run_with(options_from(arguments, RankOptions))


def coordinator(arguments: argparse.Namespace) -> NoReturn:
    """Run a coordinator, once its model is whole."""
    from zrt.actors.options import CoordinatorOptions
    from zrt.runtime.cli import preflight

    options = options_from(arguments, CoordinatorOptions)
    preflight.fetch(options.read())
    run_with(options)


def run_with(options: "ActorOptions") -> NoReturn:
    """Run the actor that its options describe, in this process."""
    from zrt.actors.main import run
    from zrt.runtime.process.lifeline import hold

    run(options, hold())
