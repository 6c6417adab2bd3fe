"""The time that one block of a model takes on a device. It is measured, since no published number
of a device predicts it."""

import time
from typing import Final

import torch

from zrt.runtime.compute.engine import Engine
from zrt.runtime.compute.loading import EngineOptions, read_engine
from zrt.runtime.compute.tensors import dtype_name
from zrt.runtime.compute.threads import configure_threads
from zrt.runtime.compute.turn import Work
from zrt.runtime.compute.weight_sources import RandomCheckpoint
from zrt.runtime.models.architecture.spec import ModelSpec
from zrt.runtime.models.checkpoint.layout import PAGE_TOKENS, kv_token_bytes

LEAST_RUNS: Final = 11
LEAST_S: Final = 0.1
MOST_S: Final = 1.0
KEY: Final = "measured"


def layer_time(spec: ModelSpec, dtype: torch.dtype, device: str) -> int:
    """Return the microseconds of one token through one block, the best of many, with weights drawn
    at random. ZrtError as `read_engine`.

    The best is taken because anything else that the machine does meanwhile only adds time. On a CPU
    one thread is measured as well: while other processes compute, threads that wait for each other
    after every product can take 28 times as long, all the time (0.08 ms and 2.3 beside two
    processes of two threads on two cores; one thread 0.08 to 0.11), which says nothing of how fast
    the machine is.
    """
    block = spec.num_blocks // 2
    options = EngineOptions(
        dtype=dtype,
        kv_bytes=PAGE_TOKENS * kv_token_bytes(spec, dtype_name(dtype)),
        context=PAGE_TOKENS,
        sessions=1,
        device=device,
        ends=(False, False),
    )
    engine = read_engine(spec, RandomCheckpoint(spec), (block, block), options)
    rows = torch.ones(1, spec.hidden_size, dtype=dtype)
    engine.turn([Work(KEY, 0, 1, rows, opens=PAGE_TOKENS)])  # the first one may compile kernels, for seconds
    threads = torch.get_num_threads()
    best = _best(engine, rows)
    if device == "cpu" and threads > 1 and best * threads < MOST_S:
        configure_threads(1)
        try:
            best = min(best, _best(engine, rows))
        finally:
            configure_threads(threads)
    return max(1, int(best * 1e6))


def _best(engine: Engine, rows: torch.Tensor) -> float:
    """Return the seconds of the fastest of several turns that all compute the same token."""
    best, runs, began = float("inf"), 0, time.perf_counter()
    while True:
        engine.truncate(KEY, 1)
        started = time.perf_counter()
        engine.turn([Work(KEY, 1, 1, rows)])
        ended = time.perf_counter()
        best = min(best, ended - started)
        runs += 1
        if ended - began >= (LEAST_S if runs >= LEAST_RUNS else MOST_S):
            return best
