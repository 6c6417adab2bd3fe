"""Choosing the next token from logits.

Order of the restrictions: temperature, top-k, top-p, as transformers' generate applies them. A draw depends on the logits, the options and
(seed, position) alone: there is no generator state, so a replay picks the same token whatever the batch or the cut.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from zrt.runtime.errors import ZrtError

SEED_MAX: Final = 2**64 - 1
TOP_P_GUESSES: Final = (
    1024,
    16384,
)  # how many tokens may hold the top-p mass; a whole vocabulary takes 3 to 10 ms to sort


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How to choose. `temperature` 0 is greedy and leaves the rest unused; `top_k` 0 and `top_p` 1 are off. `bad_request` when out of range."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        ranges = (
            ("temperature", self.temperature, 0 <= self.temperature < math.inf, "a number from 0 on"),
            ("top_k", self.top_k, self.top_k >= 0, "a whole number from 0 on (0: off)"),
            ("top_p", self.top_p, 0 <= self.top_p <= 1, "a number from 0 to 1 (1: off)"),
            ("seed", self.seed, 0 <= self.seed <= SEED_MAX, "a whole number of 64 bits, from 0 on"),
        )
        for name, value, fits, wanted in ranges:
            if not fits:
                raise ZrtError("bad_request", f"{name} is {value}; it must be {wanted}")


@torch.inference_mode()
def sample(logits: Tensor, options: Sequence[SamplingOptions], positions: Sequence[int]) -> list[int]:
    """One token id a row of logits float32 [rows, vocab]. `positions` are those of the tokens being chosen, counted from 0 in their sequence.

    `internal` when a row's greatest logit is not finite: the model overflowed.
    """
    top, greedy = logits.max(dim=1)
    if not bool(top.isfinite().all()):
        raise ZrtError("internal", "the model's logits are not finite; a wider dtype (float32, bfloat16) may help")
    tokens = greedy.tolist()
    for row, (option, position) in enumerate(zip(options, positions, strict=True)):
        if option.temperature > 0:
            ids, probabilities = restrict(logits[row], option)
            tokens[row] = int(ids[_draw(probabilities, uniform(option.seed, position))])
    return tokens


def restrict(logits: Tensor, options: SamplingOptions) -> tuple[Tensor, Tensor]:
    """The tokens that may be drawn from logits [vocab], in the order of their ids, and their probabilities (float64, sum 1).

    Both restrictions are thresholds, so tokens of equal logits are kept or dropped together.
    """
    scores = logits.double() / options.temperature
    threshold = -math.inf
    if options.top_k:
        threshold = float(scores.topk(min(options.top_k, len(scores))).values[-1])
    if options.top_p < 1:
        threshold = max(threshold, _nucleus(scores[scores >= threshold], options.top_p))
    ids = (scores >= threshold).nonzero().squeeze(1)
    return ids, scores[ids].softmax(dim=0)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits: BLAKE2b of the two."""
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + position.to_bytes(8, "little"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def _nucleus(scores: Tensor, top_p: float) -> float:
    """The least score of top-p: a token stays while the tokens before it, by falling probability, hold less than `top_p`."""
    log_total = scores.logsumexp(dim=0)
    for count in (*(guess for guess in TOP_P_GUESSES if guess < len(scores)), len(scores)):
        falling = scores.topk(count).values
        masses = (falling - log_total).exp()
        kept = int((masses.cumsum(0) - masses < top_p).sum())
        if kept < count:
            break
    return float(falling[max(kept, 1) - 1])


def _draw(probabilities: Tensor, u: float) -> int:
    """The inverse of the cumulative distribution at `u`. In the order of token ids, where a rounding error moves an edge but swaps no two."""
    cumulative = probabilities.cumsum(0)
    index = torch.searchsorted(cumulative, u * float(cumulative[-1]), right=True)
    return min(int(index), len(probabilities) - 1)
