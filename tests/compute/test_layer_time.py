"""How fast a layer is, as layers are shared out by it: a measurement with a clock of its own, and
one beside others that compute."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.busy import busy

from zrt.runtime.compute import layer_time as module
from zrt.runtime.compute.engine import Engine
from zrt.runtime.compute.layer_time import layer_time
from zrt.runtime.compute.threads import thread_environment
from zrt.runtime.models.architecture.spec import read_spec


@pytest.fixture
def two_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    ("first", "together", "alone", "measured_us", "turns"),
    [
        (5.0, [0.004, 0.002, 0.005], [0.007], 2000, 1 + 28 + 15),
        (5.0, [0.028], [0.001], 1000, 1 + 11 + 100),
        (5.0, [2.0], [4.0], 2_000_000, 2),
        (5.0, [0.6], [0.9], 600_000, 3),
    ],
    ids=["kernels are compiled at first", "threads wait for each other", "one thread would take too long", "few turns"],
)
def test_the_best_turn_counts_but_the_first(
    first: float,
    together: list[float],
    alone: list[float],
    measured_us: int,
    turns: int,
    make_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`first`, `together` and `alone` are the seconds that the first turn takes, and the others in
    turns, on two threads and on one."""
    real, ran, now = Engine.turn, 0, 0.0

    def turn(engine: Engine, *args: Any) -> Any:
        nonlocal ran, now
        seconds = together if torch.get_num_threads() == 2 else alone
        now += seconds[ran % len(seconds)] if ran else first
        ran += 1
        return real(engine, *args)

    monkeypatch.setattr(Engine, "turn", turn)
    monkeypatch.setattr(module.time, "perf_counter", lambda: now)
    assert layer_time(read_spec(make_model("llama")), torch.float32, "cpu") == pytest.approx(measured_us, abs=1)
    assert ran == pytest.approx(turns, abs=len(together))
    assert torch.get_num_threads() == 2


MEASURES = """
import sys
from pathlib import Path
import torch
from zrt.runtime.compute.layer_time import layer_time
from zrt.runtime.models.architecture.spec import read_spec
spec = read_spec(Path(sys.argv[1]))
print([layer_time(spec, torch.float32, "cpu") for _ in range(4)])
"""


def test_a_layer_is_about_as_fast_while_others_compute(make_model: Callable[..., Path]) -> None:
    """Threads that wait for each other, in a process as an actor's is, are slowed far more than one
    thread."""
    folder = make_model("llama")

    def measured() -> list[int]:
        words = [sys.executable, "-c", MEASURES, str(folder)]
        ran = subprocess.run(words, env=os.environ | thread_environment(2), capture_output=True, check=True, timeout=60)
        times: list[int] = json.loads(ran.stdout)
        return times

    quiet = min(measured())
    with busy(2 * (os.cpu_count() or 1)):
        assert max(measured()) < 4 * quiet
