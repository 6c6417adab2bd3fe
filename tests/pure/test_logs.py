"""What a process logs: from which level on, for people and for programs."""

import json
import logging
import re

import pytest

from zrt.runtime import logs
from zrt.runtime.errors import ZrtError

ERROR = ValueError("x" * 5000)


def record(text: str = "a turn", error: Exception | None = None, **fields: object) -> logging.LogRecord:
    trace = (type(error), error, None) if error else None
    made = logging.LogRecord("zrt.actors.turn_loop", logging.INFO, "", 0, text, (), trace)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("text", "level", "form"),
    [("", "warning", "text"), ("info", "info", "text"), ("debug:json", "debug", "json"), (":json", "warning", "json")],
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
    alone, passed_on = logs.Text(), logs.Text(alone=False)
    alone.actor = passed_on.actor = "stage0"
    assert alone.format(record("stage0: is ready")).endswith(" info stage0: is ready")
    assert re.fullmatch("[0-9:.]{12} info: is ready", passed_on.format(record("stage0: is ready")))
