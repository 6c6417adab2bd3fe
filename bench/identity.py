"""What it costs to find out which model lies in a folder: its weights are hashed once a machine.

    python bench/identity.py [--rounds N] [--megabytes N]

Prints one JSON object. `gb_s`: gigabytes (10^9) a second, of each round, of a file that is in the
page cache, in `threads` threads; `core_gb_s`: the same a second of one core's time, whatever else
runs beside; `again_ms`: the same question once more, when the digests are remembered.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

from zrt.runtime.models.checkpoint import tensor_digests
from zrt.runtime.models.checkpoint.safetensors import read_header
from zrt.runtime.models.checkpoint.tensor_digests import HASHERS, FileState, TensorDigests

TENSORS = 32


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=1024)
    asked = parser.parse_args()
    tensor_digests.SETTLED_S = 0.0  # or else what was written a moment ago is not remembered
    gb_s, core_gb_s, again_ms = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        nbytes = asked.megabytes * 10**6 // TENSORS
        write(file, nbytes)
        for number in range(asked.rounds):
            seconds, core_seconds = question(file, Path(folder) / str(number))
            gb_s.append(round(nbytes * TENSORS / 1e9 / seconds, 2))
            core_gb_s.append(round(nbytes * TENSORS / 1e9 / core_seconds, 2))
            again_ms.append(round(1000 * question(file, Path(folder) / str(number))[0], 1))
    threads = min(HASHERS, len(os.sched_getaffinity(0)))
    figures = {"gb_s": gb_s, "core_gb_s": core_gb_s, "again_ms": again_ms}
    print(json.dumps(figures | {"threads": threads, "megabytes": asked.megabytes}))


def write(file: Path, nbytes: int) -> None:
    """Write random tensors of so many bytes each."""
    table = {
        f"t{number}": {"dtype": "U8", "shape": [nbytes], "data_offsets": [number * nbytes, (number + 1) * nbytes]}
        for number in range(TENSORS)
    }
    text = json.dumps(table).encode()
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        for _ in range(TENSORS):
            opened.write(os.urandom(nbytes))


def question(file: Path, memory: Path) -> tuple[float, float]:
    """Return the seconds it takes to have all digests, and those of all cores together."""
    started, core_started = time.perf_counter(), time.process_time()
    states = {file: FileState.of(file)}
    TensorDigests(memory).digests(read_header(file).tensors, states, cancelled=lambda: False)
    return time.perf_counter() - started, time.process_time() - core_started


if __name__ == "__main__":
    main()
