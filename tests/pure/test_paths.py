"""Paths as people write them: a home directory that is not there is an error in plain words,
whatever names it."""

import ast
import json
import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from zrt.actors.options import ClusterOptions
from zrt.runtime import paths
from zrt.runtime.cli.commands import COMMANDS
from zrt.runtime.errors import ZrtError
from zrt.runtime.models.fetch.resolve import resolve

ROOT = Path(__file__).parents[2]
NOBODY = "~nosuchuser"
PROGRAM = """
import contextlib, io, json, os, pwd, sys

def no_such_user(*_):
    raise KeyError("no such user")

pwd.getpwuid = no_such_user
from zrt.runtime.cli.main import main
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(io.StringIO()):
        status = main(words)
    print(json.dumps([status, said.getvalue()]))
"""
WORDS = {
    "up": ["up"],
    "generate": ["generate", "hi"],
    "chat": ["chat"],
    "status": ["status"],
    "top": ["top"],
    "cancel": ["cancel", "0" * 16],
    "plan": ["plan"],
    "check": ["check", "owner/name"],
    "fetch": ["fetch", "smollm2-135m"],
    "drain": ["drain", "stage0"],
    "undrain": ["undrain", "stage0"],
    "down": ["down"],
    "worker": ["worker", "--join", "tcp://127.0.0.1:1"],
    "actor": ["actor", "coordinator"],
}


@pytest.mark.parametrize("home", [None, f"{NOBODY}/zrt"])
def test_without_a_home_every_command_says_what_to_set(home: str | None) -> None:
    assert set(WORDS) == set(COMMANDS)
    clean = {name: value for name, value in os.environ.items() if name not in ("HOME", "ZRT_HOME")}
    words = json.dumps(list(WORDS.values()))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, words],
        env=clean if home is None else clean | {"ZRT_HOME": home},
        capture_output=True,
        text=True,
        timeout=100,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(WORDS), done.stderr
    why = (
        "there is no home directory"
        if home is None
        else "ZRT_HOME is ~nosuchuser/zrt, but no user is called nosuchuser"
    )
    for status, said in answers:
        assert status == 2
        assert said.startswith(f"zrt: bad_config: {why}")
        assert said.endswith(": set ZRT_HOME to a folder for zrt's files\n")


def test_a_model_of_nobody_is_an_error_that_names_the_remedy(tmp_path: Path) -> None:
    conf = tmp_path / "my.toml"
    conf.write_text(f'[model]\nref = "{NOBODY}/model"\n[[stage]]\n')
    options = ClusterOptions(conf=str(conf))
    for look in (lambda: resolve(f"{NOBODY}/model"), lambda: options.elsewhere(options.read())):
        with pytest.raises(ZrtError, match=rf"{NOBODY}/model, but no user is called nosuchuser; write the whole path"):
            look()


def test_a_home_is_that_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert paths.expanded("~/x") == Path("/home/somebody/x")
    assert str(paths.expanded("./~/x")) == "~/x"  # a folder of that name
    monkeypatch.delenv("HOME")
    assert paths.expanded("~/x") == Path(pwd.getpwuid(os.getuid()).pw_dir) / "x"


def test_a_home_directory_is_looked_for_in_one_place() -> None:
    found = set()
    for path in (path for room in ("runtime", "actors", "tui") for path in sorted((ROOT / room).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("expanduser", "expandvars"):
                found.add(str(path.relative_to(ROOT)))
            if isinstance(node, ast.Attribute) and node.attr == "home" and ast.unparse(node.value).endswith("Path"):
                found.add(str(path.relative_to(ROOT)))
    assert found == {"runtime/paths.py"}
