"""What the end of a command is to the shell: 0 done, 1 it failed (the reason is on stderr), 2 the
command line or the cluster file is wrong.

Why `zrt up` fails after it has begun is decided in actors/node/process_losses.py (a process that is
not started again) and actors/node/departure.py (signals, `zrt down`).
"""

import argparse
import os
from pathlib import Path
from typing import Final

from zrt.runtime.errors import ZrtError
from zrt.runtime.formatting import escaped
from zrt.runtime.paths import home

USAGE_ERRORS: Final = frozenset({"bad_config"})
"""Kinds of errors that mean: change the command line or the cluster file."""


def exit_status(arguments: argparse.Namespace) -> int:
    """Run the command that was read, say why it failed if it does, and return its exit status."""
    from zrt.runtime.process.terminal import say

    try:
        home()  # what every command keeps, or looks for, lies there
        return int(arguments.run(arguments))
    except ZrtError as error:
        say(f"zrt: {_on_a_line(arguments, str(error))}")
        if getattr(arguments, "json", False):
            from zrt.runtime.cli.json_output import as_json

            print(as_json(error={"kind": error.kind, "message": error.message}), flush=True)
        return 2 if error.kind in USAGE_ERRORS else 1


def _on_a_line(arguments: argparse.Namespace, text: str) -> str:
    """Return a message in which nothing that the command line gave breaks a line. An error may have
    several lines, but a name or a path in it has one; a path may be a part of another there."""
    for given in vars(arguments).values():
        if isinstance(given, str | Path):
            for part in str(given).split(os.sep):
                if not part.isprintable():
                    text = text.replace(part, escaped(part))
    return text
