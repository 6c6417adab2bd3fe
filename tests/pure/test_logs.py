"""What a process logs: from which level on, for people and for programs."""

import json
import logging
import re
import sys
from pathlib import Path

import pytest

from zrt.runtime.cli import log_lines
from zrt.runtime.cluster.file_loader import parse
from zrt.runtime.cluster.file_schema import Log
from zrt.runtime.errors import ZrtError
from zrt.runtime.process import logs

ERROR = ValueError("x" * 5000)


def record(text: str = "a turn", error: Exception | None = None, **fields: object) -> logging.LogRecord:
    trace = (type(error), error, None) if error else None
    made = logging.LogRecord("zrt.actors.block_server.turn_loop", logging.INFO, "", 0, text, (), trace)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("text", "level", "form"),
    [
        ("", "warning", "text"),
        ("info", "info", "text"),
        ("debug:json", "debug", "json"),
        (":json", "warning", "json"),
        ("info:dated", "info", "dated"),
    ],
)
def test_the_variable_names_level_and_format(text: str, level: str, form: str) -> None:
    assert logs.settings(text) == (level, form)


@pytest.mark.parametrize("text", ["loud", "info:xml", "info:json:x"])
def test_a_wrong_variable_is_named_with_what_is_valid(text: str) -> None:
    with pytest.raises(ZrtError, match="debug") as raised:
        logs.settings(text)
    assert raised.value.kind == "bad_config"


def test_a_program_reads_an_object_a_line() -> None:
    lines = logs.Json()
    lines.actor = "stage0"
    line = lines.format(record("a\nturn", session=255, step=7, ms=1.5))
    assert "\n" not in line
    said = json.loads(line)
    assert (said["actor"], said["level"], said["message"]) == ("stage0", "info", "a\nturn")
    assert (said["session"], said["step"], said["ms"]) == ("00000000000000ff", 7, 1.5)


def test_an_object_is_short_enough_to_be_passed_on_whole() -> None:
    line = logs.Json().format(record("y" * 5000, ERROR))
    assert len(line) < 2000
    assert json.loads(line)["exception"].endswith("x")


def test_a_person_reads_a_line() -> None:
    lines = logs.Text()
    lines.actor = "stage0"
    line = lines.format(record(session=255, step=7))
    assert re.fullmatch(r"\d{4}-\d\d-\d\d [0-9:.]{12} info stage0: a turn session=00000000000000ff step=7", line)


def test_nobody_is_named_twice() -> None:
    alone, passed_on = logs.Text(), logs.Text(dated=False)
    alone.actor = passed_on.actor = "stage0"
    assert alone.format(record("stage0: is ready")).endswith(" info stage0: is ready")
    assert re.fullmatch("[0-9:.]{12} info: is ready", passed_on.format(record("stage0: is ready")))


OBJECT = json.dumps({"at": 1.0, "level": "info", "actor": "stage0", "module": "m", "message": "is ready"})
LINES = [
    ("zrt: local is ready at tcp://127.0.0.1:1", "up", "info", "local is ready at tcp://127.0.0.1:1"),
    ("zrt: stage_lost: stage 0 is lost", "up", "error", "stage_lost: stage 0 is lost"),
    ("stage0 (blocks 0-29): done, 3 MB at 9 MB/s", "up", "info", "stage0 (blocks 0-29): done, 3 MB at 9 MB/s"),
    ("stage0: Traceback (most recent call last):", "stage0", "warning", "Traceback (most recent call last):"),
    ("", "up", "info", ""),
    (OBJECT, "stage0", "info", "is ready"),
]


@pytest.mark.parametrize(("line", "actor", "level", "message"), LINES)
def test_all_that_a_log_for_programs_has_is_objects(line: str, actor: str, level: str, message: str) -> None:
    said = json.loads(log_lines.as_object(line))
    assert (said["actor"], said["level"], said["message"]) == (actor, level, message)
    assert set(said) == {"at", "level", "actor", "module", "message"}


def test_each_line_of_a_log_for_people_has_the_time_once() -> None:
    lines = logs.Text()
    lines.actor = "stage0"
    logged = lines.format(record())
    assert log_lines.dated(logged) == logged
    assert logs.STAMP.match(log_lines.dated("zrt: local is ready"))


@pytest.mark.parametrize("line", ["zrt: local is ready", "stage0: Traceback", "{ no object", "[1]", ""])
def test_what_was_said_is_found_in_its_line(line: str) -> None:
    assert log_lines.as_said(log_lines.dated(line)) == line


def test_what_was_said_is_found_in_an_object() -> None:
    for line, *_ in LINES[:2] + LINES[3:4]:
        assert log_lines.as_said(log_lines.as_object(line)) == line
    assert log_lines.as_said(OBJECT) == "stage0: is ready"
    told = logs.as_json(1.0, "info", "coordinator", "journal", "state: is ready", where="stage0")
    assert log_lines.as_said(told) == "coordinator: state: is ready where=stage0"


@pytest.mark.parametrize("form", ["text", "json"])
def test_what_is_written_in_pieces_is_a_line(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log"
    with path.open("w") as file:
        monkeypatch.setattr(sys, "stderr", file)
        log_lines.write(form, detached=True)  # type: ignore[arg-type]
        print("zrt:", "one", 1, file=sys.stderr)
        print("zrt: two\nthree", file=sys.stderr, flush=True)
        sys.stderr.flush()
        said = [log_lines.as_said(line) for line in path.read_text().splitlines()]
    assert said == ["zrt: one 1", "zrt: two", "three" if form == "text" else "zrt: three"]


def test_the_variable_holds_where_the_file_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet, loud = (parse(f'[model]\nref = "x"\n[[stage]]\n{log}', "test") for log in ("", '[log]\nlevel = "debug"'))
    monkeypatch.setenv("ZRT_LOG", "info:json")
    assert log_lines.as_told(quiet).log == Log("info", "json")
    assert log_lines.as_told(loud).log == Log("debug", "text")
    monkeypatch.delenv("ZRT_LOG")
    assert log_lines.as_told(quiet) == quiet
