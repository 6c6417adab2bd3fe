"""The end of a process that does not wait for its threads."""

import logging
import os
import sys
from contextlib import suppress
from typing import NoReturn


def leave(status: int) -> NoReturn:
    """Flush the output and exit with `status`, whatever threads still run."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or nobody reads it any more
            stream.flush()
    os._exit(status)
