"""The shapes of the one-row product that suit a card: tried once, and remembered on disk for each
card and version of the compiler.

A shape that does not suit costs a product up to half its speed, and no shape suits all products
(see docs/performance.md). Products so small that launching them takes as long as running them are
not tried: they keep the shape that does well on average.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
import triton
from torch import Tensor

from zrt.runtime.compute.cuda.dense_launch import Product

log = logging.getLogger(__name__)

LEAST_BYTES: Final = 16 << 20
"""The fewest bytes of weights of a product that is worth trying."""
TRIED: Final = tuple(
    Product(rows, chunk, warps)
    for rows, chunk, warps in (
        (4, 1024, 4),
        (2, 1024, 4),
        (2, 2048, 4),
        (2, 2048, 8),
        (1, 4096, 8),
        (2, 4096, 8),
        (4, 2048, 8),
    )
)
REPLAYS: Final = 3

Run = Callable[[Tensor, Product], None]
"""A function that runs one product with this weight, in this shape."""


class Tuning:
    """The shapes found for one card, kept in `folder`; a file that cannot be read or written only
    costs another trial."""

    def __init__(self, folder: Path, card: str) -> None:
        name = "".join(letter if letter.isalnum() else "-" for letter in card)
        self._path = folder / f"{name}.json"
        self._version = f"triton {triton.__version__}"

    def shape(self, what: str, weights: Sequence[Tensor], run: Run, *, gate: bool = False) -> Product:
        """Return the best shape for products with these weights, all of one size; `what`
        distinguishes them from other products of that size."""
        outputs, inputs = weights[0].shape
        key = f"{self._version}, {what} {outputs} x {inputs} {str(weights[0].dtype).removeprefix('torch.')}"
        known = self._read()
        if key in known:
            return known[key]
        best = min(fitting(outputs // (2 if gate else 1), inputs), key=lambda shape: _time(weights, shape, run))
        log.info("%s: %s", key, best)
        self._write({**self._read(), key: best})
        return best

    def _read(self) -> dict[str, Product]:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=dict[str, Product])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("%s is not read: %s", self._path, error)
            return {}

    def _write(self, shapes: dict[str, Product]) -> None:
        beside = self._path.with_suffix(f".{os.getpid()}")
        text: Any = {key: msgspec.to_builtins(shape) for key, shape in sorted(shapes.items())}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(json.dumps(text, indent=1))
            beside.replace(self._path)
        except OSError as error:
            log.warning("%s is not written: %s", self._path, error)


def fitting(outputs: int, inputs: int) -> Iterator[Product]:
    """Yield the shapes to try for a product of so many outputs and inputs: those whose parts divide
    them."""
    return (shape for shape in TRIED if inputs % shape.chunk == 0 and outputs % shape.rows == 0)


def worth_trying(weight: Tensor) -> bool:
    return weight.nbytes >= LEAST_BYTES


def _time(weights: Sequence[Tensor], shape: Product, run: Run) -> float:
    """Return the time of the products of all blocks one after the other, as in a token's graph, so
    that weights come from memory, not from a cache."""
    run(weights[0], shape)  # compiles
    torch.cuda.current_stream().synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for weight in weights:
            run(weight, shape)
    graph.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    graph.reset()
    return float(begin.elapsed_time(end))
