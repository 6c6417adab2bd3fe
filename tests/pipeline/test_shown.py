"""What clients are shown of processes is what these know of themselves at that moment: with beats
so rare that none comes by chance."""

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import pytest
from support.clusters import Local, local_cluster, memory_for
from support.loads import load
from support.tiny_models import reference

from zrt.actors.block_server.block_server import BlockServer
from zrt.actors.coordinator.fleet import fresh_beats, membership
from zrt.runtime.messages.client import Cluster
from zrt.runtime.messages.cluster import ActorInfo

SILENT_MS = 5000
"""Far less than the time between two beats here."""

TWO = ["0-1", "2-3"]
PROMPT = [5, 17, 99, 3, 42]
TOKENS = 12
FIELDS = ("sessions", "waiting", "turns", "steps", "kv", "handed")
"""Fields of a process that are as its own load says."""


@pytest.fixture(scope="module")
def model(make_model: Callable[..., Path]) -> Path:
    return make_model("llama", num_hidden_layers=4)


@pytest.fixture
def _rare_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "BEAT_MS", 3_600_000)
    monkeypatch.setattr(membership, "SUSPICION_S", 3600.0)


def shown(seen: Cluster, name: str) -> ActorInfo:
    return next(info for info in seen.actors if info.name == name)


def is_true(cluster: Local, seen: Cluster) -> None:
    """Every block server is shown as it is."""
    for server in cluster.servers:
        info, own = shown(seen, server.name), server.load()
        assert {field: getattr(info, field) for field in FIELDS} == {field: getattr(own, field) for field in FIELDS}
        assert (info.state, info.pid, info.rss_bytes > 0) == (server.state, server.registration().pid, True)
        assert info.silent_ms < SILENT_MS


async def one_answer(cluster: Local) -> None:
    await cluster.greedy(PROMPT, TOKENS)


async def one_that_is_cancelled(cluster: Local) -> None:
    async with load(cluster.client, 1, 200) as made:
        (info,) = (await cluster.client.status()).sessions
        await cluster.client.cancel(info.session)
        await made.over()


async def drained(cluster: Local) -> None:
    await cluster.client.drain("stage1", timeout=0)


async def undrained(cluster: Local) -> None:
    await cluster.client.undrain("stage1")


CHANGES = [one_answer, one_that_is_cancelled, drained, undrained]


@pytest.mark.usefixtures("_rare_beats")
async def test_a_status_right_after_a_change_is_true(model: Path) -> None:
    async with local_cluster(model, TWO, metrics_listen="tcp://127.0.0.1:0") as cluster:
        is_true(cluster, await cluster.client.status())
        turns = 0
        for change in CHANGES:
            await change(cluster)
            seen = await cluster.client.status()
            is_true(cluster, seen)
            kv = shown(seen, "stage1").kv
            assert kv is not None
            assert (kv.used, seen.sessions, shown(seen, "stage1").turns >= turns) == (0, [], True)
            turns = shown(seen, "stage1").turns
        assert turns > 0
        text = (await cluster.coordinator.exposition()).decode()
        await cluster.greedy(PROMPT, TOKENS)
        later = (await cluster.coordinator.exposition()).decode()
        told = f'zrt_turns_total{{actor="stage1",stage="1"}} {float(turns)}\n'
        assert (told in text, told in later) == (True, False)
        assert f'zrt_turns_total{{actor="stage1",stage="1"}} {float(cluster.server("stage1").load().turns)}\n' in later


@pytest.mark.usefixtures("_rare_beats")
async def test_a_watch_that_is_quicker_than_beats_shows_what_has_changed(model: Path) -> None:
    async with local_cluster(model, TWO) as cluster, aclosing(cluster.client.watch(every=0.1)) as watch:
        await cluster.greedy(PROMPT, TOKENS)
        turns = [server.load().turns for server in cluster.servers]
        async with asyncio.timeout(20):
            async for seen in watch:
                if [shown(seen, server.name).turns for server in cluster.servers] == turns:
                    break
        assert all(turns)


@pytest.mark.usefixtures("_rare_beats")
async def test_a_process_that_hangs_is_shown_with_the_age_of_what_is_known(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with local_cluster(model, TWO) as cluster:
        await cluster.client.status()

        async def hang(_: BlockServer) -> None:
            await asyncio.sleep(60)

        server = cluster.server("stage0")
        monkeypatch.setattr(server, "settled", hang.__get__(server))
        began = time.monotonic()
        await cluster.client.status()
        await cluster.greedy(PROMPT, TOKENS)
        seen = await cluster.client.status()
        assert time.monotonic() - began < fresh_beats.ANSWER_S
        assert shown(seen, "stage0").turns == 0
        assert shown(seen, "stage0").silent_ms >= 1000 * fresh_beats.ROUND_S
        assert shown(seen, "stage1").turns == cluster.server("stage1").load().turns > 0


async def test_a_spare_that_is_too_small_says_so_once_for_as_long_as_it_is(model: Path) -> None:
    async with local_cluster(model, TWO) as cluster:
        small = memory_for(model, 1)
        await cluster.join("small", small)
        assert not shown(await cluster.client.status(), "small").unused
        await cluster.lose("stage1")
        seen = await cluster.until(lambda seen: any(info.unused for info in seen.actors))
        unused = shown(seen, "small").unused
        assert unused.startswith("too little memory for stage 1 (blocks 2-3), which lacks a block server: that takes ")
        await cluster.join("smaller", small - 1)
        await cluster.join("spare")
        seen = await cluster.until(lambda seen: seen.ready)
        assert (shown(seen, "spare").stage, [info.unused for info in seen.actors if info.unused]) == (1, [])
        told = [(one.where, one.text) for one in cluster.coordinator.event_log.since(0) if "unused" in one.text]
        assert told[0] == ("small", f"stays unused: {unused}")
        assert [name for name, _ in told] == ["small", "smaller"]
        ready = [one.text for one in cluster.coordinator.event_log.since(0) if one.where == "spare"]
        assert "is ready, as stage 1" in ready


async def test_a_worker_is_a_reserve_until_layers_of_it_are_used_and_again_afterwards(model: Path) -> None:
    def state(seen: Cluster) -> str:
        return next((info.state for info in seen.actors if info.name == "attic"), "")

    async with local_cluster(model, [None], helped=True, lend={}) as cluster:
        worker = await cluster.join_worker("attic")
        await worker.there()
        seen = await cluster.until(lambda seen: state(seen) == "ready")
        assert await cluster.greedy(PROMPT, TOKENS) == reference(model, PROMPT, TOKENS)
        lend = shown(seen, "stage0").lend
        assert lend is not None
        assert [(one.state, bool(one.layers)) for one in lend.workers] == [("ready", True)]
        await cluster.lose("stage0")
        await cluster.until(lambda seen: state(seen) == "reserve")
        assert worker.state == "ready"  # it has the layers still
