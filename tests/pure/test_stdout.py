"""Output that standard output does not take: a full disk is named, a closed pipe is not."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from support.clusters import cluster_file

from zrt.runtime.cli.commands import COMMANDS
from zrt.runtime.cli.main import main

FULL = f"zrt: standard output cannot be written: {os.strerror(errno.ENOSPC)}; what was printed is not complete\n"
HELP = [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)]
OUTPUT = [["plan", "CONF"], ["plan", "CONF", "--json"], ["check", "MODEL"], ["check", "MODEL", "--json"]]
FETCH = [["fetch", "MODEL"]]


@pytest.fixture(scope="module")
def places(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    model, conf = make_model("llama"), tmp_path_factory.mktemp("conf") / "cluster.toml"
    conf.write_text(cluster_file(model, [None]))
    return {"MODEL": str(model), "CONF": str(conf)}


def status(words: list[str]) -> int:
    with mock.patch.dict(os.environ):
        try:
            return main(words)
        except SystemExit as left:
            assert isinstance(left.code, int)
            return left.code


@pytest.mark.parametrize("buffering", [-1, 1], ids=["buffered", "lines"])
@pytest.mark.parametrize("words", HELP + OUTPUT + FETCH, ids=" ".join)
def test_a_full_standard_output_is_named_by_every_command(
    words: list[str],
    buffering: int,
    places: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with open("/dev/full", "w", buffering=buffering) as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert status([places.get(word, word) for word in words]) == 1
    assert capsys.readouterr().err == FULL


@pytest.mark.parametrize("words", HELP[:2] + OUTPUT + FETCH, ids=" ".join)
def test_a_closed_pipe_is_quiet(
    words: list[str], places: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert status([places.get(word, word) for word in words]) == 1
    assert capsys.readouterr().err == ""


def test_an_error_is_told_before_the_output_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZRT_HOME", str(tmp_path))
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert status(["status", "--json"]) == 1
    first, *rest = capsys.readouterr().err.splitlines(keepends=True)
    assert first.startswith("zrt: coordinator_lost: ")
    assert rest == [FULL]


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_standard_output_does_not_end_the_interpreter_in_its_own_way(unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "zrt.runtime.cli.main", "--help"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    assert (done.returncode, done.stderr) == (1, FULL)
