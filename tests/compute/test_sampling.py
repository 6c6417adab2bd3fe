"""Tokens are drawn from the distribution that transformers' processors leave, and a draw depends on (seed, position) alone."""

import math

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from zrt.runtime.compute.sampling import SamplingOptions, restrict, sample, uniform
from zrt.runtime.errors import ZrtError


def _logits(vocab: int, spread: float, seed: int = 0) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread


def _warped(logits: torch.Tensor, options: SamplingOptions) -> torch.Tensor:
    """transformers' processors, in the order its generate applies them."""
    scores = TemperatureLogitsWarper(options.temperature)(None, logits[None].double())
    if options.top_k:
        scores = TopKLogitsWarper(options.top_k)(None, scores)
    if options.top_p < 1:
        scores = TopPLogitsWarper(options.top_p)(None, scores)
    return scores[0]


@pytest.mark.parametrize("vocab", [37, 5000])
@pytest.mark.parametrize("spread", [0.1, 3.0], ids=["flat", "peaked"])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 7, 2000])
@pytest.mark.parametrize("top_p", [0.0, 0.1, 0.9, 0.999, 1.0])
def test_the_surviving_tokens_and_their_probabilities_are_those_of_transformers(
    vocab, spread, temperature, top_k, top_p
) -> None:
    options = SamplingOptions(temperature=temperature, top_k=top_k, top_p=top_p)
    logits = _logits(vocab, spread)
    scores = _warped(logits, options)
    ids, probabilities = restrict(logits, options)
    assert ids.tolist() == scores.isfinite().nonzero().squeeze(1).tolist()
    torch.testing.assert_close(probabilities, scores.softmax(0)[ids], atol=1e-12, rtol=1e-9)


def test_equal_logits_at_an_edge_are_kept_or_dropped_together() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0, 0.0])
    assert restrict(logits, SamplingOptions(temperature=1.0, top_k=2))[0].tolist() == [1, 2, 3, 4]
    assert restrict(logits, SamplingOptions(temperature=1.0, top_p=0.6))[0].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "options",
    [
        SamplingOptions(temperature=1.0, seed=11),
        SamplingOptions(temperature=0.7, top_k=5, seed=12),
        SamplingOptions(temperature=1.5, top_p=0.8, seed=2**64 - 1),
    ],
    ids=["temperature", "top-k", "top-p"],
)
def test_tokens_come_as_often_as_their_probability_says(options) -> None:
    logits, draws = _logits(12, 1.5), 20_000
    ids, probabilities = restrict(logits, options)
    drawn = torch.tensor(sample(logits.expand(draws, -1), [options] * draws, range(draws)))
    assert set(drawn.tolist()) <= set(ids.tolist())
    observed = torch.stack([(drawn == id_).sum() for id_ in ids]).double()
    chi_square = float(((observed - draws * probabilities) ** 2 / (draws * probabilities)).sum())
    freedom = len(ids) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


def test_draws_at_neighbouring_positions_and_seeds_are_unrelated() -> None:
    numbers = torch.tensor([[uniform(seed, position) for position in range(200)] for seed in range(200)])
    assert 0 <= float(numbers.min()) <= float(numbers.max()) < 1
    assert float(numbers.mean()) == pytest.approx(0.5, abs=0.01)
    flat, right, below = numbers[:-1, :-1].flatten(), numbers[:-1, 1:].flatten(), numbers[1:, :-1].flatten()
    correlations = torch.corrcoef(torch.stack([flat, right, below]))
    assert float((correlations - torch.eye(3)).abs().max()) < 0.03


def test_a_number_of_a_seed_and_position_is_the_same_for_ever() -> None:
    recorded = [0.0564663990004608, 0.2274270258044947, 0.4076662817373935]
    assert [uniform(0, 0), uniform(7, 100), uniform(2**64 - 1, 1)] == recorded


def test_a_draw_does_not_depend_on_the_batch_or_on_other_draws() -> None:
    logits = torch.stack([_logits(500, 2.0, seed) for seed in range(6)])
    options = [
        SamplingOptions(temperature=1.0, seed=1),
        SamplingOptions(),
        SamplingOptions(temperature=0.8, top_k=40, seed=2),
        SamplingOptions(temperature=1.2, top_p=0.7, seed=3),
        SamplingOptions(temperature=1.0, seed=1),
        SamplingOptions(),
    ]
    positions = [5, 6, 7, 8, 9, 10]
    together = sample(logits, options, positions)
    alone = [sample(logits[row : row + 1], [options[row]], [positions[row]])[0] for row in reversed(range(6))]
    assert together == alone[::-1]


def test_another_position_or_seed_draws_another_token_somewhere() -> None:
    logits = _logits(500, 1.0).expand(50, -1)
    first = sample(logits, [SamplingOptions(temperature=1.0, seed=1)] * 50, range(50))
    assert first != sample(logits, [SamplingOptions(temperature=1.0, seed=2)] * 50, range(50))
    assert first != sample(logits, [SamplingOptions(temperature=1.0, seed=1)] * 50, range(1, 51))


def test_temperature_0_is_the_greatest_logit_whatever_else_is_asked() -> None:
    logits = torch.stack([_logits(500, 2.0, seed) for seed in range(3)])
    options = [SamplingOptions(), SamplingOptions(top_k=3, seed=9), SamplingOptions(top_p=0.5)]
    assert sample(logits, options, [0, 1, 2]) == logits.argmax(1).tolist()


def test_top_k_1_and_a_tiny_temperature_are_greedy() -> None:
    logits = _logits(500, 2.0)[None]
    for options in (
        SamplingOptions(temperature=1.0, top_k=1),
        SamplingOptions(temperature=1e-9),
        SamplingOptions(temperature=1.0, top_p=0.0),
    ):
        assert sample(logits, [options], [3]) == [int(logits.argmax())]


def test_no_rows_give_no_tokens() -> None:
    assert sample(torch.empty(0, 10), [], []) == []


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_refused(bad) -> None:
    logits = _logits(10, 1.0).expand(2, -1).clone()
    logits[1, 4] = bad
    with pytest.raises(ZrtError, match="not finite") as caught:
        sample(logits, [SamplingOptions()] * 2, [0, 1])
    assert caught.value.kind == "internal"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_options_out_of_range_are_refused_by_name(name, value) -> None:
    with pytest.raises(ZrtError, match=f"{name} is ") as caught:
        SamplingOptions(**{name: value})
    assert caught.value.kind == "bad_request"
