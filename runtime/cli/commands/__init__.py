"""The commands of `zrt`, a file each. A new one is its file and its line in COMMANDS."""

import argparse
from importlib import import_module
from typing import Final, Protocol, cast

COMMANDS: Final = {
    "up": "bring a cluster up and stay with it",
    "generate": "stream one answer",
    "chat": "talk, turn by turn",
    "status": "show the cluster's processes and sessions",
    "top": "watch the cluster in the terminal, and act on it",
    "cancel": "end a session",
    "plan": "show which stage gets which blocks, and what memory they take",
    "check": "say what a model is, and all that keeps it from being run",
    "fetch": "download a model into the cache, and print its folder",
    "drain": "take a block server out of service with nothing lost",
    "undrain": "let a drained block server serve again",
    "down": "bring the cluster down, and return when it is gone",
    "worker": "lend this machine's memory to a cluster",
    "actor": "start one process by hand",
}
"""What `zrt --help` says of each command, by the name of the command and of its file."""


class Command(Protocol):
    """A command's file. It is imported when its command is asked for, and `zrt --help` or another
    command waits for nothing of it."""

    DESCRIPTION: str
    """What `zrt COMMAND --help` says of it."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the words of the command."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Do what the words say: the exit status. ZrtError: the reason why it failed."""


def load(name: str) -> Command:
    """Import a command's file."""
    return cast(Command, import_module(f"{__name__}.{name}"))
