"""`zrt worker` and `zrt actor KIND`: their words, and the options of the actor that they fill.

An option of an actor (zrt.actors.options) is filled from the word of its name.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from zrt.runtime.cli import argument_types

if TYPE_CHECKING:
    from msgspec import Struct

    from zrt.actors.options import ActorOptions, ClusterOptions

_Options = TypeVar("_Options", bound="Struct")


def block_server(arguments: argparse.Namespace) -> NoReturn:
    """Run a block server."""
    from zrt.actors.options import BlockServerOptions

    _run(options_from(arguments, BlockServerOptions))


def worker(arguments: argparse.Namespace) -> NoReturn:
    """Run a layer worker."""
    from zrt.actors.options import LayerWorkerOptions

    _run(options_from(arguments, LayerWorkerOptions))


def tp_rank(arguments: argparse.Namespace) -> NoReturn:
    """Run a rank of a tensor-parallel group."""
    from zrt.actors.options import RankOptions

    _run(options_from(arguments, RankOptions))


def coordinator(arguments: argparse.Namespace) -> NoReturn:
    """Run a coordinator."""
    from zrt.actors.options import CoordinatorOptions

    _run(options_from(arguments, CoordinatorOptions))


def cluster_options(arguments: argparse.Namespace) -> "ClusterOptions":
    """Return which cluster file `zrt up` was given, and what replaces settings of it."""
    from zrt.actors.options import ClusterOptions

    return options_from(arguments, ClusterOptions)


def options_from(arguments: argparse.Namespace, kind: type[_Options]) -> _Options:
    """Return the options of this kind that the command line gives. Each has a word of its name."""
    return kind(**{name: _plain(getattr(arguments, name)) for name in kind.__struct_fields__})


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _run(options: "ActorOptions") -> NoReturn:
    from zrt.actors.main import run
    from zrt.runtime.process.lifeline import hold

    run(options, hold())


# ---- words ---------------------------------------------------------------------------------------


def block_server_words(command: argparse.ArgumentParser) -> None:
    """Add the words of `zrt actor block-server`."""
    _member_words(command, "default: block-server-PID", "what there is")
    command.add_argument(
        "--shared-threads",
        type=argument_types.positive,
        metavar="N",
        help="threads while other stages of this machine compute as well (default: as --threads)",
    )


def worker_words(command: argparse.ArgumentParser) -> None:
    """Add the words of `zrt worker`."""
    _member_words(command, "as in the cluster file (default: worker-HOST-PID)", "what there is, less a reserve")


def rank_words(command: argparse.ArgumentParser) -> None:
    """Add the words of `zrt actor tp-rank`."""
    command.add_argument(
        "--rank", type=argument_types.count, metavar="R", required=True, help="its place in the group, from 1 on"
    )
    command.add_argument(
        "--world", type=argument_types.positive, metavar="N", required=True, help="the ranks of the group"
    )
    _compute_words(command, "default: rankR-PID")


def coordinator_words(command: argparse.ArgumentParser) -> None:
    """Add the words of `zrt actor coordinator`, but for those of a cluster file."""
    command.add_argument(
        "--port-wait",
        type=argument_types.seconds,
        default=0.0,
        metavar="S",
        help="wait so long for a port that is taken",
    )
    _cluster_id_word(command)


def open_words(command: argparse.ArgumentParser) -> None:
    """Add the words of what others may reach from elsewhere."""
    command.add_argument(
        "--advertise", metavar="ENDPOINT", help="what others reach it by, where that is another name: tcp://HOST"
    )
    command.add_argument("--insecure", action="store_true", help="allow an interface other than loopback, without keys")


def _compute_words(command: argparse.ArgumentParser, name: str) -> None:
    """Add the words of every process that computes."""
    command.add_argument("--name", type=argument_types.name, help=name)
    command.add_argument("--device", type=argument_types.device, default="cpu", help="cpu, cuda:0, … (default: cpu)")
    command.add_argument(
        "--threads",
        type=argument_types.positive,
        metavar="N",
        help="CPU threads for products (default: one for each core)",
    )
    command.add_argument(
        "--listen", metavar="ENDPOINT", default="tcp://127.0.0.1:0", help="default: loopback, any port"
    )


def _member_words(command: argparse.ArgumentParser, name: str, memory: str) -> None:
    """Add the words of a process that joins a coordinator; `memory` is the default of that."""
    command.add_argument(
        "--join", metavar="ENDPOINT", required=True, help="the coordinator's, such as tcp://10.0.0.1:7411"
    )
    _compute_words(command, name)
    command.add_argument(
        "--memory",
        type=argument_types.size,
        default=0,
        metavar="SIZE",
        help=f"the most it may take, such as 8GiB (default: {memory})",
    )
    open_words(command)
    _cluster_id_word(command)


def _cluster_id_word(command: argparse.ArgumentParser) -> None:
    text = "of the cluster it belongs to: one that takes an earlier one's place has its id (default: a new one, or what it joins first)"
    command.add_argument("--cluster-id", metavar="ID", default="", help=text)
