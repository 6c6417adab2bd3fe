"""The layers that a layer worker holds, and what its executor does with them. One thread at a time;
every call blocks.

Layers that are held together are one engine with one KV cache, and run as one. A batch runs as a
whole or not at all: if one step cannot run, none does.
"""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zrt.runtime.compute.engine import Engine
from zrt.runtime.compute.loading import EngineOptions, read_engine
from zrt.runtime.compute.turn import Work
from zrt.runtime.compute.weight_sources import Source
from zrt.runtime.errors import ZrtError
from zrt.runtime.models.architecture.spec import ModelSpec

Blocks = tuple[int, int]
"""First and last layer of a contiguous run, inclusive, as global numbers."""


@dataclass(frozen=True, slots=True)
class Ran:
    """The result of a batch: `output` [Σn, hidden], or None and the fault of each step that kept
    the batch from running. `have`: the tokens then held."""

    output: Tensor | None
    have: list[int]
    faults: list[ZrtError | None]


def runs_of(layers: Sequence[int]) -> list[Blocks]:
    """Return ascending layers as contiguous runs."""
    runs: list[Blocks] = []
    for layer in layers:
        if runs and runs[-1][1] + 1 == layer:
            runs[-1] = (runs[-1][0], layer)
        else:
            runs.append((layer, layer))
    return runs


class LayerEngine:
    """The engines of a layer worker, by the run of layers that each holds. Hidden states go in and
    come out as [rows, `hidden`] of `dtype`."""

    def __init__(self, engines: dict[Blocks, Engine]) -> None:
        any_shard = next(iter(engines.values())).shard
        self.dtype = any_shard.dtype
        self.hidden = any_shard.spec.hidden_size
        self._engines = engines
        self._asked: tuple[list[int], list[Engine]] = [], []
        """The layers of the last operation, as a rule also those of the next, and their engines."""

    @classmethod
    def load(
        cls,
        spec: ModelSpec,
        source: Source,
        runs: Sequence[Blocks],
        options: EngineOptions,
    ) -> "LayerEngine":
        """Read the runs of layers: embedding, norm and head stay with the master. The KV memory of
        `options` is divided among the runs by their number of layers.

        ZrtError as `read_engine`, and bad_request for a layer that the model lacks.
        """
        for first, last in runs:
            if last >= spec.num_blocks:
                raise ZrtError("bad_request", f"layers {first}-{last}: this model has layers 0-{spec.num_blocks - 1}")
        count = sum(last - first + 1 for first, last in runs)
        engines = {}
        for run in runs:
            kv_bytes = options.kv_bytes * (run[1] - run[0] + 1) // count
            engines[run] = read_engine(spec, source, run, replace(options, kv_bytes=kv_bytes, ends=(False, False)))
        return cls(engines)

    def chain(self, layers: Sequence[int]) -> list[Engine]:
        """Return the engines that hold these layers, in this order. ZrtError bad_request: a layer
        is not held, or only together with others."""
        if layers == self._asked[0]:
            return self._asked[1]
        engines, at = [], 0
        while at < len(layers):
            run = next((run for run in self._engines if run[0] <= layers[at] <= run[1]), None)
            held = ", ".join(f"{first}-{last}" for first, last in self._engines)
            if run is None:
                raise ZrtError("bad_request", f"layer {layers[at]} is not held here; held are {held}")
            whole = list(range(run[0], run[1] + 1))
            if list(layers[at : at + len(whole)]) != whole:
                raise ZrtError("bad_request", f"layer {layers[at]} runs together with {run[0]}-{run[1]} alone")
            engines.append(self._engines[run])
            at += len(whole)
        self._asked = list(layers), engines
        return engines

    def open(self, key: Hashable, length: int, names: Sequence[int], prompt: int) -> int:
        """Open a session in all engines, as `Engine.open`. Returns how many tokens every engine
        holds."""
        return min(engine.open(key, length, names, prompt) for engine in self._engines.values())

    def close(self, key: Hashable, names: Sequence[int] | None = None) -> None:
        """End a session in all engines, as `Engine.close`."""
        for engine in self._engines.values():
            engine.close(key, names)

    def close_all(self) -> None:
        """End every session, as `Engine.close_all`."""
        for engine in self._engines.values():
            engine.close_all()

    @property
    def engines(self) -> Collection[Engine]:
        return self._engines.values()

    def run(self, chain: Sequence[Engine], works: Sequence[Work]) -> Ran:
        """Run the steps through a chain of engines, their rows [n, hidden] one after the other."""
        output = None
        for done, engine in enumerate(chain):
            try:
                result = engine.turn(works)
            except BaseException:
                self._undo(chain[:done], works)
                raise
            faults = [outcome.fault for outcome in result.outcomes]
            if any(faults):
                self._undo(
                    chain[: done + 1], [work for work, fault in zip(works, faults, strict=True) if fault is None]
                )
                self._undo(chain[:done], [work for work, fault in zip(works, faults, strict=True) if fault is not None])
                have = [min(each.have(work.key) for each in chain) for work in works]
                return Ran(None, have, faults)
            output = result.output
            assert output is not None
            if done + 1 < len(chain):
                parts = torch.split(output, [work.n for work in works])
                works = [
                    Work(work.key, work.seq_pos, work.n, part, opens=work.opens)
                    for work, part in zip(works, parts, strict=True)
                ]
        return Ran(output, [work.seq_pos + work.n for work in works], [None] * len(works))

    def _undo(self, engines: Sequence[Engine], works: Sequence[Work]) -> None:
        """Forget the tokens that these steps added."""
        for engine in engines:
            for work in works:
                if engine.have(work.key) > work.seq_pos:
                    engine.truncate(work.key, work.seq_pos)
