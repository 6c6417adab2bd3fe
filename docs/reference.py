"""Writes the generated parts of the reference pages: every key of a cluster file into
cluster-file.md, every command and option into command-line.md.

Both come from where they are defined: the docstrings of runtime/cluster/file_schema.py, and the
parser of runtime/cli/main.py. Run `.venv/bin/python docs/reference.py` after a change to either;
tests/pure/test_docs.py fails until the pages say the same.
"""

import argparse
import ast
import inspect
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin

import msgspec
import msgspec.inspect

from zrt.runtime.cli import main as cli
from zrt.runtime.cluster import file_schema

DOCS: Final = Path(__file__).parent
BEGIN: Final = "<!-- begin: written by docs/reference.py -->"
END: Final = "<!-- end -->"

TABLES: Final[dict[str, type[msgspec.Struct]]] = {
    "[cluster]": file_schema.ClusterSettings,
    "[model]": file_schema.Model,
    "[[stage]]": file_schema.Stage,
    "[[stage.lend]]": file_schema.LendSettings,
    "[[worker]]": file_schema.Worker,
    "[spares]": file_schema.Spares,
    "[kv]": file_schema.Kv,
    "[limits]": file_schema.Limits,
    "[metrics]": file_schema.Metrics,
    "[log]": file_schema.Log,
}
"""Each table of a cluster file as it is headed there, in the order of the page."""
WRITTEN: Final = {
    "blocks": 'first and last block: `"0-14"`',
    "device": '`"cpu"`, `"cuda:0"`, `"cuda:1"` …',
    "listen": "`tcp://HOST:PORT`",
    "advertise": "`tcp://HOST` or `tcp://HOST:PORT`",
    "bytes": 'bytes, or a text such as `"1GiB"`',
    "memory": 'bytes, or a text such as `"8GiB"`',
    "lend": "tables",
}
"""What values of keys look like that are more than their type says."""


def main() -> None:
    for page, text in pages().items():
        (DOCS / page).write_text(text, encoding="utf-8")


def pages() -> dict[str, str]:
    """Return the reference pages by file name, as they should read."""
    parts = {"cluster-file.md": cluster_file(), "command-line.md": command_line()}
    return {page: _with_part((DOCS / page).read_text(encoding="utf-8"), part) for page, part in parts.items()}


def _with_part(page: str, part: str) -> str:
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"a reference page lacks {BEGIN} or {END}")
    return f"{head}{BEGIN}\n\n{part}\n{END}{tail}"


# ---- the cluster file ----------------------------------------------------------------------------


def cluster_file() -> str:
    """Return a section for each table of a cluster file, with a row for each key."""
    return "\n".join(_table(heading, kind) for heading, kind in TABLES.items())


def _table(heading: str, kind: type[msgspec.Struct]) -> str:
    about = " ".join((inspect.getdoc(kind) or "").split())
    said = field_docs(kind)
    rows = [
        f"| `{field.name}` | {_values(field)} | {_default(field)} | {_cell(said[field.name])} |"
        for field in msgspec.structs.fields(kind)
    ]
    head = "| key | values | default | what it is |\n| --- | --- | --- | --- |"
    return f"### `{heading}`\n\n{about}\n\n{head}\n" + "\n".join(rows) + "\n"


def field_docs(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Return the docstring below each field of a Struct, on one line. KeyError, when asked for a
    field that has none."""
    (declared,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(declared, ast.ClassDef)
    found = {}
    for field, below in zip(declared.body, declared.body[1:], strict=False):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split())
    return found


def _values(field: msgspec.structs.FieldInfo) -> str:
    if field.name in WRITTEN:
        return WRITTEN[field.name]
    if get_origin(field.type) is Literal:
        return ", ".join(f'`"{value}"`' for value in get_args(field.type))
    return _of_type(msgspec.inspect.type_info(field.type))


def _of_type(kind: msgspec.inspect.Type) -> str:
    match kind:
        case msgspec.inspect.UnionType(types):
            return " or ".join(_of_type(each) for each in types if not isinstance(each, msgspec.inspect.NoneType))
        case msgspec.inspect.IntType() | msgspec.inspect.FloatType():
            number = "a whole number" if isinstance(kind, msgspec.inspect.IntType) else "a number"
            limits = {"above": kind.gt, "at least": kind.ge, "below": kind.lt, "at most": kind.le}
            said = [f"{word} {limit:g}" for word, limit in limits.items() if limit is not None]
            return ", ".join([number, *said])
        case msgspec.inspect.BoolType():
            return "`true`, `false`"
        case msgspec.inspect.StrType(pattern=str()):
            return "letters, digits, `_`, `.`, `-`"
        case _:
            return "a text"


def _default(field: msgspec.structs.FieldInfo) -> str:
    value = field.default
    if field.required:
        return "required"
    if value is None or value in ("", ()):
        return "—"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if field.name == "bytes":
        return f'`"{value >> 30}GiB"`'
    return f'`"{value}"`' if isinstance(value, str) else f"`{value:g}`"


# ---- the command line ----------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    return cli.command_line()


def command_line() -> str:
    """Return a section for each command, with a row for each argument and option."""
    return "\n".join(_command(name, about, command) for name, about, command in _commands("zrt", parser()))


def _commands(path: str, above: argparse.ArgumentParser) -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """Yield each command below `above` that has none below itself: name, summary, parser."""
    with suppress(SystemExit), redirect_stdout(StringIO()):
        above.parse_args(["--help"])  # a parser may take its words only when it is asked
    for action in above._actions:
        if not isinstance(action, argparse._SubParsersAction):
            continue
        about = {choice.dest: choice.help or "" for choice in action._choices_actions}
        for name, command in action.choices.items():
            below = list(_commands(f"{path} {name}", command))
            yield from below or [(f"{path} {name}", about.get(name, ""), command)]


def _command(name: str, about: str, command: argparse.ArgumentParser) -> str:
    shown = [action for action in command._actions if action.help != argparse.SUPPRESS and action.dest != "help"]
    words = "".join(f" {_positional(action)}" for action in shown if not action.option_strings)
    text = " ".join((command.description or about).split())
    rows = [f"| {_option(action)} | {_cell((action.help or '') % _known(command, action))} |" for action in shown]
    table = "| argument or option | what it is |\n| --- | --- |\n" + "\n".join(rows) + "\n" if rows else ""
    return f"### `{name}`\n\n`{name}{words}`\n\n{_cell(text)}\n\n{table}"


def _positional(action: argparse.Action) -> str:
    word = str(action.metavar or action.dest)
    return f"[{word}]" if action.nargs in ("?", "*") else word


def _option(action: argparse.Action) -> str:
    if not action.option_strings:
        return f"`{_positional(action)}`"
    choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else ""
    value = "" if action.nargs == 0 else f" {action.metavar or choices or action.dest.upper()}"
    required = " (required)" if action.required else ""
    return ", ".join(f"`{word}{value}`" for word in action.option_strings) + required


def _known(command: argparse.ArgumentParser, action: argparse.Action) -> dict[str, Any]:
    """Return what argparse fills into a help text."""
    return {**vars(action), "prog": command.prog}


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    main()
