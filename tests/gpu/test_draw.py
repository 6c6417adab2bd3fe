"""A whole batch's tokens are drawn on the device as `Sampler.pick` draws each from the same logits,
and without a word to the host."""

import math
from functools import cache

import pytest
import torch
from torch import Tensor

from zrt.runtime.compute.sampler import Sampler
from zrt.runtime.messages.sampling import Sampling

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

ROWS, VOCAB = 64, 151936
OPTIONS = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "cold": {"temperature": 0.05},
    "hot": {"temperature": 5.0},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "top_k 1": {"temperature": 0.8, "top_k": 1},
    "half of the vocabulary": {"temperature": 2.0, "top_k": VOCAB // 2},
    "more than the vocabulary": {"temperature": 1.0, "top_k": VOCAB + 1},
    "top_p": {"temperature": 1.0, "top_p": 0.95},
    "top_p 0": {"temperature": 1.0, "top_p": 0.0},
    "nearly all": {"temperature": 1.5, "top_p": 0.999999},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
    "min_p 1": {"temperature": 1.0, "min_p": 1.0},
    "small": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "all": {"temperature": 1.2, "top_k": 5000, "top_p": 0.9, "min_p": 0.001},
}


def sampled(name: str) -> list[Sampling]:
    return [Sampling(seed=row, **OPTIONS[name]) for row in range(ROWS)]


@cache
def logits_of(kind: str) -> Tensor:
    """float32 [ROWS, VOCAB] on the device."""
    return made(kind).to("cuda")


def made(kind: str) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, VOCAB, generator=draw)
    if kind == "peaked":
        return x * 2 + 30 * torch.rand(ROWS, VOCAB, generator=draw) ** 400
    if kind == "bfloat16":
        return (x * 3).bfloat16().float()
    if kind == "masked":
        return torch.where(torch.rand(ROWS, VOCAB, generator=draw) < 0.7, -math.inf, x)
    if kind == "equal":
        return torch.full_like(x, 2.5)
    if kind == "in order":  # what is near in value is near in place: no segment has room for it
        return (x / 8).sort(dim=1).values
    return x


def drawn(logits: Tensor, options: list[Sampling], positions: list[int]) -> Tensor:
    from zrt.runtime.compute.cuda.batch_sampler import Knobs, draw

    knobs = Knobs(len(options), logits.device)
    knobs.send(knobs_of(options, positions))
    return draw(logits, knobs.on_device).cpu()


def knobs_of(options: list[Sampling], positions: list[int]) -> list[tuple[float, ...]]:
    return [Sampler(one).knobs(at) for one, at in zip(options, positions, strict=True)]


def picked(logits: Tensor, options: list[Sampling], positions: list[int]) -> list[int]:
    return [Sampler(one).pick(x, at) for one, x, at in zip(options, logits, positions, strict=True)]


@pytest.mark.parametrize("kind", ["flat", "peaked", "bfloat16", "masked", "equal", "in order"])
@pytest.mark.parametrize("name", OPTIONS)
def test_tokens_are_those_of_the_sampler(name, kind) -> None:
    options, positions, logits = sampled(name), list(range(100, 100 + ROWS)), logits_of(kind)
    tops, tokens = drawn(logits, options, positions)
    assert tops.tolist() == logits.max(dim=1).values.tolist()
    assert tokens.tolist() == picked(logits, options, positions)


def test_rows_of_all_kinds_stand_in_one_batch_and_do_not_depend_on_each_other() -> None:
    names = [list(OPTIONS)[row % len(OPTIONS)] for row in range(ROWS)]
    options = [Sampling(seed=row, **OPTIONS[name]) for row, name in enumerate(names)]
    positions, logits = list(range(ROWS)), logits_of("peaked")
    together = drawn(logits, options, positions)
    assert together[1].tolist() == picked(logits.cpu(), options, positions)
    assert torch.equal(together, drawn(logits, options, positions))
    for some in ([5], [9, 2], [63, 14, 8, 13]):
        alone = drawn(logits[some], [options[row] for row in some], [positions[row] for row in some])
        assert torch.equal(alone, together[:, some])


def test_a_row_that_is_not_finite_picks_0_and_says_so() -> None:
    logits = torch.zeros(4, VOCAB, device="cuda")
    logits[0, 8500] = math.nan
    logits[1, 4097] = math.inf
    logits[2] = -math.inf
    logits[3, [5000, 7000]] = 1.0
    for options in ([Sampling()] * 4, [Sampling(temperature=1.0, top_k=2, top_p=0.4)] * 4):
        tops, tokens = drawn(logits, options, [1] * 4)
        assert math.isnan(tops[0])
        assert tops[1:].tolist() == [math.inf, -math.inf, 1.0]
        assert tokens[:3].tolist() == [0, 0, 0]
        assert tokens[3] in ([5000.0] if options[3].temperature == 0 else [5000.0, 7000.0])


def test_a_graph_draws_what_its_knobs_and_logits_say_at_each_replay() -> None:
    from zrt.runtime.compute.cuda.batch_sampler import Knobs, draw

    logits = torch.zeros(8, VOCAB, device="cuda")
    knobs = Knobs(8, logits.device)
    knobs.send(())
    draw(logits, knobs.on_device)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = draw(logits, knobs.on_device)
    for name, kind in (("small", "peaked"), ("top_p", "flat"), ("greedy", "bfloat16"), ("all", "peaked")):
        options, values = sampled(name)[:8], logits_of(kind)[:8]
        logits.copy_(values)
        knobs.send(knobs_of(options, [7] * 8))
        graph.replay()
        assert result[1].tolist() == picked(values, options, [7] * 8)
