"""The commands of `zrt`, a file each. A new one is its file and its line in COMMANDS.

In the order of `zrt --help`:

- up.py: bring a cluster up and stay with it
- generate.py: stream one answer
- chat.py: talk, turn by turn
- status.py: show the cluster's processes and sessions
- top.py: watch the cluster in the terminal, and act on it
- cancel.py: end a session
- plan.py: show which stage gets which blocks, and what memory they take
- check.py: say what a model is, and all that keeps it from being run
- fetch.py: download a model into the cache, and print its folder
- drain.py: take a block server out of service with nothing lost; `zrt undrain` too
- down.py: bring the cluster down, and return when it is gone
- worker.py: lend this machine's memory to a cluster
- actor.py: start one process by hand

May import: as the room above.
"""

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
"""The line of `zrt --help` for each command, by the command's name, which is also its file's name,
except for IN_ANOTHER_FILE."""
IN_ANOTHER_FILE: Final = {"undrain": ("drain", "UndrainCommand")}
"""Commands that are in another command's file: that file, and the command's class there."""


class Command(Protocol):
    """A command's file. It is imported when its command is run, so that `zrt --help` and other
    commands do not wait for it."""

    DESCRIPTION: str
    """Text of `zrt COMMAND --help`."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the command with these arguments, and return the exit status. ZrtError: the reason
        why it failed."""


def load(name: str) -> Command:
    """Import a command's file, and return the command."""
    if name in IN_ANOTHER_FILE:
        file, command = IN_ANOTHER_FILE[name]
        return cast(Command, getattr(import_module(f"{__name__}.{file}"), command)())
    return cast(Command, import_module(f"{__name__}.{name}"))
