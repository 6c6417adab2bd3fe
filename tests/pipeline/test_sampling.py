"""Every option of a generation, through real stages: what transformers' generate gives with the
same one, or what the option says."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch
from support.clusters import Local, local_cluster
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessor

from zrt.runtime.client.stream import Stream
from zrt.runtime.compute.turn import BatchStep
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.client import Accepted, Finished, Generate, Piece
from zrt.runtime.messages.sampling import TokenLogprobs

PROMPT = [5, 17, 99, 3, 42, 42, 7, 120]
STAGES = ["0-1", "2-3"]
EOS = 2
WAIT_S = 30.0

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def folder(make_model: Make) -> Path:
    return make_model("llama")


@pytest.fixture
async def cluster(folder: Path) -> AsyncIterator[Local]:
    async with local_cluster(folder, STAGES) as local:
        yield local


def transformers_says(folder: Path, **options: Any) -> list[int]:
    """The ids its generate adds to PROMPT."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    out = model.generate(torch.tensor([PROMPT]), pad_token_id=0, **options)
    return out[0, len(PROMPT) :].tolist()


async def ids_of(cluster: Local, **options: Any) -> tuple[list[int], str]:
    request = {"token_ids": PROMPT, "temperature": 0.0} | options
    _, ids, reason = await cluster.generate(**request)
    return ids, reason


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
        ({"repetition_penalty": 0.8}, {"repetition_penalty": 0.8}),
        ({"logit_bias": {7: 2.5, 90: -4.0}}, {"sequence_bias": {(7,): 2.5, (90,): -4.0}}),
        (
            {"logit_bias": {EOS: 9.0}, "min_tokens": 12, "repetition_penalty": 1.1},
            {"sequence_bias": {(EOS,): 9.0}, "min_new_tokens": 12, "repetition_penalty": 1.1},
        ),
        ({"temperature": 0.7, "top_k": 1, "repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
        ({"temperature": 1.0, "min_p": 1.0}, {}),
    ],
    ids=["repetition", "repetition-below-1", "bias", "minimum", "top-k-1", "min-p-1"],
)
async def test_greedy_ids_are_those_of_transformers(
    folder: Path, cluster: Local, ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    wanted = transformers_says(folder, do_sample=False, max_new_tokens=48, **theirs)
    ids, reason = await ids_of(cluster, max_tokens=48, **ours)
    assert ids == wanted
    assert reason == ("stop" if wanted[-1] == EOS else "length")


class Counting(LogitsProcessor):
    """OpenAI's presence and frequency penalties by their formula: logit - presence · (count > 0) -
    frequency · count, of the answer's tokens."""

    def __init__(self, presence: float, frequency: float) -> None:
        self.presence, self.frequency = presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(input_ids[0, len(PROMPT) :], minlength=scores.shape[1])
        return scores - self.presence * (counts > 0) - self.frequency * counts


@pytest.mark.parametrize(("presence", "frequency"), [(1.5, 0.0), (0.0, 0.3), (-0.5, 0.25)])
async def test_presence_and_frequency_are_openais(
    folder: Path, cluster: Local, presence: float, frequency: float
) -> None:
    processor = Counting(presence, frequency)
    wanted = transformers_says(folder, do_sample=False, max_new_tokens=60, logits_processor=[processor])
    ids, _ = await ids_of(cluster, max_tokens=60, presence_penalty=presence, frequency_penalty=frequency)
    assert ids == wanted
    assert ids != transformers_says(folder, do_sample=False, max_new_tokens=60)


async def test_a_new_route_in_between_changes_no_token(cluster: Local) -> None:
    options = {
        "token_ids": PROMPT,
        "max_tokens": 160,
        "temperature": 0.9,
        "seed": 5,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.2,
        "logit_bias": {EOS: 4.0},
        "min_tokens": 155,
        "logprobs": 1,
    }
    wanted = [piece async for piece in cluster.client.generate(**options)]
    said: list[TokenLogprobs] = []
    routes = 0
    async for piece in cluster.client.generate(**options):
        said += piece.logprobs or []
        if len(said) >= 20 * (routes + 1) and routes < 4:
            routes += 1
            cluster.coordinator.generations.rerouting.peer_lost(
                cluster.servers[routes % 2].address, "it is said to be lost"
            )
            assert next(cluster.coordinator.generations.infos()).epoch == routes + 1
    undisturbed = [entry for piece in wanted for entry in piece.logprobs or []]
    assert routes == 4
    assert [entry.token for entry in said] == [entry.token for entry in undisturbed]
    assert [entry.logprob for entry in said] == pytest.approx([entry.logprob for entry in undisturbed], abs=1e-4)


async def test_without_end_tokens_an_answer_goes_on(cluster: Local) -> None:
    bias = {EOS: 100.0}
    assert await ids_of(cluster, max_tokens=6, logit_bias=bias) == ([EOS], "stop")
    assert await ids_of(cluster, max_tokens=6, logit_bias=bias, ignore_eos=True) == ([EOS] * 6, "length")
    assert await ids_of(cluster, max_tokens=6, logit_bias=bias, ignore_eos=True, stop_token_ids=[EOS]) == (
        [EOS],
        "stop",
    )


async def test_a_stop_token_ends_an_answer_and_is_counted(cluster: Local) -> None:
    plain, _ = await ids_of(cluster, max_tokens=20)
    last = next(n for n in range(5, 20) if plain[n] not in plain[:n])
    ids, reason = await ids_of(cluster, max_tokens=20, stop_token_ids=[plain[last], 159])
    assert (ids, reason) == (plain[: last + 1], "stop")
    later, reason = await ids_of(cluster, max_tokens=20, stop_token_ids=[plain[last]], min_tokens=last + 1)
    assert later[:last] == plain[:last]
    assert plain[last] not in later[: last + 1]


async def test_the_context_ends_an_answer_and_the_cluster_goes_on(folder: Path) -> None:
    async with local_cluster(folder, STAGES, model_context=48) as cluster:
        for _ in range(3):
            ids, reason = await ids_of(cluster, ignore_eos=True)
            assert (len(PROMPT) + len(ids), reason) == (48, "length")
        assert await ids_of(cluster, max_tokens=4) == (ids[:4], "length")
        longer, reason = await ids_of(cluster, token_ids=[*PROMPT, *ids[:-1]], ignore_eos=True)
        assert (longer, reason) == (ids[-1:], "length")
        with pytest.raises(ZrtError) as caught:
            await ids_of(cluster, token_ids=[*PROMPT, *ids])
        assert caught.value.kind == "context_exceeded"


# ---- log-probabilities ---------------------------------------------------------------------------


def own_logprobs(folder: Path, ids: list[int]) -> torch.Tensor:
    """[tokens, vocab]: the model's own distribution before each of `ids`, which follow PROMPT."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1]
    return logits.double().log_softmax(1)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 1.3, "top_k": 30, "seed": 3},
        {"repetition_penalty": 1.5, "presence_penalty": 1.0},
    ],
    ids=["greedy", "drawn", "penalised"],
)
async def test_logprobs_are_the_models_own(folder: Path, cluster: Local, options: dict[str, Any]) -> None:
    pieces = [piece async for piece in cluster.client.generate(token_ids=PROMPT, max_tokens=24, logprobs=3, **options)]
    ids = [token for piece in pieces for token in piece.token_ids]
    said = [entry for piece in pieces for entry in piece.logprobs or []]
    wanted = own_logprobs(folder, ids)
    assert [entry.token for entry in said] == ids
    assert [entry.logprob for entry in said] == pytest.approx(
        [float(row[token]) for row, token in zip(wanted, ids, strict=True)], abs=1e-4
    )
    for entry, row in zip(said, wanted, strict=True):
        top = row.topk(3)
        assert [other.token for other in entry.top] == top.indices.tolist()
        assert [other.logprob for other in entry.top] == pytest.approx(top.values.tolist(), abs=1e-4)


async def test_without_being_asked_for_there_are_no_logprobs(cluster: Local) -> None:
    pieces = [piece async for piece in cluster.client.generate(token_ids=PROMPT, max_tokens=4)]
    assert [piece.logprobs for piece in pieces] == [None] * len(pieces)


# ---- several answers -----------------------------------------------------------------------------


async def answers(cluster: Local, **options: Any) -> tuple[dict[int, list[int]], list[Accepted], list[Finished]]:
    """Token ids by choice, and what was said at the beginnings and the ends."""
    stream = cluster.client.generate(token_ids=PROMPT, **options)
    ids: dict[int, list[int]] = {}
    accepted: list[Accepted] = []
    finished: list[Finished] = []
    while len(finished) < options["n"]:
        match await stream.next_event():
            case Accepted() as event:
                accepted.append(event)
            case Piece() as event:
                ids.setdefault(event.choice, []).extend(event.token_ids)
            case Finished() as event:
                finished.append(event)
    assert sorted(finished, key=lambda event: event.choice) == stream.all_finished
    return ids, accepted, finished


async def test_n_answers_are_those_of_n_seeds(cluster: Local) -> None:
    options = {"max_tokens": 12, "temperature": 1.0, "ignore_eos": True}
    ids, accepted, finished = await answers(cluster, n=4, seed=70, **options)
    assert [(event.choice, event.seed) for event in accepted] == [(0, 70), (1, 71), (2, 72), (3, 73)]
    assert len({event.session for event in accepted}) == 4
    assert {event.choice: event.seed for event in finished} == {0: 70, 1: 71, 2: 72, 3: 73}
    for choice in range(4):
        assert (await ids_of(cluster, seed=70 + choice, **options))[0] == ids[choice]
    assert len({tuple(each) for each in ids.values()}) == 4


async def test_cancelling_a_request_ends_all_of_its_answers(cluster: Local) -> None:
    stream = cluster.client.generate(token_ids=PROMPT, n=3, temperature=1.0, ignore_eos=True)
    async with asyncio.timeout(WAIT_S), aclosing(stream):
        await anext(aiter(stream))
        stream.cancel()
        async for _ in stream:
            pass
        assert [event.reason for event in stream.all_finished] == ["cancelled"] * 3
        assert (await cluster.client.status()).sessions == []


async def test_cancelling_one_answer_leaves_the_others(cluster: Local) -> None:
    stream = cluster.client.generate(token_ids=PROMPT, n=2, temperature=1.0, ignore_eos=True)
    async with asyncio.timeout(WAIT_S), aclosing(stream):
        accepted = [await stream.next_event(), await stream.next_event()]
        second = next(event for event in accepted if isinstance(event, Accepted) and event.choice == 1)
        await cluster.client.cancel(second.session)
        async for _ in stream:
            pass
        assert [event.reason for event in stream.all_finished] == ["length", "cancelled"]


async def test_all_answers_are_queued_or_none(folder: Path) -> None:
    async with local_cluster(folder, [None], limits_queue=3, limits_sessions=1) as cluster:
        running = cluster.client.generate(token_ids=PROMPT, max_tokens=400, ignore_eos=True)
        await running.next_event()
        with pytest.raises(ZrtError) as caught:
            await answers(cluster, n=4, max_tokens=4)
        assert caught.value.kind == "overloaded"
        assert len((await cluster.client.status()).sessions) == 1
        await running.aclose()
        ids, _, _ = await answers(cluster, n=4, max_tokens=4)
        assert sorted(ids) == [0, 1, 2, 3]


async def test_one_error_ends_all_answers(cluster: Local) -> None:
    engine = cluster.servers[0].turns.engine
    assert engine is not None
    admit = engine._decoder.admit
    stream = cluster.client.generate(token_ids=PROMPT, n=3, temperature=1.0, ignore_eos=True)
    async with asyncio.timeout(WAIT_S), aclosing(stream):
        await anext(aiter(stream))
        victim = (await cluster.client.status()).sessions[1].session

        def refuse(step: BatchStep, rows: torch.Tensor) -> None:
            if step.key == victim:
                raise ZrtError("internal", "for the test")
            admit(step, rows)

        engine._decoder.admit = refuse  # type: ignore[method-assign]
        with pytest.raises(ZrtError, match="for the test"):
            async for _ in stream:
                pass
        assert (await cluster.client.status()).sessions == []
    assert (await ids_of(cluster, max_tokens=3))[1] == "length"


# ---- what is refused, and what the model's makers want -------------------------------------------


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("min_p", {"min_p": 1.5}),
        ("min_p", {"min_p": float("nan")}),
        ("repetition_penalty", {"repetition_penalty": 0.0}),
        ("repetition_penalty", {"repetition_penalty": float("inf")}),
        ("presence_penalty", {"presence_penalty": 2.1}),
        ("frequency_penalty", {"frequency_penalty": -2.1}),
        ("logit_bias", {"logit_bias": {160: 1.0}}),
        ("logit_bias", {"logit_bias": {3: 101.0}}),
        ("logit_bias", {"logit_bias": {-3: 1.0}}),
        ("logprobs", {"logprobs": 21}),
        ("min_tokens", {"min_tokens": -1}),
        ("min_tokens", {"min_tokens": 9, "max_tokens": 8}),
        ("min_tokens", {"min_tokens": 1, "stop_token_ids": list(range(160))}),
        ("stop_token_ids", {"stop_token_ids": [160]}),
        ("token_ids", {"token_ids": [5, 160]}),
        ("temperature", {"temperature": float("inf")}),
        ("seed", {"seed": 2**63 - 2, "n": 3}),
        ("n", {"n": 17}),
        ("n", {"n": 0}),
    ],
)
async def test_a_value_out_of_range_is_refused_by_its_name(cluster: Local, field: str, options: dict[str, Any]) -> None:
    with pytest.raises(ZrtError, match=rf"\b{field}\b") as caught:
        await ids_of(cluster, **options)
    assert caught.value.kind == "bad_request"
    request = Generate(**{"id": cluster.client.next_id(), "token_ids": PROMPT} | options)
    with pytest.raises(ZrtError, match=rf"\b{field}\b") as caught:  # by the cluster itself
        await anext(Stream(cluster.client, request))
    assert caught.value.kind == "bad_request"


async def test_a_request_that_says_nothing_gets_what_the_makers_want(make_model: Make, tmp_path: Path) -> None:
    shutil.copytree(make_model("llama"), tmp_path, dirs_exist_ok=True)
    wishes = {"repetition_penalty": 1.4, "max_new_tokens": 30, "min_new_tokens": 5, "num_beams": 1, "eos_token_id": EOS}
    (tmp_path / "generation_config.json").write_text(json.dumps(wishes))
    config = GenerationConfig.from_pretrained(tmp_path)
    wanted = transformers_says(tmp_path, generation_config=config, do_sample=False)
    async with local_cluster(tmp_path, STAGES) as cluster:
        assert await ids_of(cluster) == (wanted, "stop" if wanted[-1] == EOS else "length")
        plain, _ = await ids_of(cluster, repetition_penalty=1.0)
        assert plain == transformers_says(make_model("llama"), do_sample=False, max_new_tokens=30)
        stream = cluster.client.generate(token_ids=PROMPT, max_tokens=2)
        async for _ in stream:
            pass
        assert stream.accepted is not None
        assert stream.accepted.notes == []


async def test_a_models_own_length_counts_prompt_and_answer(make_model: Make, tmp_path: Path) -> None:
    shutil.copytree(make_model("llama"), tmp_path, dirs_exist_ok=True)
    whole = len(PROMPT) + 9
    (tmp_path / "generation_config.json").write_text(json.dumps({"max_length": whole, "eos_token_id": []}))
    config = GenerationConfig.from_pretrained(tmp_path)
    wanted = transformers_says(tmp_path, generation_config=config, do_sample=False)
    assert len(wanted) == 9
    async with local_cluster(tmp_path, [None]) as cluster:
        assert await ids_of(cluster, ignore_eos=True) == (wanted, "length")
        ids, _ = await ids_of(cluster, ignore_eos=True, max_tokens=12)
        assert ids[:9] == wanted
        assert len(ids) == 12
        long = (PROMPT * 20)[:whole]  # transformers raises a ValueError
        with pytest.raises(ZrtError, match=r"max_length.*give max_tokens") as caught:
            await ids_of(cluster, token_ids=long)
        assert caught.value.kind == "context_exceeded"
        assert len((await ids_of(cluster, token_ids=long, max_tokens=2, ignore_eos=True))[0]) == 2


async def test_wishes_that_zrt_does_not_do_are_named(make_model: Make, tmp_path: Path) -> None:
    shutil.copytree(make_model("llama"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps({"num_beams": 4, "typical_p": 0.9}))
    async with local_cluster(tmp_path, [None]) as cluster:
        stream = cluster.client.generate(token_ids=PROMPT, max_tokens=2)
        async for _ in stream:
            pass
        assert stream.accepted is not None
        (note,) = stream.accepted.notes
        assert "num_beams 4, typical_p 0.9" in note
