"""Counted nouns, and text from elsewhere as it is shown."""

import argparse
import io
import logging
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from unittest import mock

import pytest

from zrt.runtime.cli import main, preflight
from zrt.runtime.cli.exit_status import exit_status
from zrt.runtime.cli.notice import Notice
from zrt.runtime.errors import ZrtError
from zrt.runtime.formatting import counted, escaped
from zrt.runtime.messages.client import Progress
from zrt.runtime.models.checkpoint.report import inspect
from zrt.runtime.process.load_bars import Bars
from zrt.runtime.process.logs import Text
from zrt.runtime.process.terminal import say

NAMES = ["two\nlines", "\r\x1b[2Kerased", "\x1b]0;title\x07", "\u202egnp", "\x85\u2028\u2029", "\x00", "\udcff"]
CONTROLS = set("\r\x1b\x07\u202e\x85\u2028\u2029\x00\udcff")


def test_one_is_singular_and_all_else_plural() -> None:
    assert [counted(number, "session") for number in (0, 1, 2)] == ["0 sessions", "1 session", "2 sessions"]


@pytest.mark.parametrize(
    ("text", "line", "running"),
    [
        ("plain", "plain", "plain"),
        ("a\nb\tc", r"a\nb\tc", "a\nb    c"),
        ("\x1b[31m\x9b\r", r"\x1b[31m\x9b\r", r"\x1b[31m\x9b\r"),
        ("\u202e\u2028\udcff", r"\u202e\u2028\udcff", r"\u202e\u2028\udcff"),
        ("\u6bb5\u3000\xa0e\u0301", "\u6bb5\u3000\xa0e\u0301", "\u6bb5\u3000\xa0e\u0301"),
        ("\u0646\u200c\u0647", "\u0646\\u200c\u0647", "\u0646\u200c\u0647"),
    ],
)
def test_what_controls_something_is_written_as_an_escape(text: str, line: str, running: str) -> None:
    assert (escaped(text), escaped(text, breaks=True)) == (line, running)


def check_lines(name: str) -> None:
    preflight._print_lines(preflight._described(inspect(Path("/models") / name.replace("\x00", "") / "none")))


def one_log_line(name: str) -> None:
    sys.stderr.write(Text().format(logging.makeLogRecord({"msg": "%s is there", "args": (name,)})))


def traced_log_line(name: str) -> None:
    made = logging.makeLogRecord({"msg": "%s is lost", "args": (name,), "exc_info": (OSError, OSError(name), None)})
    sys.stderr.write(Text().format(made))


def command_error(name: str) -> None:
    given = f"/none/{name}.toml"
    arguments = argparse.Namespace(conf=Path(given), run=mock.Mock(side_effect=ZrtError("bad_config", f"no {given}")))
    assert exit_status(arguments) == 2


def error_at_a_place(name: str) -> None:
    sys.stderr.write(str(ZrtError("bad_config", "there is no such cluster file", name)))


def warning(name: str) -> None:
    with Bars() as bars:
        bars.warn(name)


def progress(name: str) -> None:
    notice = Notice()
    notice._on_terminal = True
    notice.progress(Progress(id=1, phase="waiting", message=name))


def bars(name: str) -> None:
    with Bars() as bars:
        bars.update(0, 1, name)
        bars.say(name)


def usage(name: str) -> None:
    with pytest.raises(SystemExit):
        main.command_line().parse_args(["status", name])


SHOWN: dict[str, Callable[[str], object]] = {
    "say": lambda name: say(f"zrt: {name}"),
    "zrt check": check_lines,
    "a log": one_log_line,
    "a traceback in a log": traced_log_line,
    "the error of a command": command_error,
    "the place of an error": error_at_a_place,
    "a warning above progress bars": warning,
    "what an answer waits for": progress,
    "progress bars": bars,
    "a wrong command line": usage,
}


@pytest.mark.parametrize("where", SHOWN)
@pytest.mark.parametrize("name", NAMES)
def test_a_name_does_not_steer_the_terminal(name: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    SHOWN[where](name)
    text = (out.getvalue() + err.getvalue()).replace("\r\x1b[K", "")
    assert text
    assert not CONTROLS & set(text)
    if where not in ("say", "a traceback in a log", "progress bars"):  # these may have several lines to say
        assert "two\nlines" not in text


def test_the_lines_of_an_error_stay_where_a_value_has_two_lines() -> None:
    err = io.StringIO()
    arguments = argparse.Namespace(
        name="a\nb", run=mock.Mock(side_effect=ZrtError("bad_config", "a\nb is wrong\nand so is c", "d\ne.toml"))
    )
    with redirect_stderr(err):
        assert exit_status(arguments) == 2
    assert err.getvalue() == "zrt: bad_config: d\\ne.toml:\na\\nb is wrong\nand so is c\n"
