"""The arguments by which commands name a cluster: a running cluster by its endpoint, a cluster to
be started by its file."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from zrt.runtime.cli import argument_types

if TYPE_CHECKING:
    from msgspec import Struct

    from zrt.actors.options import ClusterOptions

_Options = TypeVar("_Options", bound="Struct")


def add_connect_argument(parser: argparse.ArgumentParser) -> None:
    """Add the argument for the endpoint of a running cluster."""
    parser.add_argument(
        "--connect",
        type=argument_types.word,
        metavar="ENDPOINT",
        help="the cluster's endpoint (default: $ZRT_ENDPOINT, or the last one started here)",
    )


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for a cluster file, and for what replaces its values."""
    parser.add_argument(
        "conf", metavar="CONF", nargs="?", type=argument_types.path, help="a cluster file (default: conf/local.toml)"
    )
    parser.add_argument(
        "--model",
        type=argument_types.word,
        metavar="REF",
        help="a demo name, a folder, or a hub id; in place of the file's",
    )
    parser.add_argument(
        "--stages", type=argument_types.positive, metavar="N", help="N planned stages in place of the file's"
    )
    parser.add_argument(
        "--tp", type=argument_types.positive, metavar="N", help="N tensor-parallel ranks in every stage"
    )


def add_listen_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for where a cluster listens."""
    parser.add_argument(
        "--listen",
        type=argument_types.word,
        metavar="ENDPOINT",
        help="where clients reach the cluster, such as tcp://127.0.0.1:0; in place of the file's",
    )
    add_advertise_arguments(parser)


def add_advertise_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for how other machines reach a process."""
    parser.add_argument(
        "--advertise",
        type=argument_types.word,
        metavar="ENDPOINT",
        help="address at which others reach it, if not the one it listens on: tcp://HOST",
    )
    parser.add_argument("--insecure", action="store_true", help="allow an interface other than loopback, without keys")


def cluster_options(arguments: argparse.Namespace) -> "ClusterOptions":
    """Return which cluster file is meant, and what replaces its values."""
    from zrt.actors.options import ClusterOptions

    return options_from(arguments, ClusterOptions)


def options_from(arguments: argparse.Namespace, kind: "type[_Options]") -> "_Options":
    """Return the options of this kind that the command line gives: each from the argument of its
    name, where the command has one."""
    given = {name: value for name in kind.__struct_fields__ if (value := getattr(arguments, name, None)) is not None}
    return kind(**{name: str(value) if isinstance(value, Path) else value for name, value in given.items()})


def cluster_words(options: "ClusterOptions") -> list[str]:
    """Return the arguments that give the same options to another command."""
    words = [] if options.conf is None else [options.conf]
    for name in ("model", "stages", "tp", "listen", "advertise"):
        value = getattr(options, name)
        if value is not None:
            words += [f"--{name}", str(value)]
    return [*words, "--insecure"] if options.insecure else words
