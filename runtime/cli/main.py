"""`zrt …`: the command line. Answers go to stdout, progress and errors to stderr.

Exit status: 0 done, 1 the command failed (the error's kind is on stderr), 2 the command line or the
cluster file is wrong. What each command takes and does is in commands/.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from zrt.runtime.cli.commands import COMMANDS, load
from zrt.runtime.cli.exit_status import exit_status
from zrt.runtime.formatting import escaped
from zrt.runtime.process.python_command import environment
from zrt.runtime.process.stdout import StdoutError, tell_failures


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    try:
        os.environ.update(environment(os.environ))  # before a library reads it, or this folder is gone
        tell_failures()
        try:
            try:
                return _run(argv)
            finally:
                if sys.stdout is not None:
                    sys.stdout.flush()  # here a failure can be told; at the interpreter's exit it cannot
        except (BrokenPipeError, StdoutError) as error:
            from zrt.runtime.process.terminal import mute, say

            mute(sys.stdout)  # what its buffer holds is lost
            if isinstance(error, StdoutError):  # else the reader of our output went away
                say(f"zrt: {error}")
            return 1
    except KeyboardInterrupt:
        print("zrt: interrupted", file=sys.stderr)
        return 1


def _run(argv: Sequence[str] | None) -> int:
    arguments = command_line().parse_args(argv)
    from zrt.runtime.process.terminal import all_descriptors, open_streams

    open_streams()
    all_descriptors()
    return exit_status(arguments)


class _Parser(argparse.ArgumentParser):
    """Parser of one command's arguments, or of `zrt` itself. An argument that a command does not
    know is refused with the command's own usage, rather than handed back to `zrt`. Options cannot
    be abbreviated."""

    def __init__(self, *, command: str | None = None, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)
        self._command = command

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._load()
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def print_help(self, file: Any = None) -> None:
        print(self.format_help(), end="", file=file)  # argparse itself would pass over a failure to write

    def error(self, message: str) -> NoReturn:
        super().error(escaped(message))

    def _load(self) -> None:
        """Add the command's arguments, now that the command is to be run."""
        if self._command is not None:
            command, self._command = load(self._command), None
            self.description = command.DESCRIPTION
            self.set_defaults(run=command.run)
            command.add_arguments(self)


def command_line() -> argparse.ArgumentParser:
    """Return the parser of all commands; each command adds its arguments once it is to be run."""
    parser = _Parser(
        prog="zrt",
        description="One large language model over several processes, GPUs and machines.",
        epilog="`zrt COMMAND --help` tells more. Exit status: 0 done, 1 the command failed (the reason is on stderr), "
        "2 the command line or the cluster file is wrong.",
    )
    parser.add_argument("--version", action=_Version)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, about in COMMANDS.items():
        commands.add_parser(name, help=about, command=name)
    return parser


class _Version(argparse.Action):
    """Option --version; the version takes a while to read, so it is read only when asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="show the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from zrt.runtime.version import release

        print(f"zrt {release()}")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
