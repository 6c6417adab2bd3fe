"""How many threads compute is decided once a process, for every thread of it."""

import os
import subprocess
import sys

from zrt.runtime.compute.threads import thread_environment

PROBE = """
import threading
from zrt.runtime.compute.threads import configure_threads
configure_threads(2)
import torch
seen = []
def lane():
    torch.ones(300, 300) @ torch.ones(300, 300)
    seen.append(torch.get_num_threads())
thread = threading.Thread(target=lane)
thread.start()
thread.join()
print(torch.get_num_threads(), *seen)
"""


def _threads(environment: dict[str, str], code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.strip()


def test_configured_threads_hold_in_every_thread_whatever_the_environment_says() -> None:
    assert _threads({"OMP_NUM_THREADS": "1"}, PROBE) == "2 2"


def test_the_environment_of_a_process_sets_its_threads_and_bounds_their_spinning() -> None:
    environment = thread_environment(1)
    assert environment["GOMP_SPINCOUNT"] == "10000"
    assert _threads(environment, "import torch; print(torch.get_num_threads())") == "1"
