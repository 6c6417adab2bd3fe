"""A prompt that is too much for a stage, each time it is run: it ends with what it did, and the
others go on."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.clusters import Local, local_cluster
from support.groups import SPLIT, ranked, ranks_of, record_of
from support.references import reference

from zrt.actors.coordinator.sessions.quarantine import LOSSES
from zrt.runtime.compute.engine import Engine
from zrt.runtime.compute.turn import TurnResult, Work
from zrt.runtime.errors import ZrtError

HEAVY = [5 + 7 * token * token % 143 for token in range(150)]
LIGHT = [[9, 8, 7, number] for number in (1, 2, 3)]
TOKENS = 60
TWO: list[str | None] = ["0-1", "2-3"]


@pytest.fixture(scope="module")
def said(make_model: Callable[..., Path]) -> tuple[Path, list[list[int]]]:
    """A model, and what transformers generates with it."""
    folder = make_model("llama", eos_token_id=None, **SPLIT)
    return folder, [reference(folder, prompt, TOKENS)[0] for prompt in LIGHT]


async def run_together(cluster: Local) -> tuple[list[list[int]], ZrtError]:
    """What the light ones are answered while the heavy one is run, and what that ends with."""
    light = [asyncio.create_task(cluster.greedy(prompt, TOKENS)) for prompt in LIGHT]
    with pytest.raises(ZrtError) as raised:
        await asyncio.wait_for(cluster.greedy(HEAVY, TOKENS), 100)
    return await asyncio.wait_for(asyncio.gather(*light), 60), raised.value


def is_heavy(works: Sequence[Work]) -> bool:
    return any(work.seq_pos + work.n > 100 for work in works)


def exhaust_memory(cluster: Local) -> None:
    raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: 9 bytes")


def kill_a_rank(cluster: Local) -> None:
    ranks_of(cluster.servers[0])[0].kill()


@pytest.mark.parametrize(
    ("harm", "kind"),
    [(exhaust_memory, "insufficient_memory"), pytest.param(kill_a_rank, "rank_failed", marks=pytest.mark.chaos)],
)
async def test_it_breaks_a_group_of_ranks_a_few_times(
    said: tuple[Path, list[list[int]]],
    harm: Callable[[Local], None],
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, wanted = said
    turn = Engine.turn
    async with ranked(folder, (2,), kv_bytes="16MiB") as cluster:

        def too_much(engine: Engine, works: Sequence[Work], *rest: Any) -> TurnResult:
            if is_heavy(works):
                harm(cluster)
            return turn(engine, works, *rest)

        monkeypatch.setattr(Engine, "turn", too_much)
        answers, error = await run_together(cluster)
        assert answers == wanted
        assert error.kind == kind
        assert f"each of the last {LOSSES} times that this session was run its stage was lost" in error.message
        assert record_of(cluster).load().rebuilds == LOSSES


async def test_it_ends_its_block_server_a_few_times(
    said: tuple[Path, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, wanted = said
    turn, loop, lost = Engine.turn, asyncio.get_running_loop(), []
    async with local_cluster(folder, TWO) as cluster:

        async def start_again() -> None:
            await cluster.lose("stage1")
            await cluster.join("stage1")

        def too_much(engine: Engine, works: Sequence[Work], *rest: Any) -> TurnResult:
            if is_heavy(works) and engine.shard.is_last and engine not in lost:
                asyncio.run_coroutine_threadsafe(start_again(), loop)
                lost.append(engine)
                raise ZrtError("cancelled", "nobody hears this any more")
            return turn(engine, works, *rest)

        monkeypatch.setattr(Engine, "turn", too_much)
        answers, error = await run_together(cluster)
        assert answers == wanted
        assert error.kind == "stage_lost"
        assert "stage1 is gone" in error.message
        assert len(lost) == LOSSES


async def test_memory_that_one_process_lacks_ends_it_alone(
    said: tuple[Path, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, wanted = said
    turn, tried = Engine.turn, []
    async with local_cluster(folder, [None]) as cluster:

        def too_much(engine: Engine, works: Sequence[Work], *rest: Any) -> TurnResult:
            if is_heavy(works):
                tried.append(works)
                exhaust_memory(cluster)
            return turn(engine, works, *rest)

        monkeypatch.setattr(Engine, "turn", too_much)
        answers, error = await run_together(cluster)
    assert answers == wanted
    assert error.kind == "insufficient_memory"
    assert len(tried) >= LOSSES  # a prompt is run in several turns
