"""Many sessions at once: batched with others, cut into chunks, sharing prefixes, preempted,
cancelled; and always the same tokens."""

import asyncio
import math
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support.broken import EMBEDDING, edit
from support.clusters import Local, local_cluster

from zrt.actors.block_server.step_owner import Turn
from zrt.actors.block_server.turn_delivery import RoutedStep
from zrt.actors.coordinator.sessions.generation import Generation
from zrt.actors.coordinator.sessions.session import SessionState
from zrt.runtime.compute.turn import Outcome
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.client import Progress

TWO: list[str | None] = ["0-1", "2-3"]
WAIT_S = 60.0


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 160), k=length)


async def settled(cluster: Local) -> None:
    """Every stage has dropped what it held for sessions: used pages are zero and each cached one
    can be had."""
    await cluster.settled()
    for server in cluster.servers:
        engine = server.turns.engine
        assert engine is not None
        stats = await server.turns.executor.run(engine.stats)
        assert stats.used == 0
        assert stats.free + stats.cached == stats.total
        await server.turns.executor.run(_take_everything, engine, stats.total)


def _take_everything(engine: object, pages: int) -> None:
    cache = engine.cache  # type: ignore[attr-defined]
    cache.open("probe")
    cache._pages.reserve("probe", pages * 16)
    cache.close("probe")


async def test_each_of_many_sessions_gets_what_it_gets_alone(make_model: Callable[..., Path]) -> None:
    folder = make_model("llama")
    prompts = [prompt(length, length) for length in range(3, 150, 10)] + [prompt(5, 1)]
    async with local_cluster(folder, TWO) as cluster:
        alone = [await cluster.greedy(one, 60 + index) for index, one in enumerate(prompts)]
    async with local_cluster(folder, TWO) as cluster:
        together = await asyncio.gather(*(cluster.greedy(one, 60 + index) for index, one in enumerate(prompts)))
        turns, steps = next((s.turns.tally.turns, s.turns.tally.steps) for s in cluster.servers)
        await settled(cluster)
    assert together == alone
    assert len(prompts) == 16
    assert steps > 3 * turns  # they did share turns, once all prompts had joined


@pytest.mark.parametrize("length", [k * 32 + d for k in (1, 3) for d in (-1, 0, 1)])
async def test_a_prompt_in_chunks_equals_the_whole(make_model: Callable[..., Path], length: int) -> None:
    folder = make_model("qwen2")
    async with local_cluster(folder, TWO) as whole, local_cluster(folder, TWO, limits_chunk=32) as chunked:
        assert await chunked.greedy(prompt(length, 7), 8) == await whole.greedy(prompt(length, 7), 8)
        assert chunked.servers[0].turns.tally.turns > whole.servers[0].turns.tally.turns or length <= 32


async def test_chunks_of_one_prompt_run_on_both_stages_at_once(make_model: Callable[..., Path]) -> None:
    """The first stage does not wait for the second: when the second begins its first chunk, the
    first has another."""
    async with local_cluster(make_model("llama"), TWO, limits_chunk=16) as cluster:
        first, second = (server.turns for server in cluster.servers)
        seen: list[int] = []
        delivery = cluster.servers[1].routed._delivery
        deliver = delivery.deliver

        async def watch(turn: Turn, ran: Sequence[tuple[RoutedStep, Outcome]]) -> None:
            seen.append(first.tally.turns - second.tally.turns)
            await deliver(turn, ran)

        delivery.deliver = watch  # type: ignore[method-assign]
        await cluster.greedy(prompt(200, 3), 2)
    assert max(seen) >= 1


async def test_an_equal_prefix_is_not_run_again(make_model: Callable[..., Path]) -> None:
    async with local_cluster(make_model("llama"), TWO) as cluster:
        system = prompt(64, 1)
        first = await cluster.greedy([*system, 5, 6, 7], 20)
        before = [server.turns.tally.tokens for server in cluster.servers]
        again = await cluster.greedy([*system, 5, 6, 7], 20)
        ran = [server.turns.tally.tokens - b for server, b in zip(cluster.servers, before, strict=True)]
        assert again == first
        assert ran == [3 + 19, 3 + 19]  # 64 of 67 prompt tokens were there, the last sampled token is not run
        before = [server.turns.tally.tokens for server in cluster.servers]
        await cluster.greedy([*system, 5, 6, 7, *first[:16], 9], 4)  # the next turn of a chat
        ran = [server.turns.tally.tokens - b for server, b in zip(cluster.servers, before, strict=True)]
        assert ran == [4 + 3, 4 + 3]
        await settled(cluster)


async def test_sessions_of_one_prefix_at_once_agree(make_model: Callable[..., Path]) -> None:
    async with local_cluster(make_model("llama"), TWO, limits_chunk=32) as cluster:
        shared = prompt(100, 2)
        wanted = await cluster.greedy(shared, 12)
        assert await asyncio.gather(*(cluster.greedy(shared, 12) for _ in range(6))) == [wanted] * 6
        await settled(cluster)


async def test_running_out_of_pages_preempts_and_nobody_notices(make_model: Callable[..., Path]) -> None:
    """Room for about three whole sessions; six run, and each gets its tokens."""
    folder = make_model("llama")
    prompts = [prompt(20, seed) for seed in range(6)]
    async with local_cluster(folder, TWO) as roomy:
        wanted = [await roomy.greedy(one, 100) for one in prompts]
        page = roomy.servers[0].turns.engine.stats().page_bytes  # type: ignore[union-attr]
    async with local_cluster(folder, TWO, kv_bytes=24 * page) as cluster:
        phases: set[str] = set()

        async def one(ids: list[int]) -> list[int]:
            got = []
            stream = cluster.client.generate(token_ids=ids, max_tokens=100, temperature=0.0)
            while not stream.over:
                event = await stream.next_event()
                if isinstance(event, Progress):
                    phases.add(event.phase)
                got += getattr(event, "token_ids", [])
            return got

        assert await asyncio.gather(*(one(ids) for ids in prompts)) == wanted
        await settled(cluster)
    assert "preempted" in phases or "replaying" in phases


async def test_a_preempted_session_comes_back_only_once_it_has_left_and_no_other_is_forgotten_meanwhile(
    make_model: Callable[..., Path],
) -> None:
    """Its stages take long to let it go: others end, and others find no page, before that."""
    folder = make_model("llama")
    asked = [(prompt(20, seed), 40 + 12 * seed) for seed in range(8)]
    async with local_cluster(folder, TWO) as roomy:
        wanted = [await roomy.greedy(*one) for one in asked]
        page = roomy.servers[0].turns.engine.stats().page_bytes  # type: ignore[union-attr]
    async with local_cluster(folder, TWO, kv_bytes=24 * page) as cluster:
        routing = cluster.coordinator.generations.rerouting.routing
        leave_now, left = routing.leave_now, []

        async def leave_slowly(generation: Generation) -> None:
            await leave_now(generation)
            await asyncio.sleep(0.3)
            left.append(generation.session.state)

        routing.leave_now = leave_slowly  # type: ignore[method-assign]
        async with asyncio.timeout(WAIT_S):
            assert await asyncio.gather(*(cluster.greedy(*one) for one in asked)) == wanted
        await settled(cluster)
        assert set(left) == {SessionState.PREEMPTED}


async def test_what_could_never_fit_is_refused_with_the_numbers(make_model: Callable[..., Path]) -> None:
    folder = make_model("llama")
    async with local_cluster(folder, TWO, kv_bytes="64KiB") as cluster:
        with pytest.raises(ZrtError, match="need 13 KV pages and a stage has 8") as caught:
            await cluster.greedy(prompt(8, 1), 200)
        assert caught.value.kind == "kv_full"
        assert len(await cluster.greedy(prompt(8, 1), 20)) == 20


async def test_a_full_queue_is_overloaded_and_places_are_told(make_model: Callable[..., Path]) -> None:
    async with local_cluster(make_model("llama"), TWO, limits_sessions=1, limits_queue=2) as cluster:
        streams = [cluster.client.generate(token_ids=prompt(5, n), max_tokens=200, temperature=0.0) for n in range(3)]
        for stream in streams:
            await stream.next_event()  # accepted
        place = await streams[2].next_event()
        assert isinstance(place, Progress)
        assert (place.phase, place.done, place.total) == ("queued", 1, 2)
        with pytest.raises(ZrtError, match="retry after") as caught:
            await cluster.greedy(prompt(5, 9), 5)
        assert caught.value.kind == "overloaded"
        for stream in streams[::-1]:
            await stream.aclose()
        assert len(await cluster.greedy(prompt(5, 9), 5)) == 5
        await settled(cluster)


async def test_without_a_queue_those_are_served_that_can_start_at_once(make_model: Callable[..., Path]) -> None:
    async with local_cluster(make_model("llama"), TWO, limits_sessions=2, limits_queue=0) as cluster:
        wanted = await cluster.greedy(prompt(5, 9), 5)
        got: dict[int, list[int]] = {0: [], 1: []}
        async for piece in cluster.client.generate(token_ids=prompt(5, 9), max_tokens=5, temperature=0.0, n=2):
            got[piece.choice] += piece.token_ids
        assert got == {0: wanted, 1: wanted}
        with pytest.raises(ZrtError, match="n = 3, but 2 may run and wait at once") as caught:
            await cluster.client.generate(token_ids=prompt(5, 9), n=3).next_event()
        assert caught.value.kind == "bad_request"
        await settled(cluster)


async def test_starts_and_cancels_at_any_moment_leave_nothing(make_model: Callable[..., Path]) -> None:
    """Sessions are cancelled after a random number of events: queued, prefilling, decoding, or when
    they are over."""
    chosen = random.Random(5)
    async with local_cluster(make_model("llama"), TWO, limits_sessions=6, limits_chunk=16) as cluster:
        wanted = await cluster.greedy(prompt(40, 0), 16)

        async def one(seed: int) -> None:
            stream = cluster.client.generate(
                token_ids=prompt(chosen.randint(1, 90), seed), max_tokens=chosen.randint(1, 60), temperature=0.0
            )
            for _ in range(chosen.randint(1, 25)):
                if stream.over:
                    break
                await stream.next_event()
            session = stream.accepted.session if stream.accepted else 0
            await stream.aclose()
            if chosen.random() < 0.2:
                with pytest.raises(ZrtError, match="is running"):
                    await cluster.client.cancel(session or 1)

        for start in range(0, 300, 20):
            await asyncio.gather(*(one(start + n) for n in range(20)))
        await settled(cluster)
        assert len(cluster.coordinator.generations) == 0
        assert await cluster.greedy(prompt(40, 0), 16) == wanted


async def test_equal_sessions_are_served_equally(make_model: Callable[..., Path]) -> None:
    """32 sessions; when the first has 150 tokens, none that still runs is far behind."""
    async with local_cluster(make_model("llama"), TWO) as cluster:
        counts = [0] * 32
        going = set(range(32))
        enough = asyncio.Event()

        async def one(index: int) -> None:
            async for piece in cluster.client.generate(token_ids=prompt(9, index), max_tokens=200, temperature=0.0):
                counts[index] += len(piece.token_ids)
                if counts[index] >= 150:
                    enough.set()
            going.discard(index)

        tasks = [asyncio.create_task(one(index)) for index in range(32)]
        async with asyncio.timeout(WAIT_S):
            await enough.wait()
        served = [counts[index] for index in going]
        await asyncio.gather(*tasks)
    assert len(served) >= 8
    assert max(served) <= 1.5 * min(served)


async def test_slots_keep_batches_whole_on_every_stage(make_model: Callable[..., Path]) -> None:
    """16 sessions on two stages decode in two batches of about eight, not in crumbs."""
    async with local_cluster(make_model("llama"), TWO) as cluster:
        counts = [0] * 16
        all_run, enough = asyncio.Event(), asyncio.Event()

        async def one(index: int) -> None:
            stream = cluster.client.generate(
                token_ids=prompt(9, index), max_tokens=200, temperature=0.0, ignore_eos=True
            )
            async for piece in stream:
                counts[index] += len(piece.token_ids)
                if min(counts) >= 20:
                    all_run.set()
                if max(counts) >= 180:
                    enough.set()

        def tallies() -> list[tuple[int, int]]:
            return [(server.turns.tally.turns, server.turns.tally.steps) for server in cluster.servers]

        tasks = [asyncio.create_task(one(index)) for index in range(16)]
        async with asyncio.timeout(WAIT_S):
            await all_run.wait()
            before = tallies()
            await enough.wait()
            after = tallies()
        await asyncio.gather(*tasks)
    for (turns, steps), (more_turns, more_steps) in zip(before, after, strict=True):
        assert (more_steps - steps) / (more_turns - turns) >= 0.8 * 16 / 2


async def test_a_session_whose_logits_are_not_finite_fails_alone(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Its prompt has a token whose embedding overflows; the sessions of its turns get their
    tokens."""
    folder = shutil.copytree(make_model("llama", eos_token_id=None), tmp_path / "model")
    edit(lambda tensors: tensors[EMBEDDING][7].fill_(math.inf))(folder)
    async with local_cluster(folder, ["0-1", "2-3"]) as cluster:
        wanted = await cluster.greedy([5, 17, 99], 200)
        answer = asyncio.create_task(cluster.greedy([5, 17, 99], 200))
        with pytest.raises(ZrtError, match="not finite") as caught:
            await cluster.greedy([5, 7, 99], 20)
        assert caught.value.kind == "internal"
        assert await answer == wanted
        assert await cluster.used_pages() == 0
