"""The least time a token can take here: its weights' bytes over the speed at which memory is read.
Prints one JSON object.

    python bench/floor.py FOLDER

The speed is the best of several sums over 1 GiB of float32, by torch with its own defaults.
"""

import json
import sys
import time
from pathlib import Path

import torch

from zrt.runtime.models.architecture.spec import read_spec
from zrt.runtime.models.checkpoint.formats.dense import FLOAT32
from zrt.runtime.models.checkpoint.layout import block_bytes, head_bytes

TIMES = 8


def main(folder: Path) -> None:
    spec = read_spec(folder)
    read = spec.num_blocks * block_bytes(spec, FLOAT32) + head_bytes(spec, FLOAT32)
    numbers = torch.ones(1 << 28)
    seconds = []
    for _ in range(TIMES):
        started = time.perf_counter()
        numbers.sum()
        seconds.append(time.perf_counter() - started)
    speed = numbers.nbytes / min(seconds)
    print(
        json.dumps(
            {
                "read_gb_s": round(speed / 1e9, 1),
                "weights_mb": round(read / 1e6),
                "floor_ms": round(1e3 * read / speed, 2),
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
