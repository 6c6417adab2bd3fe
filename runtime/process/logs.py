"""What processes log on stderr: lines for people, or one JSON object a line. `$ZRT_LOG` sets the
level and the format.

A record's `session`, `step`, `ms` and `where` (an actor, a session, a client), given as `extra`,
are fields of their own; `actor` is the process's own name. Sessions are logged in hexadecimal, as
people see them elsewhere. At `info` a session's beginning and end are logged, and what happens to
processes and routes; at `debug` each turn and token.
"""

import json
import logging
import os
import re
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from zrt.runtime.errors import ZrtError
from zrt.runtime.formatting import escaped

VARIABLE: Final = "ZRT_LOG"
"""The environment variable that holds LEVEL or LEVEL:FORMAT, such as info:json. In the format
`dated` each line has the date and the actor's name, as in a log of several processes."""
LEVELS: Final = ("debug", "info", "warning", "error")
FORMATS: Final = ("text", "json", "dated")
FIELDS: Final = ("where", "session", "step", "ms")
MOST: Final = 700
"""The most characters of a message, and of a traceback's end, in a JSON line: a parent that passes
lines on cuts long ones."""
STAMP: Final = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} ")
"""The beginning of a dated line."""


def stamp(at: float) -> str:
    """Return Unix time `at` (seconds) as local time, in the form that begins a dated line."""
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(at))}.{int(at % 1 * 1000):03d}"


def settings(text: str) -> tuple[str, str]:
    """Return the level and the format that a value of $ZRT_LOG names. ZrtError bad_config."""
    level, _, form = text.partition(":")
    level, form = level or "warning", form or "text"
    if level not in LEVELS or form not in FORMATS:
        valid = f"{'|'.join(LEVELS)}, or {'|'.join(LEVELS)}:{'|'.join(FORMATS)}"
        raise ZrtError("bad_config", f"${VARIABLE} is {text!r}; valid: {valid}")
    return level, form


class Words(logging.Handler):
    """A handler that writes lines to stderr. What a full pipe does not take is dropped: a parent
    that hangs must not hold its children up."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(BlockingIOError, ValueError):  # ValueError: stderr is closed
            os.write(sys.stderr.fileno(), f"{self.format(record)}\n".encode(errors="replace"))


class Text(logging.Formatter):
    """A formatter of lines for people: time, level, actor, message, and the fields that are there.
    A record is one line, and a traceback the lines after it. A line that is not `dated` lacks the
    date, and the actor, which the parent that passes the line on adds."""

    def __init__(self, *, dated: bool = True) -> None:
        super().__init__()
        self.actor = ""
        self._dated = dated

    def format(self, record: logging.LogRecord) -> str:
        found = in_words(_fields(record))
        at, level = stamp(record.created), record.levelname.lower()
        if self._dated:
            level = f"{level} {self.actor or record.name}"
        else:
            at = at.partition(" ")[2]
        line = escaped(f"{at} {level}: {self._message(record)}{found}")
        if not record.exc_info:
            return line
        return f"{line}\n{escaped(self.formatException(record.exc_info), breaks=True)}"

    def _message(self, record: logging.LogRecord) -> str:
        """Return the message without the actor's name, which is stated beside it."""
        return record.getMessage().removeprefix(f"{self.actor}: ")


class Json(Text):
    """A formatter of lines for programs: an object with `at` (Unix seconds), `level`, `actor`,
    `module`, `message`, and the fields that are there."""

    def format(self, record: logging.LogRecord) -> str:
        said = _fields(record)
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)[-MOST:]
        return as_json(record.created, record.levelname.lower(), self.actor, record.name, self._message(record), **said)


def as_json(at: float, level: str, actor: str, module: str, message: str, **said: object) -> str:
    """Return a log line for programs, a JSON object."""
    fields = {"at": round(at, 3), "level": level, "actor": actor, "module": module, "message": message[:MOST]}
    return json.dumps(fields | said)


def in_words(said: Mapping[str, object]) -> str:
    """Return the fields of a record in the form that ends a line for people."""
    return "".join(f" {name}={said[name]}" for name in FIELDS if name in said)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    found = {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}
    if isinstance(session := found.get("session"), int):
        found["session"] = f"{session:016x}"
    return found


def log_to_stderr(*, alone: bool) -> Text:
    """Log to stderr from now on, as $ZRT_LOG says. Return the lines' formatter, whose `actor` is to
    be set once the name is known. ZrtError bad_config.

    A process that is `alone`, with no parent that reports its progress, logs from `info` on by
    default; any other from `warning` on.
    """
    level, form = settings(os.environ.get(VARIABLE, "") or ("info" if alone else "warning"))
    words = Words()
    lines = Json() if form == "json" else Text(dated=alone or form == "dated")
    words.setFormatter(lines)
    logging.basicConfig(level=logging.WARNING, handlers=[words], force=True)
    logging.getLogger("zrt").setLevel(level.upper())
    return lines
