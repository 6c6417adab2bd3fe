"""A cluster started by `zrt up --detach`, which outlives the command and the terminal it was
started from."""

import fcntl
import json
import os
import select
import subprocess
import time
from pathlib import Path
from typing import BinaryIO, Final

from zrt.runtime.cli.log_lines import as_said
from zrt.runtime.client.client import DOWN_S
from zrt.runtime.errors import ZrtError
from zrt.runtime.process import runfiles
from zrt.runtime.process.lifeline import READY_FD
from zrt.runtime.process.python_command import FOLDER, environment, python_command
from zrt.runtime.process.terminal import say

READY_S: Final = 1800.0
"""Seconds that a cluster may take until it is ready: most of them go into reading weights."""
LOOK_MS: Final = 200
"""Milliseconds between two looks at the cluster's log until it is ready."""
MOST_LOGS: Final = 64
"""The most clusters of one name that may run at once: each has a log."""


def detach(name: str, words: list[str]) -> int:
    """Start `zrt up` in the background and return 0 when its cluster is ready, else its exit
    status.

    The output of that `zrt up` goes to a log file, and until the cluster is ready to our stderr
    too. ZrtError deadline; bad_config: the log cannot be written.
    """
    path, log_file = _log(name)
    with log_file, path.open("rb") as log:
        log.seek(0, os.SEEK_END)
        ours, theirs = os.pipe()
        with open(ours, "rb") as pipe:
            try:
                child = _start(words, log_file, theirs)
            finally:
                os.close(theirs)
            try:
                line = _first_line(pipe, log)
            except BaseException:
                _end(child)
                raise
    if not line:
        return child.wait(DOWN_S) or 1
    say(f"zrt: {name} runs on at {json.loads(line)['endpoint']}; its log is {path}")
    return 0


def _log(name: str) -> tuple[Path, BinaryIO]:
    """Open a log file that no other running cluster of this name uses: a log is locked for as long
    as any of its cluster's processes writes to it."""
    for number in range(1, MOST_LOGS + 1):
        path = runfiles.folder() / (f"{name}.log" if number == 1 else f"{name}-{number}.log")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            log_file = path.open("ab")
        except OSError as error:
            raise ZrtError("bad_config", f"the log {path} cannot be written: {error}; set ZRT_HOME elsewhere") from None
        try:
            fcntl.flock(log_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log_file.close()
            continue
        except OSError:
            pass  # a file system without locks: the clusters share a log
        return path, log_file
    raise ZrtError("overloaded", f"{MOST_LOGS} clusters called {name} run here already")


def _start(words: list[str], log_file: BinaryIO, ready_fd: int) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        python_command("zrt.runtime.cli.main", "up", *words, "--log"),
        cwd=FOLDER,
        stdin=subprocess.DEVNULL,
        stdout=log_file,
        stderr=log_file,
        start_new_session=True,
        pass_fds=(ready_fd,),
        env={**environment(os.environ), READY_FD: str(ready_fd)},
    )


def _first_line(pipe: BinaryIO, log: BinaryIO) -> bytes:
    """Return the first line from the pipe, or b"" if the pipe ends; meanwhile pass the log on.
    ZrtError deadline."""
    waiting = select.poll()
    waiting.register(pipe, select.POLLIN)
    give_up = time.monotonic() + READY_S
    while not waiting.poll(LOOK_MS):
        _pass_on(log)
        if time.monotonic() > give_up:
            raise ZrtError("deadline", f"the cluster was not ready within {READY_S:g} s and is ended")
    line = pipe.readline()
    _pass_on(log)
    return line


def _pass_on(log: BinaryIO) -> None:
    for line in log.read().decode(errors="replace").splitlines():
        say(as_said(line))


def _end(child: "subprocess.Popen[bytes]") -> None:
    child.terminate()
    try:
        child.wait(DOWN_S)
    except subprocess.TimeoutExpired:
        child.kill()
