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
def executor():
    torch.ones(300, 300) @ torch.ones(300, 300)
    seen.append(torch.get_num_threads())
thread = threading.Thread(target=executor)
thread.start()
thread.join()
print(torch.get_num_threads(), *seen)
"""

ANGLES = """
import os
import torch
from zrt.runtime.compute.decoder.rope import rotary
from zrt.runtime.models.architecture.rope_spec import Rope
rotary = rotary(Rope("default", 1e4, 128), 4096, torch.bfloat16)
torch.set_num_threads(8)
before = len(os.listdir("/proc/self/task"))
positions = torch.arange(0, 4096, 16)
rotary.at(positions, positions + 1)
after = len(os.listdir("/proc/self/task"))
torch.randn(4096, 128).exp()
print(len(positions), after - before, len(os.listdir("/proc/self/task")) > after)
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


def test_the_angles_of_a_batch_of_decodes_wake_no_thread() -> None:
    assert _threads(thread_environment(1), ANGLES) == "256 0 True"
