"""stdout of a command, whose failures are told from all others."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper


class StdoutError(OSError):
    """The error of a standard output that takes nothing, such as a full disk. A pipe that nobody
    reads any more is a BrokenPipeError as elsewhere."""

    def __str__(self) -> str:
        return f"standard output cannot be written: {self.strerror}; what was printed is not complete"


class _Stdout(TextIOWrapper):
    """A stream to standard output. StdoutError where it cannot be written."""

    def write(self, text: str) -> int:
        with _told():
            return super().write(text)

    def flush(self) -> None:
        with _told():
            super().flush()


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise StdoutError(error.errno, error.strerror) from None


def tell_failures() -> None:
    """Make writes to sys.stdout raise StdoutError from now on, where they fail."""
    stream = sys.stdout
    if type(stream) is TextIOWrapper:
        sys.stdout = _Stdout(
            stream.buffer,
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
