"""What comes too late is counted and not obeyed: every message there is, of an older epoch, a
session or process that is no more."""

from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

import pytest
import pytest_asyncio
from support.clusters import Local, local_cluster
from support.peers import until

from zrt.runtime.actor.actor import Actor
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.client import Piece
from zrt.runtime.messages.control import Address, Fault
from zrt.runtime.messages.header import Step
from zrt.runtime.messages.inference import InferenceRequest
from zrt.runtime.messages.members import Assign, Beat, ChildDied, LoadProgress, Shutdown, StateChanged
from zrt.runtime.messages.sessions import Close, Credit, Filled, Open, Sampled, SampledToken, StepFailed
from zrt.runtime.wire.envelopes import ControlMessage

PROMPT = [5, 17, 99]
TOKENS = 150
WAIT_S = 20.0
WANTED: list[int] = []
"""The undisturbed answer, once it is known."""


class Now:
    """A session as it is while a message comes: `epoch` is its own, `length` that of its
    history."""

    def __init__(self, cluster: Local) -> None:
        (generation,) = cluster.coordinator.generations._live.values()
        self.session = generation.session.id
        self.epoch = generation.session.epoch
        self.length = len(generation.session.tokens)
        self.serial = cluster.servers[0].blocks.assignment.serial  # type: ignore[union-attr]
        self.route = generation.session.route


Make = Callable[[Now], ControlMessage]
FAULT = Fault("internal", "so it says")


def sampled(now: Now, session: int, epoch: int) -> Sampled:
    return Sampled([SampledToken(session, epoch, now.length, 7)])


OF_THE_SESSION: dict[str, Callable[[Now, int, int], ControlMessage]] = {
    "sampled": sampled,
    "filled": lambda now, session, epoch: Filled(session, epoch, 0, 1 << 20),
    "step failed": lambda now, session, epoch: StepFailed(session, epoch, 0, 0, FAULT),
}
OLDER: dict[str, Make] = {
    **{f"{name}, older epoch": lambda now, make=make: make(now, now.session, now.epoch - 1) for name, make in OF_THE_SESSION.items()},
    **{f"{name}, dead session": lambda now, make=make: make(now, 77, now.epoch) for name, make in OF_THE_SESSION.items()},
    "state changed, older assignment": lambda now: StateChanged("failed", now.serial - 1, FAULT),
    "load progress, older assignment": lambda now: LoadProgress(now.serial - 1, 1, 2),
}  # fmt: skip
"""From a stage on the route."""
GONE: dict[str, Make] = {
    **{name: lambda now, make=make: make(now, now.session, now.epoch) for name, make in OF_THE_SESSION.items()},
    "state changed": lambda now: StateChanged("failed", now.serial, FAULT),
    "load progress": lambda now: LoadProgress(now.serial, 1, 2),
    "beat": lambda now: Beat("failed", 0, 0),
    "child died": lambda now: ChildDied("stage0", 0, 1, False),
}  # fmt: skip
"""From an earlier incarnation of the stage."""
ORDERS: dict[str, Make] = {
    "open": lambda now: Open(now.session, now.epoch + 1, 0, 0, now.route, 5),
    "credit": lambda now: Credit(now.session, now.epoch, 1 << 20),
    "close": lambda now: Close(now.session, now.epoch + 1),
    "shutdown": lambda now: Shutdown(),
}
"""From a coordinator of the past."""
OLD_ORDERS: dict[str, Make] = {
    "open": lambda now: Open(now.session, now.epoch - 1, 0, 0, now.route, 5),
    "credit": lambda now: Credit(now.session, now.epoch - 1, 1 << 20),
    "close": lambda now: Close(now.session, now.epoch - 1),
}
"""From the coordinator, of an older epoch."""


@pytest_asyncio.fixture
async def cluster(make_model: Callable[..., Path]) -> AsyncIterator[Local]:
    folder = make_model("llama", eos_token_id=None, max_position_embeddings=4096)
    async with local_cluster(folder, ["0-1", "2-3"], model_context=4096) as local:
        yield local


@pytest_asyncio.fixture
async def gone() -> AsyncIterator[Actor]:
    """A process of another's name and another incarnation: what an earlier one is, should it still
    speak."""
    actor = Actor("stage0")
    await actor.start()
    yield actor
    await actor.stop()


def dropped(cluster: Local) -> int:
    """All that was dropped, by everybody."""
    coordinator = cluster.coordinator.snapshot().stale
    return coordinator + sum(load.stale + load.dropped_stale for load in (s.load() for s in cluster.servers))


async def undisturbed(cluster: Local, disturb: Callable[[Now], object]) -> None:
    """What is done in the midst of a generation is counted, and the answer is what it is
    without."""
    wanted = WANTED or await cluster.greedy(PROMPT, TOKENS)
    WANTED[:] = wanted
    stream = cluster.client.generate(token_ids=PROMPT, max_tokens=TOKENS, temperature=0.0)
    got: list[int] = []
    while len(got) < 30:
        event = await stream.next_event()
        got += event.token_ids if isinstance(event, Piece) else []
    before = dropped(cluster)
    session = Now(cluster)
    disturb(session)
    await until(lambda: dropped(cluster) > before)
    async for piece in stream:
        got += piece.token_ids
    assert got == wanted
    assert (await cluster.client.status()).ready
    assert all(server.state == "ready" and not server.ended.is_set() for server in cluster.servers)


@pytest.mark.parametrize("make", OLDER.values(), ids=OLDER)
async def test_a_stage_says_what_is_over(make: Make, cluster: Local) -> None:
    await undisturbed(cluster, lambda now: cluster.servers[0].tell_coordinator(make(now)))


@pytest.mark.parametrize("make", GONE.values(), ids=GONE)
async def test_a_process_speaks_that_was_replaced(make: Make, cluster: Local, gone: Actor) -> None:
    await undisturbed(cluster, lambda now: gone.tell(cluster.coordinator.address, make(now)))


@pytest.mark.parametrize("make", ORDERS.values(), ids=ORDERS)
async def test_a_coordinator_orders_that_was_replaced(make: Make, cluster: Local, gone: Actor) -> None:
    def order(now: Now) -> None:
        for server in cluster.servers:
            gone.tell(server.address, make(now))

    await undisturbed(cluster, order)


async def test_blocks_are_assigned_by_the_joined_coordinator_alone(cluster: Local, gone: Actor) -> None:
    assignment = cluster.servers[0].blocks.assignment
    assert assignment is not None
    with pytest.raises(ZrtError) as raised:
        await gone.ask(cluster.servers[0].address, Assign(assignment), timeout=WAIT_S)
    assert raised.value.kind == "unauthorized"


@pytest.mark.parametrize("name", OLD_ORDERS)
async def test_an_order_of_an_older_epoch(name: str, cluster: Local) -> None:
    def order(now: Now) -> None:
        for server in cluster.servers:
            cluster.coordinator.tell(server.address, OLD_ORDERS[name](now))

    await undisturbed(cluster, order)


@pytest.mark.parametrize("sender", ["coordinator", "stage1", "replaced"])
async def test_a_step_of_an_older_epoch_or_of_a_process_not_on_the_route(
    sender: str, cluster: Local, gone: Actor
) -> None:
    actor = {"coordinator": cluster.coordinator, "stage1": cluster.servers[1], "replaced": gone}[sender]

    def step(now: Now) -> None:
        ids = memoryview(array("I", [4])).cast("B")
        request = InferenceRequest(now.session, now.length - 1, "token_ids", [1], ids)
        epoch = now.epoch if sender == "replaced" else now.epoch - 1
        steps = [Step(now.session, epoch, now.length - 1, 1)]
        actor.tell(cluster.servers[0].address, request, steps=steps, dtype="uint32")

    await undisturbed(cluster, step)


@pytest.mark.parametrize("to", ["coordinator", "stage0"])
async def test_a_message_for_an_earlier_incarnation(to: str, cluster: Local, gone: Actor) -> None:
    """Its port may be another's now."""
    address = cluster.coordinator.address if to == "coordinator" else cluster.servers[0].address
    earlier = Address(to, address.incarnation - 1, address.endpoint)

    def say(now: Now) -> None:
        with suppress(ZrtError):
            gone.tell(earlier, Close(now.session, now.epoch + 1))

    await undisturbed(cluster, say)


async def test_a_user_sees_the_counts(cluster: Local, gone: Actor) -> None:
    before = await cluster.client.status()
    cluster.servers[0].tell_coordinator(Filled(77, 1, 0, 1))
    gone.tell(cluster.servers[1].address, Close(77, 1))
    seen = before
    while seen.stale == before.stale or not seen.actors[1].stale:
        seen = await cluster.client.status()
    assert (seen.stale - before.stale, [actor.stale for actor in seen.actors[:2]]) == (1, [0, 1])


async def test_a_session_closed_right_after_it_was_opened_holds_nothing(make_model: Callable[..., Path]) -> None:
    """Both are there to be read at once: the close must not overtake the open."""
    async with local_cluster(make_model("llama"), ["0-3"], limits_sessions=4) as cluster:
        server, coordinator = cluster.servers[0], cluster.coordinator
        for session in range(1, 9):
            opened = Open(session, 1, 0, 0, [server.address], 3, tokens=PROMPT)
            coordinator.tell(server.address, opened)
            coordinator.tell(server.address, Close(session, 1))
        await coordinator.ask(server.address, Close(0, 0), timeout=WAIT_S)
        engine = server.turns.engine
        assert engine is not None
        assert await server.turns.executor.run(len, engine.cache) == 0
        assert len(server.routed) == 0
