"""Other programs on this machine that never rest."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

LOOP = "print(flush=True)\nwhile True: pass"


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Run `count` processes that compute without rest, from before the block's first statement to
    the end of its last."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            processes.append(subprocess.Popen([sys.executable, "-c", LOOP], stdout=subprocess.PIPE))
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline()
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()
