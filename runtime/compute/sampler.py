"""The choice of the next token from logits.

The order is that of transformers' `generate`: logit bias, repetition penalty, minimum length; then
temperature, top-k, top-p, min-p. OpenAI's presence and frequency penalties, which transformers
lacks, stand after the repetition penalty, as in vLLM. A draw depends only on the logits, the
options, the session's history and (seed, position): there is no generator state, so a replay picks
the same tokens whatever the batch or the cut.
"""

import hashlib
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.sampling import Logprob, Sampling, TokenLogprobs

TOP_P_GUESSES: Final = (
    1024,
    16384,
)  # how many tokens may hold the top-p mass; a whole vocabulary takes 3 to 10 ms to sort


@dataclass(frozen=True, slots=True)
class Picked:
    """One token, and its log-probabilities if the session asked for them."""

    token: int
    logprobs: TokenLogprobs | None = None


GREEDY: Final = (0.0, 0.0, 1.0, 0.0, 0.0)
"""The knobs of a sampler that takes the token of the greatest logit."""


class Sampler:
    """The sampler of one session's tokens, one after the other. Made for one epoch: it starts from
    the history as it is then.

    `tokens` is that history, of which the first `prompt_length` are the prompt; `eos` are the ids
    that end the generation. They may be left out where no penalty and no minimum length needs them.
    """

    def __init__(
        self,
        options: Sampling,
        *,
        tokens: Sequence[int] = (),
        prompt_length: int = 0,
        eos: Sequence[int] = (),
        vocab: int = sys.maxsize,
    ) -> None:
        """Check the options. ZrtError bad_request: an id outside of the vocabulary, or a prompt
        longer than the history."""
        self.options = options
        penalised = bool(options.repetition_penalty != 1 or options.presence_penalty or options.frequency_penalty)
        self.greedy = options.temperature == 0
        self.adjusts = penalised or bool(options.logit_bias or options.min_tokens)
        _check("logit_bias", options.logit_bias, vocab)
        if options.min_tokens:
            _check("eos", eos, vocab)
        if penalised:
            _check("tokens", tokens, vocab)
            if prompt_length > len(tokens):
                text = f"prompt_length is {prompt_length}, but the history has {len(tokens)} tokens"
                raise ZrtError("bad_request", text)
        self._prompt_length = prompt_length
        self._history = _History(tokens, prompt_length) if penalised else None
        self._device = torch.device("cpu")
        self._biased = torch.tensor(list(options.logit_bias), dtype=torch.int64)
        self._bias = torch.tensor(list(options.logit_bias.values()), dtype=torch.float32)
        self._eos = torch.tensor(list(eos) if options.min_tokens else [], dtype=torch.int64)

    @property
    def plain(self) -> bool:
        """Whether bias, penalties, minimum length and log-probabilities are all unused, so that a
        device can pick the token (batch_sampler.py)."""
        return not self.adjusts and self.options.logprobs is None

    def knobs(self, position: int) -> tuple[float, ...]:
        """Return what a device needs to pick the token at `position`: temperature, top_k, top_p,
        min_p, and where in [0, 1) the draw falls. For a sampler that is not plain, return the knobs
        of a greedy one."""
        options = self.options
        if self.greedy or not self.plain:
            return GREEDY
        return options.temperature, options.top_k, options.top_p, options.min_p, uniform(options.seed, position)

    def adjust(self, logits: Tensor, position: int) -> Tensor:
        """Return the logits float32 [vocab] with bias, penalties and minimum length applied; the
        logits given are left as they are."""
        if not self.adjusts:
            return logits
        if logits.device != self._device:
            self._move(logits.device)
        options, scores = self.options, logits.clone()
        if options.logit_bias:
            scores[self._biased] += self._bias
        if self._history is not None:
            self._history.penalise(scores, options)
        if position - self._prompt_length < options.min_tokens:
            scores[self._eos] = -math.inf
        return scores

    def pick(self, logits: Tensor, position: int) -> int:
        """Return the token at `position`, from logits float32 [vocab]. ZrtError internal: the
        options leave no finite logit."""
        scores = self.adjust(logits, position)
        best, token = (part.item() for part in scores.max(dim=0))
        if not math.isfinite(best):
            raise ZrtError("internal", "logit_bias, penalties and min_tokens leave no token that could be picked")
        if self.greedy:
            return int(token)
        ids, probabilities = restrict(scores, self.options)
        return int(ids[_draw(probabilities, uniform(self.options.seed, position))])

    def took(self, token: int) -> None:
        """Append a token to the session's history."""
        if self._history is not None:
            self._history.add(token)

    def _move(self, device: torch.device) -> None:
        """Move the sampler's tensors to the device of the logits; happens once."""
        self._device = device
        self._biased, self._bias, self._eos = (x.to(device) for x in (self._biased, self._bias, self._eos))
        if self._history is not None:
            self._history.move(device)


@torch.inference_mode()
def pick(
    logits: Tensor,
    samplers: Sequence[Sampler],
    positions: Sequence[int],
    best: Tensor | None = None,
    *,
    drawn: bool = False,
) -> list[Picked | ZrtError]:
    """Return one token a row of logits float32 [rows, vocab]. `positions` are those of the tokens
    being chosen, counted from 0 in their sequence.

    `best`, if it is known, is float64 [2, rows]: the greatest logit of each row and its token, or
    with `drawn` the token that a plain sampler picks.

    A row whose greatest logit is not finite (the model overflowed, or the sampler's options make it
    so) gets the error `internal` in place of a token; the other rows get their tokens.
    """
    if best is None:
        best, drawn = torch.stack([part.double() for part in logits.max(dim=1)]), False
    tops, numbers = best.tolist()  # the one wait for a device
    finite = [math.isfinite(top) for top in tops]
    tokens = [int(number) if fine else 0 for number, fine in zip(numbers, finite, strict=True)]
    faults = {row: _not_finite() for row, fine in enumerate(finite) if not fine}
    for row, (sampler, position) in enumerate(zip(samplers, positions, strict=True)):
        picked = sampler.plain and drawn
        if finite[row] and not picked and (sampler.adjusts or not sampler.greedy):
            try:
                tokens[row] = sampler.pick(logits[row], position)
            except ZrtError as error:
                faults[row] = error
            else:
                sampler.took(tokens[row])
    asking = [row for row, sampler in enumerate(samplers) if row not in faults and sampler.options.logprobs is not None]
    said: dict[int, TokenLogprobs] = {}
    if asking:
        counts = [samplers[row].options.logprobs or 0 for row in asking]
        said = dict(zip(asking, logprobs(logits[asking], [tokens[row] for row in asking], counts), strict=True))
    return [faults.get(row) or Picked(token, said.get(row)) for row, token in enumerate(tokens)]


def _not_finite() -> ZrtError:
    return ZrtError("internal", "the model's logits are not finite; a wider dtype (float32, bfloat16) may help")


def logprobs(logits: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """Return for each row of logits float32 [rows, vocab] the log-probability of its token, and
    those of its `counts[row]` likeliest tokens."""
    scores = logits.double().log_softmax(dim=1)
    chosen = scores.gather(1, torch.tensor(tokens, device=scores.device)[:, None]).squeeze(1).tolist()
    top = scores.topk(min(max(counts), scores.shape[1]), dim=1)
    rows = zip(tokens, chosen, counts, top.indices.tolist(), top.values.tolist(), strict=True)
    return [
        TokenLogprobs(token, own, [Logprob(*pair) for pair in zip(ids[:count], values[:count], strict=True)])
        for token, own, count, ids, values in rows
    ]


def restrict(logits: Tensor, options: Sampling) -> tuple[Tensor, Tensor]:
    """Return the tokens that may be drawn from logits [vocab], in the order of their ids, and their
    probabilities (float64, sum 1).

    All restrictions are thresholds, so tokens of equal logits are kept or dropped together.
    """
    scores = logits.double()
    scores = (scores - scores.max()) / options.temperature
    threshold = -sys.float_info.max  # what is ruled out altogether is below
    if options.top_k:
        threshold = max(threshold, float(scores.topk(min(options.top_k, len(scores))).values[-1]))
    if options.top_p < 1:
        threshold = max(threshold, _nucleus(scores[scores >= threshold], options.top_p))
    if options.min_p:
        threshold = max(threshold, math.log(options.min_p))
    ids = (scores >= threshold).nonzero().squeeze(1)
    return ids, scores[ids].softmax(dim=0)


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) with 53 random bits: BLAKE2b of seed and position."""
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + position.to_bytes(8, "little"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


class _History:
    """The tokens of one session on the device of its logits, growing. A token that occurs twice is
    in it twice."""

    def __init__(self, tokens: Sequence[int], prompt_length: int) -> None:
        self._tokens = torch.tensor(tokens, dtype=torch.int64)
        self._length = len(tokens)
        self._prompt_length = prompt_length

    def add(self, token: int) -> None:
        if self._length == len(self._tokens):
            self._tokens = torch.cat([self._tokens, torch.empty_like(self._tokens), self._tokens.new_empty(64)])
        self._tokens[self._length] = token
        self._length += 1

    def move(self, device: torch.device) -> None:
        self._tokens = self._tokens.to(device)

    def penalise(self, scores: Tensor, options: Sampling) -> None:
        """Apply the penalties to `scores` in place. Writing by index is exact though indices
        repeat: all occurrences write the same value."""
        seen = self._tokens[: self._length]
        if options.repetition_penalty != 1:
            held = scores[seen]
            scores[seen] = torch.where(held < 0, held * options.repetition_penalty, held / options.repetition_penalty)
        generated = seen[self._prompt_length :]
        if options.presence_penalty:
            scores[generated] = scores[generated] - options.presence_penalty
        if options.frequency_penalty:
            each = scores.new_full((len(generated),), options.frequency_penalty)
            scores.index_add_(0, generated, each, alpha=-1)


def _check(what: str, ids: Iterable[int], vocab: int) -> None:
    highest = max(ids, default=-1)
    if highest >= vocab:
        raise ZrtError("bad_request", f"{what}: token id {highest} is outside the vocabulary of {vocab}")


def _nucleus(scores: Tensor, top_p: float) -> float:
    """Return the least score that top-p keeps: a token stays while the tokens before it, by falling
    probability, hold less than `top_p`."""
    log_total = scores.logsumexp(dim=0)
    for count in (*(guess for guess in TOP_P_GUESSES if guess < len(scores)), len(scores)):
        falling = scores.topk(count).values
        masses = (falling - log_total).exp()
        kept = int((masses.cumsum(0) - masses < top_p).sum())
        if kept < count:
            break
    return float(falling[max(kept, 1) - 1])


def _draw(probabilities: Tensor, u: float) -> int:
    """Return the inverse of the cumulative distribution at `u`, in the order of token ids, where a
    rounding error moves an edge but swaps no two tokens."""
    cumulative = probabilities.cumsum(0)
    index = torch.searchsorted(cumulative, u * float(cumulative[-1]), right=True)
    return min(int(index), len(probabilities) - 1)
