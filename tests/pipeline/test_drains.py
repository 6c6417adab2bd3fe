"""Taking block servers out of service, and the whole cluster: nothing is lost, and everybody is
told."""

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from threading import Event

import msgspec
import pytest
import zmq
import zmq.asyncio
from support.clusters import Local, local_cluster
from support.loads import load, undisturbed
from support.peers import until

from zrt.actors.block_server.block_server import BlockServer
from zrt.actors.coordinator.fleet import drains
from zrt.runtime.compute.engine import Engine
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.client import Cluster, Down, Drained
from zrt.runtime.messages.members import Assignment, LoadProgress, StateChanged
from zrt.runtime.transport.outbox import Frames

TWO: list[str | None] = ["0-1", "2-3"]
COUNT, LENGTH = 6, 250


@pytest.fixture(scope="module")
def folder(make_model: Callable[..., Path]) -> Path:
    return make_model("llama")


@pytest.fixture(autouse=True)
def told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drain hears of what it waits for: it is not what it tells in between that makes it look."""
    monkeypatch.setattr(drains, "TELL_S", 3600.0)


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[list[int]]:
    return asyncio.run(undisturbed(folder, COUNT, LENGTH))


async def state(cluster: Local, name: str) -> str:
    return next(info.state for info in (await cluster.client.status()).actors if info.name == name)


async def test_a_rolling_drain_of_every_block_server_loses_no_token(folder: Path, wanted: list[list[int]]) -> None:
    async with local_cluster(folder, TWO, replicas=2, model_context=512) as cluster:
        names = [server.name for server in cluster.servers]
        engines = [server.turns.engine for server in cluster.servers]
        async with load(cluster.client, COUNT, LENGTH) as made:
            for name in names:
                drained = await cluster.client.drain(name)
                assert (drained.left, drained.parked, drained.moved + drained.finished > 0) == (0, 0, True)
                assert await state(cluster, name) == "drained"
                assert len(cluster.server(name).routed) == 0
                await made.have(10)
                assert len(cluster.server(name).routed) == 0
                await cluster.client.undrain(name)
                assert await state(cluster, name) == "ready"
            assert await made.over() == wanted
        assert made.phases <= {"queued", "prefill", "decoding", "replaying"}
        assert [server.turns.engine for server in cluster.servers] == engines  # the same weights all along
        assert await cluster.used_pages() == 0


async def test_without_another_replica_sessions_may_finish(folder: Path, wanted: list[list[int]]) -> None:
    """A session that comes meanwhile waits for the stage; it is not refused."""
    told: list[Drained] = []
    async with local_cluster(folder, TWO, model_context=512) as cluster:
        async with load(cluster.client, COUNT, LENGTH) as made:
            drain = asyncio.create_task(cluster.client.drain("stage1", progress=told.append))
            await cluster.until(lambda seen: any(info.state == "draining" for info in seen.actors))
            late = asyncio.create_task(cluster.greedy([5, 17, 99], 8))
            assert await made.over() == wanted
            assert made.phases <= {"queued", "prefill", "decoding"}
        assert (await drain).finished == COUNT
        assert [(event.state, event.left) for event in told[:1]] == [("draining", COUNT)]
        assert not late.done()
        await cluster.client.undrain("stage1")
        assert len(await late) == 8
        assert await cluster.used_pages() == 0


async def _undrain(cluster: Local) -> None:
    await cluster.client.undrain("stage1")


async def _a_restart(cluster: Local) -> None:
    await cluster.lose("stage1")
    await cluster.join("stage1")


async def _a_replica(cluster: Local) -> None:
    """Its place is kept while it is drained, so the other comes when it goes."""
    await cluster.join("attic")
    await cluster.lose("stage1")


@pytest.mark.parametrize("comes", [_undrain, _a_restart, _a_replica])
async def test_what_still_runs_when_the_time_is_up_is_parked_until_it_can_go_on(
    comes: Callable[[Local], object], folder: Path, wanted: list[list[int]]
) -> None:
    async with local_cluster(folder, TWO, model_context=512) as cluster:
        async with load(cluster.client, COUNT, LENGTH) as made:
            drained = await cluster.client.drain("stage1", timeout=0.05)
            assert (drained.parked, drained.left, drained.moved, drained.finished) == (COUNT, 0, 0, 0)
            await made.in_phase("parked")
            assert [info.state for info in cluster.coordinator.generations.infos()] == ["parked"] * COUNT
            await until(lambda: [server.load().kv.used for server in cluster.servers] == [0, 0])
            await comes(cluster)  # type: ignore[misc]
            assert await made.over() == wanted
        assert await cluster.used_pages() == 0


async def test_a_parked_session_is_not_idle(folder: Path) -> None:
    async with (
        local_cluster(folder, TWO, model_context=512, limits_idle_s=1) as cluster,
        load(cluster.client, 1, LENGTH) as made,
    ):
        await cluster.client.drain("stage1", timeout=0)
        since = None
        async with asyncio.timeout(30), aclosing(cluster.client.watch(0.2)) as watch:
            async for seen in watch:
                since = seen.up_ms if since is None else since
                assert [session.state for session in seen.sessions] == ["parked"]
                if seen.up_ms > since + 1600:
                    break
        await cluster.client.undrain("stage1")
        assert len((await made.over())[0]) == LENGTH


async def test_parked_sessions_wait_for_their_turn_like_any_other(folder: Path) -> None:
    """Two may run; two are parked, two run meanwhile, and the parked go first when one of these
    ends."""
    async with local_cluster(folder, TWO, replicas=2, model_context=512, limits_sessions=2) as cluster:
        await cluster.client.drain("stage0.1")
        async with load(cluster.client, 2, LENGTH) as parked:
            await cluster.client.drain("stage0.0", timeout=0)
            await parked.in_phase("parked")
            await cluster.client.undrain("stage0.1")
            first, second = await asyncio.gather(parked.over(), cluster.greedy([5, 17, 99], 8))
            assert [len(tokens) for tokens in first] == [LENGTH, LENGTH]
            assert len(second) == 8


async def test_a_parked_session_can_be_cancelled(folder: Path) -> None:
    async with local_cluster(folder, TWO, model_context=512) as cluster:
        async with load(cluster.client, 1, LENGTH) as made:
            await cluster.client.drain("stage1", timeout=0)
            (info,) = cluster.coordinator.generations.infos()
            await cluster.client.cancel(info.session)
            await made.over()
        await cluster.client.undrain("stage1")
        assert len(await cluster.greedy([5, 17, 99], 8)) == 8


async def test_sessions_move_to_a_replica_that_comes_while_a_drain_lasts(folder: Path) -> None:
    async with local_cluster(folder, TWO, replicas=2, model_context=512) as cluster:
        await cluster.client.drain("stage0.1")
        async with load(cluster.client, 2, 400) as made:
            drain = asyncio.create_task(cluster.client.drain("stage0.0"))
            await cluster.until(lambda seen: any(info.state == "draining" for info in seen.actors))
            await cluster.client.undrain("stage0.1")
            assert (await drain).moved == 2
            assert [len(tokens) for tokens in await made.over()] == [400, 400]


async def test_an_undrain_ends_a_drain(folder: Path) -> None:
    async with local_cluster(folder, TWO, model_context=512) as cluster, load(cluster.client, 1, LENGTH) as made:
        drain = asyncio.create_task(cluster.client.drain("stage1"))
        await cluster.until(lambda seen: any(info.state == "draining" for info in seen.actors))
        with pytest.raises(ZrtError, match="stage1 is draining") as raised:
            await cluster.client.drain("stage1")
        assert raised.value.kind == "draining"
        await cluster.client.undrain("stage1")
        with pytest.raises(ZrtError, match="undrained") as raised:
            await drain
        assert raised.value.kind == "cancelled"
        told = [(one.where, one.text) for one in cluster.coordinator.event_log.since(0) if one.kind == "drain"]
        assert ("stage1", "is undrained") in told
        assert len((await made.over())[0]) == LENGTH


async def drained_and_held(cluster: Local) -> tuple[BlockServer, Assignment, Event, "asyncio.Task[bool]"]:
    """A block server that is drained, what it holds, and its executor, which is held until the
    event is set."""
    await cluster.client.drain("stage1")
    server, free = cluster.server("stage1"), Event()
    assert server.blocks.assignment is not None
    return server, server.blocks.assignment, free, asyncio.create_task(server.turns.executor.run(free.wait, 20))


@pytest.mark.parametrize("hears", ["loading", "drained"])
async def test_an_undrain_that_crosses_the_news_of_a_load_is_obeyed(
    hears: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drained block server loads anew: the coordinator takes it for drained when it loads
    already, or for loading when it has loaded."""
    async with local_cluster(folder, TWO) as cluster:
        wanted = await cluster.greedy([5, 17, 99], 8)
        server, assignment, free, executor = await drained_and_held(cluster)
        report, ready, held = server._report, server._ready, list[StateChanged | LoadProgress]()

        def arrive() -> Engine:
            while held:
                report(held.pop(0))
            return ready()

        if hears == "loading":
            monkeypatch.setattr(server, "_report", held.append)
        server._begin(assignment)
        if hears == "drained":
            await server.catch_up()
            monkeypatch.setattr(server, "_report", held.append)
            free.set()
            await until(lambda: server.state == "drained")
            monkeypatch.setattr(server, "_ready", arrive)  # what it said before it heard comes before its answer
        await cluster.client.undrain("stage1")
        monkeypatch.undo()
        while held:
            report(held.pop(0))
        free.set()
        assert await executor
        assert await cluster.greedy([5, 17, 99], 8) == wanted
        assert await state(cluster, "stage1") == "ready"


async def test_what_was_said_before_an_undrain_may_come_after_its_answer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block server speaks over one connection and answers over another: that it is drained comes
    last, of all that it sends."""
    async with local_cluster(folder, TWO) as cluster:
        wanted = await cluster.greedy([5, 17, 99], 8)
        server, assignment, free, executor = await drained_and_held(cluster)
        server._begin(assignment)
        await server.catch_up()
        send, held = server._joined.send, list[Frames]()

        def hold(frames: Frames) -> None:
            """Hold back all but the question which model this is, without which nothing loads."""
            (send if any(b"identify" in bytes(frame) for frame in frames) else held.append)(frames)

        monkeypatch.setattr(server._joined, "send", hold)
        free.set()
        assert await executor
        await until(lambda: server.state == "drained")
        said = len(held)
        undrain = asyncio.create_task(cluster.client.undrain("stage1"))
        await until(lambda: server.state == "ready" and len(held) > said)
        monkeypatch.undo()
        for frames in held:
            send(frames)
        await undrain
        assert await state(cluster, "stage1") == "ready"
        assert await cluster.greedy([5, 17, 99], 8) == wanted


async def test_one_that_dies_while_it_is_drained_is_replaced(folder: Path, wanted: list[list[int]]) -> None:
    async with (
        local_cluster(folder, TWO, spares_count=1, model_context=512) as cluster,
        load(cluster.client, COUNT, LENGTH) as made,
    ):
        drain = asyncio.create_task(cluster.client.drain("stage1"))
        await cluster.until(lambda seen: any(info.state == "draining" for info in seen.actors))
        await cluster.lose("stage1")
        with pytest.raises(ZrtError) as raised:
            await drain
        assert raised.value.kind == "stage_lost"
        assert await made.over() == wanted


async def test_a_drained_block_server_keeps_its_place(folder: Path) -> None:
    async with local_cluster(folder, TWO, spares_count=1, model_context=512) as cluster:
        await cluster.client.drain("stage1")
        seen = await cluster.client.status()
        assert (seen.ready, seen.fault) == (False, "")
        assert [(info.name, info.state) for info in seen.actors if info.kind == "block_server"] == [
            ("stage0", "ready"),
            ("stage1", "drained"),
            ("spare0", "blank"),
        ]


async def test_a_drain_is_told_as_drained_for_as_long_as_the_block_server_is(folder: Path) -> None:
    def told(seen: Cluster) -> list[tuple[str, str]]:
        return [(one.name, one.state) for one in seen.drains]

    async with local_cluster(folder, TWO, replicas=2) as cluster:
        await cluster.client.drain("stage1.0")
        assert told(await cluster.client.status()) == [("stage1.0", "drained")]
        await cluster.client.undrain("stage1.0")
        assert told(await cluster.client.status()) == [("stage1.0", "undrained")]
        await cluster.client.drain("stage1.0")
        await cluster.client.drain("stage0.1")
        await cluster.lose("stage1.0")
        gone = [("stage1.0", "undrained"), ("stage1.0", "gone"), ("stage0.1", "drained")]
        await cluster.until(lambda seen: told(seen) == gone)
        await cluster.join("stage1.0")
        await cluster.loaded()
        assert told(await cluster.client.status()) == gone


async def test_what_cannot_be_drained_is_said(folder: Path) -> None:
    async with local_cluster(folder, TWO, spares_count=1) as cluster:
        for name, kind, words in [
            ("nobody", "bad_request", "there are: spare0, stage0, stage1"),
            ("spare0", "model_not_loaded", "spare0 is blank"),
        ]:
            with pytest.raises(ZrtError, match=words) as raised:
                await cluster.client.drain(name)
            assert raised.value.kind == kind
        await cluster.client.drain("stage0")
        with pytest.raises(ZrtError, match="stage0 is drained") as raised:
            await cluster.client.drain("stage0")
        assert raised.value.kind == "draining"
        with pytest.raises(ZrtError, match="stage1 is ready") as raised:
            await cluster.client.undrain("stage1")
        assert raised.value.kind == "bad_request"


async def test_a_drained_block_server_takes_no_bare_session(folder: Path) -> None:
    """One that it has goes on."""
    context: zmq.asyncio.Context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)

    async def step(session: int, position: int) -> str | None:
        fields = {"session_id": session, "seq_pos": position, "payload_type": "token_ids", "shape": [1]}
        await socket.send(msgspec.msgpack.encode({**fields, "data": (5).to_bytes(4, "little")}))
        return msgspec.msgpack.decode(await asyncio.wait_for(socket.recv(), 10))["error"]

    try:
        async with local_cluster(folder, TWO) as cluster:
            socket.connect(cluster.server("stage0").endpoint)
            assert await step(1, 0) is None
            await cluster.client.drain("stage0")
            assert await step(1, 1) is None
            assert (await step(2, 0) or "").startswith("draining: ")
            await cluster.client.undrain("stage0")
            assert await step(2, 0) is None
    finally:
        context.destroy(linger=0)


async def test_a_cluster_that_goes_down_lets_sessions_finish_and_takes_no_more(
    folder: Path, wanted: list[list[int]]
) -> None:
    async with local_cluster(folder, TWO, model_context=512) as cluster:
        async with load(cluster.client, COUNT, LENGTH) as made:
            await _start_down(cluster, 60)
            with pytest.raises(ZrtError) as raised:
                await cluster.greedy([5, 17, 99], 8)
            assert raised.value.kind == "draining"
            assert await made.over() == wanted
        await asyncio.wait_for(cluster.coordinator.ended.wait(), 10)


@pytest.mark.parametrize(("timeout", "again"), [(0.1, False), (60, True)])
async def test_sessions_do_not_keep_a_cluster_for_ever(timeout: float, again: bool, folder: Path) -> None:
    """The time is up, or it is said again."""
    async with (
        local_cluster(folder, TWO, model_context=512) as cluster,
        load(cluster.client, COUNT, 450) as made,
        aclosing(cluster.client.watch()) as watch,
    ):
        assert (await anext(watch)).ready
        started = time.monotonic()
        await _start_down(cluster, timeout)
        if again:
            await _start_down(cluster, timeout)
        await asyncio.wait_for(cluster.coordinator.ended.wait(), 10)
        assert time.monotonic() - started < 2
        assert min(map(len, made.tokens)) < 450
        with pytest.raises(ZrtError, match="the cluster was shut down") as raised:
            await made.over()
        assert raised.value.kind == "cancelled"
        with pytest.raises(ZrtError, match="the cluster was shut down"):
            async for _ in watch:
                pass


async def _start_down(cluster: Local, timeout: float) -> None:
    """Say it, and hear that it was heard."""
    await cluster.client._ask(Down(id="down", timeout_ms=int(timeout * 1000)))
