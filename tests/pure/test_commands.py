"""The commands of `zrt`: a file each, imported when it is asked for."""

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from io import StringIO
from pathlib import Path

import pytest

from zrt.runtime.cli import commands
from zrt.runtime.cli.commands import COMMANDS, IN_ANOTHER_FILE, load
from zrt.runtime.cli.main import command_line
from zrt.runtime.cli.question import add_question_arguments, describes_answer
from zrt.runtime.client.client import Client
from zrt.runtime.errors import ZrtError


def test_every_file_of_the_folder_is_a_command_and_every_command_a_file() -> None:
    files = {file.stem for file in Path(str(commands.__file__)).parent.glob("*.py")} - {"__init__"}
    assert set(COMMANDS) == files | set(IN_ANOTHER_FILE)
    assert {file for file, _ in IN_ANOTHER_FILE.values()} <= files


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_describes_itself_takes_words_and_runs(name: str) -> None:
    command, parser = load(name), argparse.ArgumentParser()
    command.add_arguments(parser)
    assert command.DESCRIPTION.endswith(".")
    assert callable(command.run)


def arguments_with_a_value(parser: argparse.ArgumentParser, *words: str) -> Iterator[list[str]]:
    """The words up to the value of each argument that takes one, of each command."""
    with suppress(SystemExit), redirect_stdout(StringIO()):
        parser.parse_known_args(["--help"])  # has the command add its arguments
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, kind in action.choices.items():
                yield from arguments_with_a_value(kind, *words, name)
        elif action.nargs != 0:
            yield [*words, *action.option_strings[:1]]


@pytest.mark.parametrize("words", list(arguments_with_a_value(command_line())), ids=" ".join)
def test_an_empty_value_is_refused_and_never_means_the_default(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        command_line().parse_args([*words, ""])
    assert left.value.code == 2
    assert re.search(r"zrt .*: error: argument .*(is empty|''|  is not)", capsys.readouterr().err)


def question_words() -> Iterator[list[str]]:
    """Each option of a question, with a value that it takes; prompts in place of `prompt` apart."""
    parser = argparse.ArgumentParser()
    add_question_arguments(parser)
    for action in parser._actions:
        *_, option = action.option_strings
        if option in ("--help", "--token-ids"):
            continue
        values = [[]] if action.nargs == 0 else [["1"], ["1:1"], ["a=1"]]
        for value in values:
            with suppress(SystemExit), redirect_stderr(StringIO()):
                parser.parse_args([option, *value])
                yield [option, *value]
                break
        else:
            raise AssertionError(f"no value for {option}")


@pytest.mark.parametrize("words", list(question_words()), ids=" ".join)
def test_no_option_of_an_answer_is_ignored_where_nothing_is_asked(words: list[str]) -> None:
    parser = command_line()
    assert describes_answer(parser.parse_args(["up", *words]))
    assert not describes_answer(parser.parse_args(["up"]))


@pytest.mark.parametrize(("given", "variable"), [("", None), (None, ""), ("", "tcp://127.0.0.1:1")])
def test_an_empty_endpoint_is_no_other_cluster(
    given: str | None, variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ZRT_ENDPOINT", raising=False)
    if variable is not None:
        monkeypatch.setenv("ZRT_ENDPOINT", variable)
    with pytest.raises(ZrtError, match="is empty") as raised:
        Client(given)
    assert raised.value.kind == "bad_config"


def imported(*words: str) -> set[str]:
    """The modules that `zrt WORDS` imports until its words are read."""
    program = (
        "import sys\nfrom zrt.runtime.cli.main import command_line\n"
        "try:\n    command_line().parse_args(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print('modules', *sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=60, check=True
    )
    return set(done.stdout.splitlines()[-1].split())


def test_help_waits_for_no_command() -> None:
    found = imported("--help")
    assert not {name for name in found if name.startswith("zrt.runtime.cli.commands.")}
    assert not {"asyncio", "zmq", "msgspec", "rich"} & found


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "actor"])
def test_a_command_waits_for_no_other_command_nor_for_torch(name: str) -> None:
    found = imported(name, "--help")
    of_commands = {one.removeprefix("zrt.runtime.cli.commands.") for one in found if "cli.commands." in one}
    file, _ = IN_ANOTHER_FILE.get(name, (name, ""))
    assert of_commands <= {name, "actor"} if name == "worker" else of_commands == {file}
    assert not {"torch", "transformers", "numba", "textual", "zrt.actors.node.node"} & found
