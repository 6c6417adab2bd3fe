"""What is written to a reader that pauses, is gone, or is a disk that is full."""

import errno
import io
import os
import pty
import resource
import signal
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from zrt.runtime.cli import log_lines
from zrt.runtime.process import stderr
from zrt.runtime.process.load_bars import Bars
from zrt.runtime.process.stderr import NonBlockingStderr
from zrt.runtime.process.terminal import say

PATIENCE_S = 10.0


def pipe() -> tuple[int, int]:
    return os.pipe()


def terminal() -> tuple[int, int]:
    """Its reader, then its writer."""
    reader, writer = pty.openpty()
    tty.setraw(writer)
    return reader, writer


@pytest.fixture(params=[pipe, terminal])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    reader, writer = request.param()
    yield reader, writer
    for fd in (reader, writer):
        os.close(fd)


def in_time(work: Callable[[], None]) -> None:
    """In a thread: what waits for a reader waits for ever."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def taken(reader: int) -> bytes:
    """All that is there now."""
    os.set_blocking(reader, False)
    said = b""
    try:
        while part := os.read(reader, 65536):
            said += part
    except BlockingIOError:
        pass
    return said


@pytest.mark.parametrize("size", [50, 500, 5000], ids="{} bytes a line".format)
def test_a_reader_that_pauses_gets_whole_lines_and_is_not_waited_for(ends: tuple[int, int], size: int) -> None:
    reader, writer = ends
    lines = [f"{n:05}".ljust(size - 1, ".").encode() + b"\n" for n in range(200_000 // size)]
    said = b""

    def write() -> None:
        nonlocal said
        stream = NonBlockingStderr(writer)
        for line in lines:
            assert stream.write(line) == len(line)
        while part := taken(reader):
            said += part
            stream.flush()
        stream.write(b"read again\n")

    in_time(write)
    *early, last = (said + taken(reader)).splitlines(keepends=True)
    assert last == b"read again\n"
    assert 0 < len(early) < len(lines)
    assert early == sorted(set(early) & set(lines))
    assert os.get_blocking(writer)


def test_bars_on_a_terminal_that_is_held_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = terminal()
    with io.TextIOWrapper(open(writer, "wb", buffering=0)) as screen:
        monkeypatch.setattr(sys, "stderr", screen)
        monkeypatch.setenv("TERM", "xterm")
        stderr.wait_for_no_reader()
        ours = sys.stderr
        assert ours is not screen

        def load() -> None:
            with Bars() as bars:
                bars.update(0, 10, "stage0")
                termios.tcflow(writer, termios.TCOOFF)
                for done in range(1, 11):
                    bars.update(done, 10, "stage0")
                    bars.say("a line that is dropped")
            say("it is ready")

        in_time(load)
        termios.tcflow(writer, termios.TCOON)
        say("it is read again")
        said = taken(reader).decode()
        assert "stage0" in said
        assert said.endswith("it is read again\n")
        assert "dropped" not in said
        assert "\x1b[?25l" not in said  # the cursor is not hidden, and so need not come back
        monkeypatch.undo()
        ours.close()
    os.close(reader)


def test_a_reader_that_is_gone_ends_nothing() -> None:
    reader, writer = os.pipe()
    stream = NonBlockingStderr(writer)
    os.close(reader)
    assert [stream.write(b"a\n"), stream.write(b"b\n")] == [2, 2]
    stream.close()
    os.close(writer)


@pytest.fixture
def full_at(tmp_path: Path) -> Iterator[Callable[[int], None]]:
    """Files may grow up to so many bytes: a write past that fails, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size if size else soft, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, ignored)


@pytest.mark.parametrize(("form", "lines"), [("plain", ["one", "tfour"]), ("log", ["one", "t", "four"])])
def test_a_disk_that_is_full_for_a_moment_drops_lines_and_takes_the_next(
    form: str,
    lines: list[str],
    tmp_path: Path,
    full_at: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "log"
    monkeypatch.setattr("zrt.runtime.process.terminal.FULL", {errno.EFBIG})
    monkeypatch.setattr(log_lines, "FULL", {errno.EFBIG})
    with path.open("a") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        if form == "log":
            monkeypatch.setattr(sys, "stderr", log_lines._LogStream(stream, str))
        say("one")
        full_at(5)
        say("two")
        say("three")
        full_at(0)
        say("four")
        monkeypatch.undo()
    assert path.read_text().split() == lines
