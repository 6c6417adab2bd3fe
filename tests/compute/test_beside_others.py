"""Turns of a process as an actor's is, while other processes compute on all cores."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest
from support.busy import busy

from zrt.runtime.compute.threads import thread_environment

DECODES = """
import json, sys, time
from pathlib import Path
import torch
from zrt.runtime.models.checkpoint.layout import kv_token_bytes
from zrt.runtime.compute.loading import EngineOptions, read_engine
from zrt.runtime.models.architecture.spec import read_spec
from zrt.runtime.compute.turn import Work
from zrt.runtime.compute.weight_sources import RandomCheckpoint

CONTEXT = 512
spec = read_spec(Path(sys.argv[1]))
options = EngineOptions(
    dtype=torch.float32,
    kv_bytes=spec.num_blocks * CONTEXT * kv_token_bytes(spec, "float32"),
    context=CONTEXT,
    sessions=1,
    device="cpu",
    ends=(False, False),
)
engine = read_engine(spec, RandomCheckpoint(spec), (0, spec.num_blocks - 1), options)
rows = torch.linspace(-1, 1, spec.hidden_size)[None]
engine.turn([Work("it", 0, 1, rows, opens=CONTEXT)])
times, outputs = {1: [], 2: []}, []
for position in range(1, 500):
    threads = 1 + position // 50 % 2
    started = time.perf_counter()
    result = engine.turn([Work("it", position, 1, rows)], threads)
    times[threads].append(time.perf_counter() - started)
    outputs.append(result.output.double().sum().item())
    assert torch.get_num_threads() == threads
engine.close_all()
engine.turn([Work("it", 0, 1, rows, opens=CONTEXT)])
prompts = set()
configured = torch.set_num_threads
torch.set_num_threads = lambda threads: (prompts.add(threads), configured(threads))
for position in range(1, 400, 2):
    engine.turn([Work("it", position, 2, torch.cat([rows, rows]))], 2)
assert not prompts, prompts
print(json.dumps([times[1], times[2], outputs]))
"""


def decoded(folder: Path) -> list[list[float]]:
    """The seconds of each turn on one thread, those on at most two, and what came out."""
    words = [sys.executable, "-c", DECODES, str(folder)]
    ran = subprocess.run(words, env=os.environ | thread_environment(2), capture_output=True, timeout=120)
    assert ran.returncode == 0, ran.stderr.decode()
    found: list[list[float]] = json.loads(ran.stdout)
    return found


def test_more_threads_are_hardly_slower_than_one_whatever_else_computes(make_model: Callable[..., Path]) -> None:
    """Left to themselves they are a hundred times as slow. And what is computed does not depend on
    them, but for the last bits."""
    folder = make_model("llama")
    with busy(2 * (os.cpu_count() or 1)):
        alone, together, outputs = decoded(folder)
    assert median(together) < 3 * median(alone)
    assert outputs == pytest.approx(decoded(folder)[2], rel=1e-5)
