"""How long one block of a model takes on a device: measured, since nothing that is said of a device tells it."""

import time
from typing import Final

import torch

from zrt.runtime.compute.layout import PAGE_TOKENS, kv_token_bytes
from zrt.runtime.compute.loading import read_engine
from zrt.runtime.compute.spec import ModelSpec
from zrt.runtime.compute.turn import Work
from zrt.runtime.compute.weights import RandomCheckpoint
from zrt.runtime.tensors import dtype_name

RUNS: Final = 12
MOST_S: Final = 1.0


def layer_time(spec: ModelSpec, dtype: torch.dtype, device: str) -> int:
    """Microseconds of one token through one block, the best of a few, with weights drawn at random. ZrtError as read_engine.

    The best, since whatever else the machine does meanwhile only adds to it.
    """
    block = spec.num_blocks // 2
    engine = read_engine(
        spec,
        RandomCheckpoint(spec),
        (block, block),
        dtype=dtype,
        kv_bytes=PAGE_TOKENS * kv_token_bytes(spec, dtype_name(dtype)),
        context=PAGE_TOKENS,
        sessions=1,
        device=device,
        ends=(False, False),
    )
    rows = torch.ones(1, spec.hidden_size, dtype=dtype)
    engine.turn([Work("measured", 0, 1, rows, opens=RUNS)])  # the first one may compile kernels, for seconds
    times: list[float] = []
    for position in range(1, RUNS):
        started = time.perf_counter()
        engine.turn([Work("measured", position, 1, rows)])
        times.append(time.perf_counter() - started)
        if sum(times) > MOST_S:
            break
    return max(1, int(min(times) * 1e6))
