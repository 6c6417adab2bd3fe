"""A block server that leads tensor-parallel ranks: a real cluster in this process, with the ranks
as its real children."""

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import Path

import pytest
import torch
from support.clusters import Local, cluster_file, make_coordinator, until_ready
from support.groups import GroupBreaks, alone, group_of, member, ranked, ranks_of, record_of
from support.loads import load, undisturbed
from support.peers import until

from zrt.actors.block_server.tensor_parallel.group import RankGroup
from zrt.actors.block_server.tensor_parallel.group_stats import GroupStats
from zrt.actors.block_server.tensor_parallel.operations import RankOperations
from zrt.actors.block_server.tensor_parallel.rank_processes import RankProcesses
from zrt.runtime.actor.actor import Actor
from zrt.runtime.actor.executor import ComputeExecutor
from zrt.runtime.cluster.file_loader import parse
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.members import Assignment, LoadProgress
from zrt.runtime.messages.ranks import SessionTruncated, TruncateSession
from zrt.runtime.messages.stats import GroupLoad
from zrt.runtime.models.architecture.spec import read_spec
from zrt.runtime.models.checkpoint.formats.dense import FLOAT32
from zrt.runtime.models.checkpoint.split import RankPart, part_bytes

PROMPT = [1, 17, 93, 4, 150, 62, 62, 8, 31, 120, 5]
LIMIT_S = 20.0


@pytest.fixture
def folder(make_model: Callable[..., Path]) -> Path:
    return make_model("qwen3", head_dim=16, vocab_size=157)


async def test_many_sessions_over_split_stages_say_what_they_say_over_one_process(folder: Path) -> None:
    prompts = [[5 + (7 * seed + 3 * token) % 140 for token in range(40)] for seed in range(4)]
    wanted = [await alone(folder, prompt, 24) for prompt in prompts]
    async with ranked(folder, (2, 2), limits_chunk=16) as cluster:
        got = await asyncio.gather(*(cluster.greedy(prompt, 24) for prompt in prompts))
        assert got == wanted
        await cluster.settled()
        longer = await cluster.greedy([*prompts[0], *wanted[0]], 8)  # goes on from cached pages
        for group in (group_of(cluster, 0), group_of(cluster, 1)):
            await until(lambda group=group: not group._numbers and group.engine.stats().used == 0)  # type: ignore[misc]
            assert group.broken is None
    assert longer == await alone(folder, [*prompts[0], *wanted[0]], 8)


async def test_a_leader_that_ends_can_still_say_how_it_is(folder: Path) -> None:
    """Its beats go on until the last rank is gone."""
    async with ranked(folder) as cluster:
        assert cluster.servers[0].load().kv.total
    assert cluster.servers[0].load().group is not None


async def test_clients_see_the_ranks_and_their_last_steps(folder: Path) -> None:
    async with ranked(folder) as cluster:
        await cluster.greedy(PROMPT, 12)
        load = await seen(cluster, lambda load: load.steps >= 12 and load.ranks[1].total_mb > 0)
        assert (load.state, load.world, load.rebuilds, load.fault) == ("ready", 2, 0, "")
        assert len(bytes.fromhex(load.comm_id)) == 8
        assert 0 < load.comm_age_s < 120
        assert [(one.rank, one.state, one.errors, one.error) for one in load.ranks] == [
            (0, "ready", 0, ""),
            (1, "ready", 0, ""),
        ]
        assert load.ranks[1].pid == member(cluster, 1).child.pid
        for rank in load.ranks:
            assert 0 < rank.free_mb < rank.total_mb
            assert 1 << 24 < rank.rss_bytes < rank.total_mb << 20
            assert rank.forward_us > 0
        assert load.fan_out_us + load.ranks[1].drain_us >= load.ranks[1].forward_us
        first, *others = load.recent
        assert (first.serial, first.op, first.sessions, first.rows) == (1, "step_batch", 1, len(PROMPT))
        assert [(one.sessions, one.rows) for one in others] == [(1, 1)] * len(others)
        assert [one.serial for one in load.recent] == list(range(1, load.steps + 1))
        assert [one.age_ms for one in load.recent] == sorted((one.age_ms for one in load.recent), reverse=True)
        for one in load.recent:
            assert one.errors == ["", ""]
            assert one.fan_out_us + one.drain_us[1] >= one.forward_us[1] > 0


async def no_pages_are_used(cluster: Local) -> None:
    """Once no session lives."""
    await cluster.settled()
    engines = [server.turns.engine for server in cluster.servers]
    await until(lambda: all(engine is not None and engine.stats().used == 0 for engine in engines))


async def seen(cluster: Local, wanted: Callable[[GroupLoad], bool]) -> GroupLoad:
    """The first stage's group as a client sees it, once it is so."""
    async with asyncio.timeout(LIMIT_S), aclosing(cluster.client.watch()) as watch:
        async for snapshot in watch:
            load = snapshot.actors[0].group
            if load is not None and wanted(load):
                break
    return load


async def test_the_process_of_a_rank_grows_by_its_part(make_model: Callable[..., Path]) -> None:
    """Of weights that are 100 MB as a whole; beside them a loaded rank takes its KV and a few
    MiB."""
    folder = make_model("llama", hidden_size=512, intermediate_size=2048, vocab_size=8001)
    kv_bytes, slack = 4 << 20, 12 << 20
    assignment = Assignment(
        serial=1,
        model=str(folder),
        weights="files",
        first=0,
        last=3,
        num_blocks=4,
        dtype="float32",
        kv_bytes=kv_bytes,
        context=64,
        sessions=2,
        chunk=16,
        idle_s=60.0,
        tp=2,
    )
    actor, executor, record = Actor("leader"), ComputeExecutor("leader"), GroupStats(2, os.getpid())
    await actor.start()
    group = RankGroup(actor, executor, record, device="cpu", threads=1, listener=GroupBreaks(executor))
    try:
        await group.form()
        before = record.load().ranks[1].rss_bytes
        await group.load(folder, assignment, lambda *_: None, lambda *_: None, lambda: False)
        grown = record.load().ranks[1].rss_bytes - before
    finally:
        await group.end()
        executor.close()
        await actor.stop()
    part = part_bytes(read_spec(folder), RankPart(1, 2), 0, 3, FLOAT32)
    assert part > 45e6
    assert part <= grown <= 1.05 * part + kv_bytes / 2 + slack


async def test_neither_a_cancelled_question_nor_an_input_error_harms_the_group(folder: Path) -> None:
    async with ranked(folder) as cluster:
        group = group_of(cluster)
        with pytest.raises(ZrtError) as caught:
            await group.operations.together(
                TruncateSession(99, 0), lambda: group.engine.truncate("x", 0), SessionTruncated, 9.0
            )
        assert caught.value.kind == "unknown_session"
        assert "rank 1 unknown_session" in caught.value.message
        failed = record_of(cluster).load().recent[-1]
        assert (failed.op, failed.errors) == ("truncate_session", ["unknown_session"] * 2)
        for pause in (0.0, 0.001, 0.005):
            task = asyncio.ensure_future(group.open("x", 4, (), 4))
            await asyncio.sleep(pause)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await group.close("x", None)
        for tokens in (1, 3, 20):  # of a session that its client leaves, in whatever the ranks do then
            stream = cluster.client.generate(token_ids=PROMPT, max_tokens=200, temperature=0.0)
            for _ in range(tokens):
                await stream.next_event()
            stream.cancel()
        assert await cluster.greedy(PROMPT, 8) == await alone(folder, PROMPT, 8)
        await no_pages_are_used(cluster)
        assert group_of(cluster) is group
        assert group.broken is None


async def test_a_replica_of_split_blocks_takes_over_from_one_that_is_drained(make_model: Callable[..., Path]) -> None:
    folder = make_model("llama")
    wanted = await undisturbed(folder, 4, 60)
    async with ranked(folder, (2,), replicas=2) as cluster:
        groups = [server.blocks.group for server in cluster.servers]
        async with load(cluster.client, 4, 60) as made:
            await made.have(5)
            for name in ("stage0.0", "stage0.1"):
                drained = await cluster.client.drain(name)
                assert (drained.left, drained.parked) == (0, 0)
                assert len(cluster.server(name).routed) == 0
                await cluster.client.undrain(name)
            assert await made.over() == wanted
        assert [server.blocks.group for server in cluster.servers] == groups
        await no_pages_are_used(cluster)


async def test_a_drained_stage_that_loses_a_rank_stays_drained_until_it_is_undrained(folder: Path) -> None:
    """Before it has loaded or after; and only what was drained can be."""
    async with ranked(folder, (2, 1)) as cluster:
        wanted = await cluster.greedy(PROMPT, 24)
        server = cluster.servers[0]
        for state in ("drained", "loading"):
            group = group_of(cluster)
            await cluster.client.drain(server.name)
            ranks_of(server)[0].kill()
            await until(
                lambda group=group, state=state: server.blocks.group not in (None, group) and server.state == state  # type: ignore[misc]
            )
            await server.catch_up()
            assert (await cluster.client.status()).actors[0].state == state
            await cluster.client.undrain(server.name)
            with pytest.raises(ZrtError, match="not drained") as raised:
                await cluster.client.undrain(server.name)
            assert raised.value.kind == "bad_request"
            assert await cluster.greedy(PROMPT, 24) == wanted
            assert group_of(cluster) is not group


async def test_ranks_keep_their_weights_when_the_coordinator_is_replaced(folder: Path) -> None:
    async with ranked(folder, (2, 1)) as cluster:
        wanted = await cluster.greedy(PROMPT, 24)
        old, group, ranks = cluster.coordinator, group_of(cluster), ranks_of(cluster.servers[0])
        engines = [server.turns.engine for server in cluster.servers]
        stream = cluster.client.generate(token_ids=PROMPT, max_tokens=200, temperature=0.0)
        await stream.next_event()
        await Actor.stop(old)  # without a word, as after SIGKILL
        text = cluster_file(folder, [None, None], tp=(2, 1), cluster_listen=old.endpoint)
        new = make_coordinator(parse(text, "test"), folder, cluster=old.cluster, port_s=5.0)
        loads: list[object] = []
        new.handle(LoadProgress, lambda body, envelope: loads.append(envelope))
        await new.start()
        cluster.stack.push_async_callback(new.stop)
        await until_ready(cluster.client)
        stream.cancel()
        assert await cluster.greedy(PROMPT, 24) == wanted
        assert (group_of(cluster), ranks_of(cluster.servers[0]), loads) == (group, ranks, [])
        assert [server.turns.engine for server in cluster.servers] == engines
        cluster.coordinator = new
        await no_pages_are_used(cluster)


INPUT, PAGES = ZrtError("bad_request", "no such token"), ZrtError("kv_full", "no page")
RESET, GONE = ZrtError("internal", "the connection was reset"), ZrtError("rank_failed", "no connection")
MEMORY = ZrtError("insufficient_memory", "no memory is left")


@pytest.mark.parametrize(
    ("errors", "known", "kind"),
    [
        ([INPUT, INPUT, INPUT], True, "bad_request"),
        ([INPUT, INPUT, PAGES], True, "rank_failed"),
        ([INPUT, INPUT, None], True, "rank_failed"),
        ([None, PAGES, None], True, "rank_failed"),
        ([PAGES, GONE, PAGES], True, "rank_failed"),
        ([GONE, GONE, GONE], True, "rank_failed"),
        ([RESET, RESET, RESET], False, "rank_failed"),
        ([RESET, GONE, RESET], False, "rank_failed"),
        ([None, MEMORY, None], True, "insufficient_memory"),
        ([GONE, MEMORY, GONE], True, "insufficient_memory"),
        ([MEMORY, GONE, RESET], False, "insufficient_memory"),
    ],
)
async def test_whatever_is_not_refused_by_all_alike_breaks_the_group(
    errors: Sequence[ZrtError | None], known: bool, kind: str
) -> None:
    """Also a collective that broke off for all, when the news of a rank's death comes last."""
    executor, record = ComputeExecutor("leader"), GroupStats(len(errors), 1)
    breaks = GroupBreaks(executor)
    processes = RankProcesses(Actor("leader"), record, torch.device("cpu"), 1, breaks.group_broken)
    operations = RankOperations("leader", executor, processes, record, breaks)
    error = operations._combined("step", errors, known=known)
    executor.close()
    assert error.kind == kind
    assert [str(one) for one in breaks.errors] == ([str(error)] if kind != "bad_request" else [])
    assert operations.broken is (breaks.errors[0] if breaks.errors else None)
    for rank, said in enumerate(errors[1:], 1):
        assert said is None or f"rank {rank} {said.kind}: {said.message}" in error.message


@pytest.mark.parametrize("step_first", [False, True])
def test_a_rank_that_is_lost_is_one_error(step_first: bool) -> None:
    """Whichever the leader hears of first: that its process ended, or that it answers a step no
    more."""
    ended, record = ZrtError("rank_failed", "killed by signal 9"), GroupStats(2, 1)
    for group in (1, 2):
        record.begin()
        for news in (step_first, not step_first):
            if news:
                times = {"fan_out_us": 0, "forward_us": [0, 0], "drain_us": [0, 0]}
                record.ran("step_batch", sessions=1, rows=1, **times, errors=[None, GONE])  # type: ignore[arg-type]
            else:
                record.blame(1, ended)
        load = record.load().ranks[1]
        assert (load.errors, load.error) == (group, str(ended))


@pytest.mark.chaos
async def test_a_leader_that_raises_alone_frees_the_ranks_and_rebuilds(folder: Path) -> None:
    async with ranked(folder) as cluster:
        wanted = await cluster.greedy(PROMPT, 48)
        first = group_of(cluster)
        session = asyncio.ensure_future(cluster.greedy(PROMPT, 48))
        turns = cluster.servers[0].turns.tally.turns
        await until(lambda: cluster.servers[0].turns.tally.turns >= turns + 8)
        (key,) = first._numbers
        await cluster.servers[0].turns.executor.run(
            first.engine.close, key
        )  # the leader alone does not hold it any more
        assert await asyncio.wait_for(session, 60) == wanted
        assert first.broken is not None
        assert group_of(cluster) is not first
