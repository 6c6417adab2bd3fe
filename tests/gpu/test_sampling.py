"""A session's tokens are picked from logits on the device as they are from the same logits on the
CPU."""

import pytest
import torch

from zrt.runtime.compute.sampler import Picked, Sampler, pick
from zrt.runtime.messages.sampling import Sampling

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

VOCAB = 5000
OPTIONS = [
    {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02, "seed": 7},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.0, "frequency_penalty": 0.4, "temperature": 1.0, "seed": 3},
    {"logit_bias": {5: 3.0, 70: -9.0}, "min_tokens": 150},
    {},
]


def picked_on(device: str) -> list[list[Picked]]:
    """200 tokens of five sessions in one batch."""
    draw = torch.Generator().manual_seed(0)
    samplers = [
        Sampler(Sampling(logprobs=3, **options), tokens=[4, 5, 6, 6], prompt_length=4, eos=[1, 2], vocab=VOCAB)
        for options in OPTIONS
    ]
    rows = []
    for position in range(4, 204):
        logits = (torch.randn(len(OPTIONS), VOCAB, generator=draw) * 3).to(device)
        rows.append(pick(logits, samplers, [position] * len(OPTIONS)))
    return rows


def test_tokens_and_logprobs_are_those_of_the_cpu() -> None:
    for ours, theirs in zip(picked_on("cuda"), picked_on("cpu"), strict=True):
        assert [one.token for one in ours] == [one.token for one in theirs]
        for one, other in zip(ours, theirs, strict=True):
            assert one.logprobs is not None
            assert other.logprobs is not None
            assert one.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-9)
            assert [entry.token for entry in one.logprobs.top] == [entry.token for entry in other.logprobs.top]
