"""A forward over a ragged batch: sessions do not touch each other, steps can be repeated, and a
failure leaves no trace."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from zrt.actors.block_server.backend import load_assigned
from zrt.runtime.compute.cpu.cpu_forward import cpu_decoder
from zrt.runtime.compute.decoder.decoder import Decoder
from zrt.runtime.compute.turn import BatchStep
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.members import Assignment


@pytest.fixture
def folder(make_model: Callable[..., Path]) -> Path:
    return make_model("llama", tied=True)


def _ids(length: int, seed: int) -> list[int]:
    return torch.randint(0, 160, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def _state(stage: Decoder, key: str) -> tuple[int, Tensor]:
    """What the cache holds of a session."""
    have = stage.cache.have(key)
    return have, stage.cache.slab[stage.cache.row(key), :, :, :, :have].clone()


# Turns of a batch: for each session the number of its tokens in that turn, 0 where it sits the turn
# out.
TURNS = {
    "prefill together": [(5, 17, 33)],
    "decode together": [(5, 17, 33), (1, 1, 1), (1, 1, 1)],
    "decode beside prefill": [(5, 0, 33), (1, 9, 1), (1, 8, 1)],
    "decode beside a later chunk": [(4, 10, 20), (1, 7, 13), (1, 1, 1)],
    "sessions come and go": [(0, 3, 0), (2, 1, 1), (0, 0, 30), (1, 1, 0), (4, 0, 5)],
}


@pytest.mark.parametrize("turns", TURNS.values(), ids=TURNS.keys())
@pytest.mark.parametrize("cuts", [((0, 3),), ((0, 1), (2, 3))], ids=["one shard", "two shards"])
def test_sessions_in_a_batch_get_what_they_get_alone(folder, turns, cuts, pipeline) -> None:
    together, alone = pipeline(folder, cuts), pipeline(folder, cuts)
    names = ["a", "b", "c"]
    together.open(*names)
    alone.open(*names)
    texts = {name: _ids(60, seed) for seed, name in enumerate(names)}
    done = dict.fromkeys(names, 0)
    for turn in turns:
        steps = [BatchStep(name, done[name], n) for name, n in zip(names, turn, strict=True) if n]
        ids = [token for step in steps for token in texts[step.key][step.seq_pos : step.seq_pos + step.n]]
        logits = together.forward(steps, torch.tensor(ids))
        for row, step in enumerate(steps):
            expected = alone.logits(step.key, step.seq_pos, texts[step.key][step.seq_pos : step.seq_pos + step.n])
            torch.testing.assert_close(logits[row], expected, atol=1e-4, rtol=0)
            done[step.key] += step.n


def test_a_step_of_many_tokens_equals_many_steps_of_one(folder, pipeline) -> None:
    pipe, ids = pipeline(folder), _ids(40, 1)
    pipe.open("chunk", "single")
    chunk = pipe.logits("chunk", 0, ids)
    for position, token in enumerate(ids):
        single = pipe.logits("single", position, [token])
    torch.testing.assert_close(single, chunk, atol=1e-4, rtol=0)


def test_logits_are_made_only_for_the_steps_that_ask(folder, pipeline) -> None:
    pipe = pipeline(folder)
    pipe.open("a", "b", "c")
    steps = [BatchStep("a", 0, 3, logits=False), BatchStep("b", 0, 2), BatchStep("c", 0, 1, logits=False)]
    assert pipe.forward(steps, torch.tensor(_ids(6, 1))).shape == (1, 160)
    silent = [BatchStep("a", 3, 1, logits=False)]
    assert pipe.forward(silent, torch.tensor([5])).shape == (0, 160)


def test_going_back_and_repeating_a_step_gives_the_same(folder, pipeline) -> None:
    pipe, ids = pipeline(folder), _ids(40, 1)
    pipe.open("s")
    pipe.logits("s", 0, ids[:30])
    first = pipe.logits("s", 30, ids[30:])
    assert torch.equal(pipe.logits("s", 30, ids[30:]), first)


def test_going_back_forgets_what_came_after(folder, pipeline) -> None:
    pipe, ids = pipeline(folder), _ids(40, 1)
    pipe.open("s", "fresh")
    pipe.logits("s", 0, ids)
    other = pipe.logits("s", 10, [7, 8, 9])
    assert [stage.cache.have("s") for stage in pipe.stages] == [13]
    assert torch.allclose(other, pipe.logits("fresh", 0, [*ids[:10], 7, 8, 9]), atol=1e-4)


def test_a_closed_session_leaves_nothing_to_the_next_in_its_row(folder, pipeline) -> None:
    pipe, ids = pipeline(folder), _ids(40, 1)
    pipe.open("first")
    pipe.logits("first", 0, ids)
    expected = pipe.logits("first", 0, [3, 4])
    for stage in pipe.stages:
        stage.cache.close("first")
    pipe.open("second")
    assert torch.equal(pipe.logits("second", 0, [3, 4]), expected)


def test_a_result_is_not_written_over_by_a_later_forward(folder, pipeline) -> None:
    pipe = pipeline(folder, ((0, 1), (2, 3)))
    pipe.open("a", "b")
    hidden = pipe.stages[0].forward([BatchStep("a", 0, 4)], torch.tensor(_ids(4, 1)))
    kept = hidden.clone()
    logits = pipe.stages[1].forward([BatchStep("a", 0, 4)], hidden)
    kept_logits = logits.clone()
    pipe.forward([BatchStep("b", 0, 6)], torch.tensor(_ids(6, 2)))
    assert torch.equal(hidden, kept)
    assert torch.equal(logits, kept_logits)


def test_a_forward_does_not_write_to_its_input(folder, pipeline) -> None:
    pipe = pipeline(folder, ((0, 1), (2, 3)))
    pipe.open("a")
    hidden = pipe.stages[0].forward([BatchStep("a", 0, 4)], torch.tensor(_ids(4, 1)))
    kept = hidden.clone()
    pipe.stages[1].forward([BatchStep("a", 0, 4)], hidden)
    assert torch.equal(hidden, kept)


REFUSED = {
    "an unknown session": ([BatchStep("nobody", 0, 3)], [1, 2, 3], "unknown_session"),
    "a gap": ([BatchStep("a", 5, 3)], [1, 2, 3], "kv_gap"),
    "a gap beside a good step": ([BatchStep("b", 0, 1), BatchStep("a", 5, 2)], [1, 2, 3], "kv_gap"),
    "beyond the context": ([BatchStep("a", 4, 253)], [1] * 253, "context_exceeded"),
    "more than the pool": ([BatchStep("b", 0, 60), BatchStep("a", 4, 30)], [1] * 90, "kv_full"),
    "a token outside the vocabulary": ([BatchStep("a", 4, 3)], [1, 160, 3], "bad_request"),
    "a negative token": ([BatchStep("a", 4, 3)], [1, -1, 3], "bad_request"),
    "too few tokens": ([BatchStep("a", 4, 3)], [1, 2], "bad_request"),
    "a step without tokens": ([BatchStep("a", 4, 0)], [], "bad_request"),
    "a negative position": ([BatchStep("a", -1, 1)], [1], "bad_request"),
    "two steps of a session": ([BatchStep("a", 4, 1), BatchStep("a", 5, 1)], [1, 2], "bad_request"),
    "no step": ([], [], "bad_request"),
}


@pytest.mark.parametrize(("steps", "ids", "kind"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_run_is_refused_by_name_and_changes_nothing(folder, steps, ids, kind, pipeline) -> None:
    pipe = pipeline(
        folder, budget=5 * 16 * 4 * 2 * 2 * 16 * 4
    )  # 5 pages of 16 tokens: 4 blocks, k and v, 2 heads of 16, float32
    pipe.open("a", "b")
    (stage,) = pipe.stages
    pipe.logits("a", 0, [1, 2, 3, 4])
    before, pages = _state(stage, "a"), stage.cache.stats()
    with pytest.raises(ZrtError) as caught:
        pipe.forward(steps, torch.tensor(ids, dtype=torch.int64))
    assert caught.value.kind == kind
    after = _state(stage, "a")
    assert after[0] == before[0]
    assert torch.equal(after[1], before[1])
    assert stage.cache.have("b") == 0
    assert stage.cache.stats() == pages


@pytest.mark.parametrize(
    "x", [torch.zeros(2, 64, dtype=torch.float16), torch.zeros(2, 63), torch.zeros(3, 64), torch.zeros(2)]
)
def test_hidden_states_of_another_dtype_or_shape_are_refused(folder, x, pipeline) -> None:
    stage = pipeline(folder, ((0, 1), (2, 3))).stages[1]
    stage.cache.open("a")
    with pytest.raises(ZrtError, match="input is") as caught:
        stage.forward([BatchStep("a", 0, 2)], x)
    assert caught.value.kind == "bad_request"


class _OutOfMemory:
    """A linear layer that fails, as any product may."""

    def write(self, x: Tensor, out: Tensor) -> None:
        raise MemoryError

    add = write


def test_a_forward_that_fails_midway_leaves_the_sessions_as_they_were(folder, pipeline) -> None:
    pipe, ids = pipeline(folder), _ids(40, 1)
    (good,) = pipe.stages
    pipe.open("a", "b")
    pipe.logits("a", 0, ids[:20])
    before, pages = _state(good, "a"), good.cache.stats()
    blocks = (*good.shard.blocks[:2], replace(good.shard.blocks[2], gate_up=_OutOfMemory()), good.shard.blocks[3])
    failing = cpu_decoder(replace(good.shard, blocks=blocks), good.cache)
    with pytest.raises(MemoryError):
        failing.forward([BatchStep("a", 20, 20), BatchStep("b", 0, 20)], torch.tensor(ids))
    after = _state(good, "a")
    assert after[0] == before[0]
    assert torch.equal(after[1], before[1])
    assert good.cache.have("b") == 0
    assert good.cache.stats() == pages


def test_admitting_a_step_takes_its_pages_and_goes_back_where_it_must(folder, pipeline) -> None:
    (stage,) = pipeline(folder).stages
    stage.cache.open("s")
    stage.forward([BatchStep("s", 0, 40)], torch.tensor(_ids(40, 1)))
    stage.admit(BatchStep("s", 5, 12), torch.tensor(_ids(12, 2)))
    stage.admit(BatchStep("s", 5, 12), torch.tensor(_ids(12, 2)))
    assert stage.cache.have("s") == 5
    assert stage.cache.stats().used == 2


def test_a_device_that_is_not_supported_is_refused_before_anything_is_read(folder) -> None:
    assignment = Assignment(1, "tiny", "files", 0, 3, 4, "float32", 1 << 20, 64, 1, 16, 1.0)
    with pytest.raises(ZrtError, match="cuda") as caught:
        load_assigned(folder, assignment, device="cuda:0")
    assert caught.value.kind == "unsupported"
