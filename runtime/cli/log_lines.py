"""Lines of a cluster's log: all that `zrt up` says where no person watches, in the form in which
its processes log."""

import json
import os
import sys
import time
from collections.abc import Callable
from io import TextIOWrapper
from typing import Literal

from msgspec.structs import replace

from zrt.runtime.cluster.file_schema import Conf, Log
from zrt.runtime.errors import KINDS
from zrt.runtime.process.logs import STAMP, VARIABLE, as_json, in_words, settings, stamp
from zrt.runtime.process.terminal import FULL, drop_held_back


def as_told(conf: Conf) -> Conf:
    """Return `conf` with the log settings of $ZRT_LOG, where the file has none. ZrtError
    bad_config."""
    told = os.environ.get(VARIABLE)
    if not told or conf.log != Log():
        return conf
    level, form = settings(told)
    return replace(conf, log=Log(level, "json" if form == "json" else "text"))  # type: ignore[arg-type]


class _LogStream(TextIOWrapper):
    """A stream of whole lines, each put into its form as it ends. A line that a full disk does not
    take is dropped; of a line that it took in part the rest is dropped, and the next line begins on
    a line of its own."""

    def __init__(self, stream: TextIOWrapper, form: Callable[[str], str]) -> None:
        super().__init__(stream.buffer, encoding="utf-8", errors="replace", line_buffering=True)
        self._form = form
        self._begun = ""
        self._torn = False

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            size = os.fstat(self.fileno()).st_size
            try:
                super().write("\n" * self._torn + f"{self._form(line)}\n")
                self._torn = False
            except OSError as error:
                if error.errno not in FULL:
                    raise
                drop_held_back(self)
                self._torn = self._torn or os.fstat(self.fileno()).st_size > size
        return len(text)


def write(form: Literal["text", "json"], *, detached: bool) -> None:
    """Turn each line on stderr into a line of a log from now on: with `detached`, and in the JSON
    form unless stderr is a terminal."""
    if isinstance(sys.stderr, TextIOWrapper) and (detached or (form == "json" and not sys.stderr.isatty())):
        sys.stderr = _LogStream(sys.stderr, as_object if form == "json" else dated)


def dated(line: str) -> str:
    """Return a line with the time first, unless it begins with the time, as lines of processes that
    log do."""
    return line if STAMP.match(line) else f"{stamp(time.time())} {line}"


def as_object(line: str) -> str:
    """Return a line as a JSON object. A process that logs writes an object already; `zrt: MESSAGE`
    is this command's own, an error if it begins with an error's kind; `NAME: MESSAGE` is other
    output of the process NAME."""
    if line.startswith("{"):
        return line
    actor, _, message = line.partition(": ")
    if " " in actor or not message:
        actor, message = "zrt", line
    level = "error" if message.partition(": ")[0] in KINDS else "info" if actor == "zrt" else "warning"
    return as_json(time.time(), level, "up" if actor == "zrt" else actor, __name__, message)


def as_said(line: str) -> str:
    """Return the text that a line of a log was made from."""
    try:
        said = json.loads(line)
        return f"{'zrt' if said['actor'] == 'up' else said['actor']}: {said['message']}{in_words(said)}"
    except (ValueError, TypeError, KeyError):
        return STAMP.sub("", line, count=1)
