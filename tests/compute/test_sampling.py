"""Tokens are drawn from the distribution that transformers' processors leave, and a draw depends on
(seed, position) and history alone."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation import SequenceBiasLogitsProcessor

from zrt.actors.block_server.backend import load_assigned
from zrt.runtime.compute.decoder.decoder import Decoder
from zrt.runtime.compute.sampler import Picked, Sampler, pick, restrict, uniform
from zrt.runtime.compute.turn import Work
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.members import Assignment
from zrt.runtime.messages.sampling import Sampling


def _logits(vocab: int, spread: float, seed: int = 0) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread


def _sample(logits: torch.Tensor, options: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
    return [picked.token for picked in pick(logits, [Sampler(option) for option in options], positions)]


def _warped(logits: torch.Tensor, options: Sampling) -> torch.Tensor:
    """transformers' warpers, in the order its generate applies them."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(options.temperature))])
    if options.top_k:
        warpers.append(TopKLogitsWarper(options.top_k))
    if options.top_p < 1:
        warpers.append(TopPLogitsWarper(options.top_p))
    if options.min_p:
        warpers.append(MinPLogitsWarper(options.min_p))
    return warpers(None, logits[None].double())[0]


@pytest.mark.parametrize("vocab", [37, 5000])
@pytest.mark.parametrize("spread", [0.1, 3.0], ids=["flat", "peaked"])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 7, 2000])
@pytest.mark.parametrize("top_p", [0.0, 0.1, 0.9, 0.999, 1.0])
def test_the_surviving_tokens_and_their_probabilities_are_those_of_transformers(
    vocab, spread, temperature, top_k, top_p
) -> None:
    _same_survivors(_logits(vocab, spread), Sampling(temperature=temperature, top_k=top_k, top_p=top_p))


@pytest.mark.parametrize("temperature", [0.3, 2.5])
@pytest.mark.parametrize("others", [{}, {"top_k": 7}, {"top_p": 0.8}], ids=["alone", "top-k", "top-p"])
@pytest.mark.parametrize("min_p", [0.02, 0.6, 1.0])
def test_min_p_is_that_of_transformers(temperature, others, min_p) -> None:
    _same_survivors(_logits(500, 2.0), Sampling(temperature=temperature, min_p=min_p, **others))


def _same_survivors(logits: torch.Tensor, options: Sampling) -> None:
    scores = _warped(logits, options)
    ids, probabilities = restrict(logits, options)
    assert ids.tolist() == scores.isfinite().nonzero().squeeze(1).tolist()
    torch.testing.assert_close(probabilities, scores.softmax(0)[ids], atol=1e-12, rtol=1e-9)


def test_equal_logits_at_an_edge_are_kept_or_dropped_together() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0, 0.0])
    assert restrict(logits, Sampling(temperature=1.0, top_k=2))[0].tolist() == [1, 2, 3, 4]
    assert restrict(logits, Sampling(temperature=1.0, top_p=0.6))[0].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "options",
    [
        Sampling(temperature=1.0, seed=11),
        Sampling(temperature=0.7, top_k=5, seed=12),
        Sampling(temperature=1.5, top_p=0.8, seed=2**64 - 1),
    ],
    ids=["temperature", "top-k", "top-p"],
)
def test_tokens_come_as_often_as_their_probability_says(options) -> None:
    logits, draws = _logits(12, 1.5), 20_000
    ids, probabilities = restrict(logits, options)
    drawn = torch.tensor(_sample(logits.expand(draws, -1), [options] * draws, range(draws)))
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
        Sampling(temperature=1.0, seed=1),
        Sampling(),
        Sampling(temperature=0.8, top_k=40, seed=2),
        Sampling(temperature=1.2, top_p=0.7, seed=3),
        Sampling(temperature=1.0, seed=1),
        Sampling(),
    ]
    positions = [5, 6, 7, 8, 9, 10]
    together = _sample(logits, options, positions)
    alone = [_sample(logits[row : row + 1], [options[row]], [positions[row]])[0] for row in reversed(range(6))]
    assert together == alone[::-1]


def test_another_position_or_seed_draws_another_token_somewhere() -> None:
    logits = _logits(500, 1.0).expand(50, -1)
    first = _sample(logits, [Sampling(temperature=1.0, seed=1)] * 50, range(50))
    assert first != _sample(logits, [Sampling(temperature=1.0, seed=2)] * 50, range(50))
    assert first != _sample(logits, [Sampling(temperature=1.0, seed=1)] * 50, range(1, 51))


def test_temperature_0_is_the_greatest_logit_whatever_else_is_asked() -> None:
    logits = torch.stack([_logits(500, 2.0, seed) for seed in range(3)])
    options = [Sampling(), Sampling(top_k=3, seed=9), Sampling(top_p=0.5)]
    assert _sample(logits, options, [0, 1, 2]) == logits.argmax(1).tolist()


def test_top_k_1_and_a_tiny_temperature_are_greedy() -> None:
    logits = _logits(500, 2.0)[None]
    for options in (
        Sampling(temperature=1.0, top_k=1),
        Sampling(temperature=1e-9),
        Sampling(temperature=1.0, top_p=0.0),
    ):
        assert _sample(logits, [options], [3]) == [int(logits.argmax())]


def test_no_rows_give_no_tokens() -> None:
    assert _sample(torch.empty(0, 10), [], []) == []


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "options", [Sampling(temperature=0.0), Sampling(temperature=0.8, logprobs=2)], ids=["greedy", "drawn"]
)
def test_logits_that_are_not_finite_are_refused_and_other_rows_get_their_tokens(bad, options) -> None:
    logits = _logits(10, 1.0).expand(3, -1).clone()
    wanted = pick(logits, [Sampler(options)] * 3, [0, 1, 2])
    logits[1, 4] = bad
    first, failed, last = pick(logits, [Sampler(options)] * 3, [0, 1, 2])
    assert [first, last] == [wanted[0], wanted[2]]
    assert isinstance(failed, ZrtError)
    assert failed.kind == "internal"
    assert "not finite" in failed.message


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_sampler_that_leaves_no_finite_logit_fails_alone(temperature: float) -> None:
    logits = torch.ones(3, 10)
    logits[:, 4] = 2.0
    well = Sampling(temperature=temperature, top_k=1, presence_penalty=0.1)
    infinite = replace(well, repetition_penalty=1e-38)  # messages refuse it
    samplers = [Sampler(options, tokens=[4], prompt_length=1) for options in (well, infinite, well)]
    first, failed, last = pick(1e3 * logits, samplers, [1, 1, 1])
    assert [first, last] == [Picked(4, None), Picked(4, None)]
    assert isinstance(failed, ZrtError)
    assert failed.message == "logit_bias, penalties and min_tokens leave no token that could be picked"


# ---- what changes logits before a token is picked ------------------------------------------------

PROMPT, ANSWER = [3, 5, 5, 8], [8, 2, 2, 2]
HISTORY = PROMPT + ANSWER
VOCAB = 12


def _sampler(tokens: Sequence[int] = HISTORY, **options) -> Sampler:
    return Sampler(Sampling(**options), tokens=tokens, prompt_length=len(PROMPT), eos=[1, 7], vocab=VOCAB)


def _processed(logits: torch.Tensor, tokens: Sequence[int], options: Sampling) -> torch.Tensor:
    """transformers' processors, in the order its generate applies them."""
    processors = LogitsProcessorList()
    if options.logit_bias:
        bias = {(token,): value for token, value in options.logit_bias.items()}
        processors.append(SequenceBiasLogitsProcessor(bias))
    if options.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(options.repetition_penalty))
    if options.min_tokens:
        processors.append(MinNewTokensLengthLogitsProcessor(len(PROMPT), options.min_tokens, [1, 7]))
    return processors(torch.tensor([tokens]), logits[None])[0]


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.7},
        {"logit_bias": {3: 2.5, 9: -100.0, 0: 100.0}},
        {"min_tokens": 4},
        {"min_tokens": 5},
        {"repetition_penalty": 1.7, "logit_bias": {5: -3.0, 7: 50.0}, "min_tokens": 9},
    ],
    ids=lambda options: "-".join(options),
)
def test_adjusted_logits_are_those_of_transformers(options) -> None:
    logits = _logits(VOCAB, 3.0)
    wanted = _processed(logits.clone(), HISTORY, Sampling(**options))
    torch.testing.assert_close(_sampler(**options).adjust(logits, len(HISTORY)), wanted, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({"presence_penalty": 0.5}, {8: -0.5, 2: -0.5}),
        ({"frequency_penalty": 0.5}, {8: -0.5, 2: -1.5}),
        ({"frequency_penalty": -0.25}, {8: 0.25, 2: 0.75}),
        ({"presence_penalty": 1.0, "frequency_penalty": 0.5}, {8: -1.5, 2: -2.5}),
    ],
)
def test_presence_and_frequency_count_the_answer_alone(options, changes) -> None:
    """Token 8 stands in the prompt as well, 3 and 5 only there."""
    adjusted = _sampler(**options).adjust(torch.zeros(VOCAB), len(HISTORY))
    assert {token: change for token, change in enumerate(adjusted.tolist()) if change} == changes


def test_presence_and_frequency_come_after_the_repetition_penalty() -> None:
    sampler = _sampler(repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=0.5)
    adjusted = sampler.adjust(torch.full((VOCAB,), 8.0), len(HISTORY)).tolist()
    assert (adjusted[3], adjusted[8], adjusted[2], adjusted[0]) == (4.0, 4.0 - 1.0 - 0.5, 4.0 - 1.0 - 1.5, 8.0)


def test_a_sampler_keeps_count_of_what_it_picks() -> None:
    """At every token it does what one made from the history so far does, so a replay picks the
    same."""
    options = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2, "temperature": 0.9}
    history, running = list(PROMPT), _sampler(PROMPT, **options)
    for position in range(len(PROMPT), 300):
        logits = _logits(VOCAB, 2.0, position)
        fresh = _sampler(history, **options)
        assert torch.equal(running.adjust(logits, position), fresh.adjust(logits, position))
        (picked,) = pick(logits[None], [running], [position])
        assert picked == pick(logits[None], [fresh], [position])[0]
        history.append(picked.token)


def test_penalties_change_what_is_picked() -> None:
    logits = torch.tensor([[2.0, 1.9, 1.1]])
    sampler = Sampler(Sampling(frequency_penalty=0.5), tokens=[1], prompt_length=1)
    assert [pick(logits, [sampler], [n])[0].token for n in range(1, 6)] == [0, 1, 0, 1, 2]


def test_no_token_that_ends_an_answer_comes_before_its_minimum() -> None:
    logits = torch.zeros(VOCAB)
    logits[1], logits[7], logits[4] = 9.0, 8.0, 1.0
    positions = range(len(PROMPT), len(PROMPT) + 5)
    sampler = _sampler(PROMPT, min_tokens=3)
    assert [pick(logits[None], [sampler], [position])[0].token for position in positions] == [4, 4, 4, 1, 1]


def test_drawn_tokens_do_not_end_an_answer_before_its_minimum_either() -> None:
    samplers = [_sampler(PROMPT, min_tokens=3, temperature=5.0, seed=seed) for seed in range(200)]
    drawn = {picked.token for picked in pick(torch.zeros(200, VOCAB), samplers, [len(PROMPT) + 2] * 200)}
    assert drawn == set(range(VOCAB)) - {1, 7}


def test_the_logits_of_others_are_left_alone() -> None:
    logits = _logits(VOCAB, 2.0)[None].repeat(2, 1)
    before = logits.clone()
    pick(logits, [_sampler(repetition_penalty=2.0, min_tokens=9), Sampler(Sampling())], [8, 8])
    assert torch.equal(logits, before)


def test_without_such_options_logits_are_not_even_copied() -> None:
    logits = _logits(VOCAB, 2.0)
    assert Sampler(Sampling(temperature=1.0, top_k=3)).adjust(logits, 5) is logits


@pytest.mark.parametrize(
    ("field", "tokens", "eos", "options"),
    [
        ("logit_bias", HISTORY, [1], {"logit_bias": {VOCAB: 1.0}}),
        ("eos", HISTORY, [VOCAB], {"min_tokens": 1}),
        ("tokens", [*PROMPT, VOCAB], [1], {"repetition_penalty": 1.1}),
        ("prompt_length", PROMPT[:2], [1], {"presence_penalty": 1.1}),
    ],
)
def test_ids_that_cannot_index_the_logits_are_refused(field, tokens, eos, options) -> None:
    with pytest.raises(ZrtError, match=field) as caught:
        Sampler(Sampling(**options), tokens=tokens, prompt_length=len(PROMPT), eos=eos, vocab=VOCAB)
    assert caught.value.kind == "bad_request"


# ---- log-probabilities ---------------------------------------------------------------------------


def test_logprobs_are_the_models_own_whatever_is_done_to_pick() -> None:
    logits = torch.stack([_logits(VOCAB, 2.0, seed) for seed in range(4)])
    samplers = [
        Sampler(Sampling(logprobs=3)),
        Sampler(Sampling()),
        _sampler(logprobs=0, temperature=3.0, top_k=4, logit_bias={0: 7.0}, repetition_penalty=1.9),
        Sampler(Sampling(logprobs=20, temperature=1.0, seed=5)),
    ]
    picked = pick(logits, samplers, [8] * 4)
    wanted = logits.double().log_softmax(1)
    assert picked[1].logprobs is None
    for row, count in ((0, 3), (2, 0), (3, VOCAB)):
        said = picked[row].logprobs
        assert said is not None
        assert said.token == picked[row].token
        assert said.logprob == pytest.approx(float(wanted[row, said.token]), abs=1e-12)
        likeliest = wanted[row].sort(descending=True)
        assert [entry.token for entry in said.top] == likeliest.indices[:count].tolist()
        assert [entry.logprob for entry in said.top] == pytest.approx(likeliest.values[:count].tolist(), abs=1e-12)


# ---- padded heads --------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_padding_of_a_head_is_never_picked(make_model: Callable[..., Path], temperature, monkeypatch) -> None:
    folder = make_model("llama")
    assignment = Assignment(1, str(folder), "files", 0, 3, 4, "float32", 1 << 22, 64, 4, 64, 60.0)
    engine = load_assigned(folder, assignment, device="cpu")
    forward = Decoder.forward

    def padded(decoder, steps, x, picking):
        return torch.nn.functional.pad(forward(decoder, steps, x, picking), (0, 8), value=1e4)

    monkeypatch.setattr(Decoder, "forward", padded)
    engine.open(1, 3)
    result = engine.turn(
        [Work(1, 0, 3, torch.tensor([4, 5, 6]), Sampler(Sampling(temperature=temperature, logprobs=1)))]
    )
    picked = result.outcomes[0].picked
    assert picked is not None
    assert picked.logprobs is not None
    assert picked.token < engine.spec.vocab_size
    assert picked.logprobs.logprob > -20
