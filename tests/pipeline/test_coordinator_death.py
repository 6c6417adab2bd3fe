"""A coordinator dies and another takes its place: block servers keep their weights, sessions end,
and clients may continue them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.clusters import Local, cluster_file, local_cluster, make_server, until_ready
from support.peers import until

from zrt.actors.block_server.backend import Backend
from zrt.actors.coordinator.coordinator import Coordinator
from zrt.actors.coordinator.fleet.process_record import ProcessRecord
from zrt.actors.coordinator.fleet.roster import Roster
from zrt.actors.coordinator.prompts.requests import Requests
from zrt.runtime.actor.actor import Actor
from zrt.runtime.client.client import Client
from zrt.runtime.client.stream import Stream
from zrt.runtime.cluster.file_loader import parse
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.client import Piece
from zrt.runtime.messages.control import Address
from zrt.runtime.messages.members import Assignment, LoadProgress, Register
from zrt.runtime.models.architecture.spec import read_spec

TWO: list[str | None] = ["0-1", "2-3"]
PROMPT = [5, 17, 99]
WAIT_S = 30.0


@pytest_asyncio.fixture
async def cluster(make_model: Callable[..., Path]) -> AsyncIterator[Local]:
    folder = make_model("llama", eos_token_id=None, max_position_embeddings=4096)
    async with local_cluster(folder, TWO, model_context=4096) as local:
        yield local


async def die(coordinator: Coordinator) -> None:
    """Without a word to anybody, as after SIGKILL."""
    await Actor.stop(coordinator)


async def successor(local: Local, **settings: Any) -> Coordinator:
    """Another coordinator of the same cluster, on the same port."""
    old = local.coordinator
    folder = Path(old.template.model)
    text = f'[cluster]\nname = "test"\nlisten = "{old.endpoint}"\n[model]\nref = "{folder}"\ncontext = 4096\n[kv]\nbytes = "64MiB"\n'
    text += "".join(f'[[stage]]\nblocks = "{blocks}"\n' for blocks in settings.pop("stages", TWO))
    conf, spec = parse(text, "test"), read_spec(folder)
    settings.setdefault("cluster", old.cluster)
    new = Coordinator(conf, folder, spec, Requests(folder, spec, 4096), port_s=5.0, **settings)
    await new.start()
    return new


async def begin(cluster: Local, **request: Any) -> tuple[list[int], Any]:
    """A generation that has said a few tokens: they, and the stream."""
    stream = cluster.client.generate(token_ids=PROMPT, **request)
    got: list[int] = []
    async with asyncio.timeout(WAIT_S):
        while len(got) < 20:
            event = await stream.next_event()
            got += event.token_ids if isinstance(event, Piece) else []
    return got, stream


async def fault(stream: Stream, got: list[int]) -> ZrtError:
    """What ends the stream, and the tokens that came before."""
    try:
        async with asyncio.timeout(WAIT_S):
            async for piece in stream:
                got += piece.token_ids
    except ZrtError as error:
        return error
    raise AssertionError("it came to its end")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_a_session_is_continued_by_the_tokens_its_client_has(cluster: Local, temperature: float) -> None:
    request = {"temperature": temperature, "seed": 11}
    _, wanted, _ = await cluster.generate(token_ids=PROMPT, max_tokens=300, **request)
    got, stream = await begin(cluster, max_tokens=3000, **request)
    engines = [server.turns.engine for server in cluster.servers]
    serials = [server.blocks.assignment for server in cluster.servers]
    await die(cluster.coordinator)
    new = await successor(cluster)
    try:
        loads: list[object] = []
        new.handle(LoadProgress, lambda body, envelope: loads.append(envelope))
        assert (await fault(stream, got)).kind == "coordinator_lost"
        await until_ready(cluster.client)
        assert all(server.coordinator == new.address for server in cluster.servers)
        _, rest, _ = await cluster.generate(token_ids=PROMPT + got, max_tokens=300 - len(got), **request)
        assert got + rest == wanted
        cluster.coordinator = new
        await cluster.settled()
        assert [server.turns.engine for server in cluster.servers] == engines
        assert [server.blocks.assignment for server in cluster.servers] == serials
        assert loads == []
        assert [len(server.routed) for server in cluster.servers] == [0, 0]
        assert await cluster.used_pages() == 0
    finally:
        await new.stop()


@pytest.mark.parametrize("state", ["drained", "draining"])
async def test_a_drained_block_server_stays_drained(cluster: Local, state: str) -> None:
    """A drain that was under way is done: the sessions it waited for are gone. The process serves
    again when it is told to."""
    stage = cluster.servers[1]
    engine = stage.turns.engine
    stream = cluster.client.generate(token_ids=PROMPT, max_tokens=4000, temperature=0.0)
    if state == "draining":
        await stream.next_event()
    draining = asyncio.create_task(cluster.client.drain("stage1", 60.0))
    await until(lambda: stage.state == state)
    if state == "drained":
        await draining
    await die(cluster.coordinator)
    new = await successor(cluster)
    try:
        await until(lambda: (record := new.roster.find("stage1")) is not None and record.state == "drained")
        assert stage.turns.engine is engine
        async with Client(new.endpoint) as client:
            await client.undrain("stage1")
            await until_ready(client)
        assert stage.state == "ready"
    finally:
        draining.cancel()
        await asyncio.wait([draining])
        await new.stop()


async def test_what_does_not_fit_the_new_plan_is_loaded_anew(cluster: Local) -> None:
    engines = [server.turns.engine for server in cluster.servers]
    await die(cluster.coordinator)
    new = await successor(cluster, stages=["0-0", "1-3"])
    try:
        await until(lambda: len(new.roster.of_kind("block_server")) == 2)
        async with Client(new.endpoint) as client:
            await until_ready(client)
        assert all(server.turns.engine not in engines for server in cluster.servers)
        assert [server.blocks.assignment and server.blocks.assignment.last for server in cluster.servers] == [0, 3]
    finally:
        await new.stop()


@pytest.mark.parametrize("when", ["while it loads", "when it has loaded"])
async def test_who_held_a_stage_may_come_back_after_another_was_given_it(
    cluster: Local, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another took stage 0, whose own process came back as a spare, and is first with the next
    coordinator. One of the two serves in the end, the one that has the blocks sooner; the other
    lets go of what it has, and is the spare."""
    wanted = await cluster.greedy(PROMPT, 20)
    await cluster.lose("stage0")
    holder = await cluster.join("other")
    await until(lambda: holder.state == "ready")
    first = await cluster.join("stage0")
    await first.there()
    held = holder.turns.engine
    register, load = Roster.register, first.blocks.load

    def in_order(roster: Roster, address: Address, message: Register, now: float) -> ProcessRecord:
        entry = roster.find("stage0")
        if address.name == "other" and (entry is None or entry.state not in late):
            raise ZrtError("overloaded", "not yet")
        return register(roster, address, message, now)

    async def slowly(assignment: Assignment) -> Backend:
        await until(lambda: first.blocks.assignment is not assignment)
        return await load(assignment)

    monkeypatch.setattr(Roster, "register", in_order)
    late = ("ready",)
    if when == "while it loads":
        late = ("loading",)
        monkeypatch.setattr(first.blocks, "load", slowly)
    await die(cluster.coordinator)
    new = await successor(cluster)
    try:
        serves, spare = (holder, first) if when == "while it loads" else (first, holder)
        await until(lambda: serves.state == "ready" and spare.registered.is_set() and spare.state == "blank")
        await until_ready(cluster.client)
        assert spare.turns.engine is spare.blocks.assignment is None
        assert (holder.turns.engine is held) == (serves is holder)
        assert await cluster.greedy(PROMPT, 20) == wanted
        monkeypatch.undo()
        await until(lambda: (entry := new.roster.find(spare.name)) is not None and entry.blank)
        await cluster.lose(serves.name)
        assert await cluster.greedy(PROMPT, 20) == wanted
        assert spare.state == "ready"
    finally:
        await new.stop()


async def test_a_block_server_does_not_join_another_cluster_that_got_the_port(cluster: Local) -> None:
    """Neither one that was told its cluster's id nor one that learned it; one that belongs to none
    yet does."""
    assert {server.cluster for server in cluster.servers} == {cluster.coordinator.cluster}
    await die(cluster.coordinator)
    other = await successor(cluster, cluster="another")
    fresh = make_server("fresh", other.endpoint)
    await fresh.start()
    try:
        complaints = [server._log_limiter._times for server in cluster.servers]
        await until(lambda: all(times["registration"] >= 2 for times in complaints))
        await asyncio.wait_for(fresh.registered.wait(), WAIT_S)
        assert [entry.address.name for entry in other.roster.of_kind("block_server")] == ["fresh"]
        assert not any(server.registered.is_set() for server in cluster.servers)
        assert all(server.state == "ready" for server in cluster.servers)
    finally:
        await fresh.stop()
        await other.stop()


async def test_a_coordinator_waits_for_the_port_of_the_one_whose_place_it_takes(
    cluster: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, refused = Actor.start, 0

    async def counted(actor: Actor) -> None:
        nonlocal refused
        try:
            await start(actor)
        except ZrtError:
            refused += 1
            raise

    monkeypatch.setattr(Actor, "start", counted)
    coming = asyncio.create_task(successor(cluster))
    await until(lambda: refused == 3)
    assert not coming.done()
    await die(cluster.coordinator)
    new = await asyncio.wait_for(coming, WAIT_S)
    await new.stop()


@pytest.mark.parametrize(
    "settings", [{"lend": {"attic": ["1-2"]}}, {"helped": True, "workers": {"attic": 0}}], ids=["pinned", "helped"]
)
async def test_a_stage_that_lends_keeps_its_weights_and_its_workers(
    make_model: Callable[..., Path], settings: dict[str, Any]
) -> None:
    folder = make_model("llama", eos_token_id=None, max_position_embeddings=4096)
    async with local_cluster(folder, [None], **settings) as local:
        wanted = await local.greedy(PROMPT, 20)
        server, worker = local.servers[0], local.workers["attic"]
        backend, held = server.turns.backend, worker._assigned.held
        assert backend is not None
        assert held is not None
        old = local.coordinator
        await die(old)
        given = {name: value for name, value in settings.items() if name != "workers"}
        conf = parse(cluster_file(folder, [None], cluster_listen=old.endpoint, **given), "test")
        spec = read_spec(folder)
        new = Coordinator(conf, folder, spec, Requests(folder, spec, 256), port_s=5.0, cluster=old.cluster)
        await new.start()
        try:
            await until_ready(local.client)
            await until(lambda: len(new.roster.of_kind("layer_worker")) == 1)
            assert await local.greedy(PROMPT, 20) == wanted
            assert (server.turns.backend, worker._assigned.held) == (backend, held)
            await worker.stop()  # and it is known to the new one: its death is heard of, and another takes its place
            await local.until(lambda seen: not seen.ready)
            local.coordinator = new
            await local.join_worker("attic")
            assert await local.greedy(PROMPT, 20) == wanted
        finally:
            await new.stop()
