"""The choice of the tokens of a whole batch on a GPU, the greatest logit's or drawn ones: nothing
waits for the host, so that picking can be part of a CUDA graph."""

from collections.abc import Sequence
from threading import Thread
from typing import Final

import torch
from torch import Tensor

from zrt.runtime.compute.cuda.dense_launch import power_of_two
from zrt.runtime.compute.cuda.kernels.dense.dependent_launch import DEPENDENT
from zrt.runtime.compute.cuda.kernels.sampling import argmax, thresholds
from zrt.runtime.compute.cuda.kernels.sampling import draw as draw_kernels
from zrt.runtime.compute.sampler import GREEDY

BEST_TILE: Final = 4096
"""Logits of a row that a program looks at."""
NARROWINGS: Final = 3
"""Launches that narrow a bracket, each to about a sixteenth, so that few tokens are left in it."""
WARPS: Final = 8


def compiling(vocab: int, device: torch.device) -> Thread:
    """Start to compile the kernels, in a thread of their own: compiling takes some ten seconds
    where they are not in Triton's cache, and can run beside other work, such as reading weights."""

    def run() -> None:
        with torch.cuda.device(device):
            knobs = Knobs(1, device)
            knobs.send(())
            draw(torch.zeros(1, vocab, device=device), knobs.on_device)

    thread = Thread(target=run, name="compile", daemon=True)
    thread.start()
    return thread


class Knobs:
    """The knobs of `rows` rows for `draw`: `on_device` float64 [rows, 5], `Sampler.knobs` of
    each."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._host = torch.empty(rows, len(GREEDY), dtype=torch.float64, pin_memory=True)
        self.on_device = torch.empty_like(self._host, device=device, pin_memory=False)
        self._sent = torch.cuda.Event()

    def send(self, knobs: Sequence[tuple[float, ...]]) -> None:
        """Start to copy the knobs of the first rows to the device; the other rows are greedy."""
        self._sent.synchronize()  # the previous copy has read the buffer
        self._host[:] = torch.tensor([*knobs, *[GREEDY] * (len(self._host) - len(knobs))], dtype=torch.float64)
        self.on_device.copy_(self._host, non_blocking=True)
        self._sent.record()


def best(logits: Tensor) -> Tensor:
    """Return the greatest logit of each row of logits [rows, vocab] and its token, the first if
    there are several: float64 [2, rows]."""
    rows, width = logits.shape
    tiles = -(-width // BEST_TILE)
    tops = torch.empty(rows, tiles, device=logits.device)
    indices = torch.empty(rows, tiles, dtype=torch.int32, device=logits.device)
    result = torch.empty(2, rows, dtype=torch.float64, device=logits.device)
    argmax.best_of_tile[(rows, tiles)](logits, tops, indices, width, BEST_TILE, num_warps=8, launch_pdl=DEPENDENT)
    argmax.best_of_row[(rows,)](tops, indices, result, tiles, power_of_two(tiles), num_warps=1, launch_pdl=DEPENDENT)
    return result


def draw(logits: Tensor, knobs: Tensor) -> Tensor:
    """Return the greatest logit of each row of logits float32 [rows, vocab] and the token that is
    drawn: float64 [2, rows], as `best` does.

    `knobs` float64 [rows, 5] lies on the device. The token is that of `Sampler.pick` without bias,
    penalties and minimum length; temperature 0 takes the first token of the greatest logit. In a
    row whose greatest logit is not finite, token 0 is picked.
    """
    rows, width = logits.shape
    cuts, device = thresholds, logits.device
    tiles = -(-width // BEST_TILE)
    padded = 1 << (tiles - 1).bit_length()
    tops = torch.empty(rows, tiles, device=device)
    indices = torch.empty(rows, tiles, dtype=torch.int32, device=device)
    states = torch.empty(2, rows, cuts.RECORD.value, dtype=torch.float64, device=device)
    parts = torch.empty(2, rows, tiles, cuts.PART.value, dtype=torch.float64, device=device)
    segments = torch.empty(rows, tiles, cuts.SEGMENT.value, dtype=torch.int32, device=device)
    counts = torch.empty(rows, tiles, dtype=torch.int32, device=device)
    masses = torch.empty(rows, tiles, dtype=torch.float64, device=device)
    result = torch.empty(2, rows, dtype=torch.float64, device=device)
    seen = (logits, tops, knobs)
    sizes = (width, tiles)
    launch = {"num_warps": WARPS, "launch_pdl": DEPENDENT}
    lean = {**launch, "maxnreg": 128}  # two programs a multiprocessor
    argmax.best_of_tile[(rows, tiles)](logits, tops, indices, width, BEST_TILE, **launch)
    before, after = states
    for is_mass in (False, True):  # top-k, then top-p among the tokens that top-k keeps
        weighed, parted = parts
        for step in range(NARROWINGS):
            cuts.narrow[(rows, tiles)](
                *seen, before, weighed, after, parted, *sizes, step, is_mass, BEST_TILE, padded, **lean
            )
            before, after, weighed, parted = after, before, parted, weighed
        cuts.collect[(rows, tiles)](
            *seen, before, weighed, after, segments, counts, *sizes, is_mass, BEST_TILE, padded, **launch
        )
        before, after = after, before
        cuts.settle[(rows,)](*seen, before, segments, counts, after, *sizes, is_mass, BEST_TILE, padded, **launch)
        before, after = after, before
    draw_kernels.weigh[(rows, tiles)](*seen, before, masses, *sizes, BEST_TILE, **launch)
    draw_kernels.choose[(rows,)](
        logits, tops, indices, knobs, before, masses, result, *sizes, BEST_TILE, padded, **launch
    )
    return result
