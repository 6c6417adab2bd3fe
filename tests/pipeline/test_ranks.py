"""A block server that leads tensor-parallel ranks: a real cluster in this process, with the ranks as its real children."""

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import psutil
import pytest
from clusters import Local, local_cluster
from peers import until

from zrt.actors.block_server import BlockServer
from zrt.actors.rank_group import RankGroup, RankProcess
from zrt.runtime.actor import Actor
from zrt.runtime.errors import ZrtError
from zrt.runtime.lane import Lane
from zrt.runtime.messages.ranks import SessionTruncated, TruncateSession
from zrt.runtime.supervise import Child, Restart

PROMPT = [1, 17, 93, 4, 150, 62, 62, 8, 31, 120, 5]
TOKENS = 48
LIMIT_S = 20.0  # detection, a new group and a load of a tiny model, on a machine that does other things as well


@asynccontextmanager
async def ranked(folder: Path, tp: Sequence[int] = (2,), **settings: object) -> AsyncIterator[Local]:
    """A cluster with these ranks in its stages; none of them outlives it."""
    async with local_cluster(folder, [None] * len(tp), tp=tp, **settings) as cluster:
        children = [child for server in cluster.servers for child in ranks_of(server)]
        yield cluster
        children += [child for server in cluster.servers for child in ranks_of(server)]
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


def group_of(cluster: Local, stage: int = 0) -> RankGroup:
    group = cluster.servers[stage]._group
    assert group is not None
    return group


def ranks_of(server: BlockServer) -> list[psutil.Process]:
    group = server._group
    return [psutil.Process(member.child.pid) for member in group._members if member.child.pid] if group else []


async def alone(folder: Path, prompt: Sequence[int] = PROMPT, tokens: int = TOKENS) -> list[int]:
    """What one process says."""
    async with local_cluster(folder, [None]) as cluster:
        return await cluster.greedy(prompt, tokens)


@pytest.fixture
def folder(make_model: Callable[..., Path]) -> Path:
    return make_model("qwen3", head_dim=16, vocab_size=157)


async def test_many_sessions_over_split_stages_say_what_they_say_over_one_process(folder: Path) -> None:
    prompts = [[5 + (7 * seed + 3 * token) % 140 for token in range(40)] for seed in range(4)]
    async with local_cluster(folder, [None]) as cluster:
        wanted = [await cluster.greedy(prompt, 24) for prompt in prompts]
    async with ranked(folder, (2, 2), limits_chunk=16) as cluster:
        got = await asyncio.gather(*(cluster.greedy(prompt, 24) for prompt in prompts))
        assert got == wanted
        await cluster.settled()
        longer = await cluster.greedy([*prompts[0], *wanted[0]], 8)  # goes on from cached pages
        for group in (group_of(cluster, 0), group_of(cluster, 1)):
            await until(lambda group=group: not group._numbers and group.engine.stats().used == 0)  # type: ignore[misc]
            assert group.broken is None
    assert longer == await alone(folder, [*prompts[0], *wanted[0]], 8)


async def test_the_monitor_sees_the_ranks(folder: Path) -> None:
    async with ranked(folder) as cluster:
        await cluster.greedy(PROMPT, 12)
        async with asyncio.timeout(LIMIT_S), aclosing(cluster.client.watch()) as watch:
            async for seen in watch:
                load = seen.actors[0].group
                if load is not None and load.steps > 0 and load.ranks[1].total_mb > 0:
                    break
        assert load is not None
        assert (load.state, load.world, load.rebuilds) == ("ready", 2, 0)
        assert [one.rank for one in load.ranks] == [0, 1]
        assert load.ranks[1].pid == group_of(cluster)._members[0].child.pid
        assert load.ranks[0].forward_us > 0
        assert load.ranks[1].drain_us >= load.ranks[1].forward_us > 0


async def test_neither_a_cancelled_question_nor_an_input_error_harms_the_group(folder: Path) -> None:
    async with ranked(folder) as cluster:
        group = group_of(cluster)
        with pytest.raises(ZrtError) as caught:
            await group._together(TruncateSession(99, 0), lambda: group.engine.truncate("x", 0), SessionTruncated, 9.0)
        assert caught.value.kind == "unknown_session"
        assert "rank 1 unknown_session" in caught.value.message
        for pause in (0.0, 0.001, 0.005):
            task = asyncio.ensure_future(group.open("x", 4, (), 4))
            await asyncio.sleep(pause)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await group.close("x", None)
        assert group.broken is None
        assert await cluster.greedy(PROMPT, 8) == (await alone(folder))[:8]


@pytest.mark.parametrize(
    ("leader", "rank"),
    [
        (RuntimeError("the connection was reset"), ZrtError("rank_failed", "no connection")),
        (RuntimeError("the connection was reset"), ZrtError("internal", "the connection was reset")),
        (ZrtError("kv_full", "no page"), ZrtError("rank_failed", "no connection")),
        (ZrtError("kv_full", "no page"), None),
        (None, ZrtError("kv_full", "no page")),
    ],
)
async def test_whatever_is_not_refused_by_all_alike_breaks_the_group(
    leader: Exception | None, rank: ZrtError | None
) -> None:
    """Also when the news of a rank's death comes last."""
    lost: list[ZrtError] = []
    lane = Lane("leader")
    group = RankGroup(Actor("leader"), lane, world=2, device="cpu", threads=1, lost=lost.append, stuck=lambda: None)
    group._members.append(RankProcess(1, Child(group._supervisor, "rank1", [], {}, 1.0, Restart(budget=0))))
    parts: list[asyncio.Future[int]] = []
    for error in (leader, rank):
        part = asyncio.get_running_loop().create_future()
        part.set_result(0) if error is None else part.set_exception(error)
        parts.append(part)
    with pytest.raises(ZrtError) as caught:
        group._combine("step", parts[0], parts[1:])
    lane.close()
    assert caught.value.kind == "rank_failed"
    assert [error.kind for error in lost] == ["rank_failed"]


# ---- ranks that die, hang or raise ----------------------------------------------------------------------------------

FAULTS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
TURNS = {"idle": 0, "prefill": 3, "decode": 20}  # that have run when it happens
OFTEN = {("killed", "decode"), ("stopped", "prefill")}
MATRIX = [
    pytest.param(fault, moment, rank, id=f"rank {rank} {fault} at {moment}", marks=[] if often else pytest.mark.chaos)
    for fault in FAULTS
    for moment in (*TURNS, "load")
    for rank in (1, 3)
    for often in [rank == 1 and (fault, moment) in OFTEN]
]


@pytest.mark.parametrize(("fault", "moment", "rank"), MATRIX)
async def test_a_rank_that_is_lost_costs_time_and_no_token(
    fault: str, moment: str, rank: int, make_model: Callable[..., Path]
) -> None:
    folder = make_model("llama")
    prompt = [5 + 7 * token % 140 for token in range(120)]
    wanted = await alone(folder, prompt)
    world = rank + 1
    async with ranked(folder, (world,), limits_chunk=16) as cluster:
        server = cluster.servers[0]
        if moment == "load":
            first = server._group
            lose(cluster, signal.SIGKILL, 1)
            await until(lambda: server._group not in (first, None) and len(ranks_of(server)) == world - 1)
            if fault == "stopped":  # one that is not heard yet is given its time to start
                await until(lambda: all(member.address.endpoint for member in group_of(cluster)._members))
            session = asyncio.ensure_future(cluster.greedy(prompt, TOKENS))
        else:
            session = asyncio.ensure_future(cluster.greedy(prompt, TOKENS))
            await until(lambda: server.turns.tally.turns >= TURNS[moment])
        lose(cluster, FAULTS[fault], rank)
        started = time.monotonic()
        assert await asyncio.wait_for(session, 60) == wanted
        assert time.monotonic() - started < 2 * LIMIT_S
        await until(lambda: server._rebuilds >= (2 if moment == "load" else 1))
        assert await asyncio.wait_for(cluster.greedy(prompt, TOKENS), 60) == wanted


def lose(cluster: Local, number: int, rank: int) -> None:
    os.kill(group_of(cluster)._members[rank - 1].child.pid, number)


@pytest.mark.chaos
@pytest.mark.timeout(900)
async def test_50_ranks_killed_in_a_row(folder: Path) -> None:
    draw = random.Random(5)
    wanted = await alone(folder)
    async with ranked(folder) as cluster:
        for _ in range(50):
            session = asyncio.ensure_future(cluster.greedy(PROMPT, TOKENS))
            await asyncio.sleep(draw.random())
            if ranks_of(cluster.servers[0]):
                lose(cluster, draw.choice(list(FAULTS.values())), 1)
            assert await asyncio.wait_for(session, 60) == wanted


@pytest.mark.chaos
async def test_a_lost_rank_is_replaced_within_the_limit(folder: Path) -> None:
    async with ranked(folder) as cluster:
        started = time.monotonic()
        first = group_of(cluster)
        lose(cluster, signal.SIGSTOP, 1)
        await until(lambda: first.broken is not None)
        await until(lambda: cluster.servers[0].state == "ready")
        assert time.monotonic() - started < LIMIT_S
        assert group_of(cluster) is not first


@pytest.mark.chaos
async def test_a_leader_that_raises_alone_frees_the_ranks_and_rebuilds(folder: Path) -> None:
    async with ranked(folder) as cluster:
        wanted = await cluster.greedy(PROMPT, TOKENS)
        first = group_of(cluster)
        turn, count = first.engine.turn, 0

        def fails_once(*arguments: object) -> object:
            nonlocal count
            count += 1
            if count == 12:
                raise RuntimeError("out of memory")
            return turn(*arguments)  # type: ignore[arg-type]

        first.engine.turn = fails_once  # type: ignore[method-assign, assignment]
        assert await asyncio.wait_for(cluster.greedy(PROMPT, TOKENS), 60) == wanted
        assert first.broken is not None
        assert group_of(cluster) is not first
