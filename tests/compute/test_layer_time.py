"""How fast a layer is, as layers are shared out by it: a measurement with a clock of its own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from zrt.runtime.compute import layer_time as module
from zrt.runtime.compute.engine import Engine
from zrt.runtime.compute.layer_time import layer_time
from zrt.runtime.compute.spec import read_spec


@pytest.mark.parametrize(
    ("seconds", "measured_us", "turns"),
    [
        ([5.0, 0.004, 0.002, 0.003], 2000, 12),
        ([5.0, 2.0], 2_000_000, 2),
    ],
    ids=["kernels are compiled at first", "a layer is that slow"],
)
def test_the_first_turn_does_not_count(
    seconds: list[float],
    measured_us: int,
    turns: int,
    make_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, ran, now = Engine.turn, 0, 0.0

    def turn(engine: Engine, *args: Any) -> Any:
        nonlocal ran, now
        now += seconds[min(ran, len(seconds) - 1)]
        ran += 1
        return real(engine, *args)

    monkeypatch.setattr(Engine, "turn", turn)
    monkeypatch.setattr(module.time, "perf_counter", lambda: now)
    assert layer_time(read_spec(make_model("llama")), torch.float32, "cpu") == pytest.approx(measured_us, abs=1)
    assert ran == turns
