"""The step rule, as another process sees it: a hand-driven peer opens sessions on one block server
that holds a whole model."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import zmq
from support.clusters import Local, local_cluster

from zrt.actors.block_server.block_server import BlockServer
from zrt.runtime.actor.actor import Actor
from zrt.runtime.actor.envelope import Envelope
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.header import Step
from zrt.runtime.messages.inference import InferenceRequest
from zrt.runtime.messages.sessions import Close, Credit, Filled, Open, Opened, Sampled, StepFailed
from zrt.runtime.wire.inference import decode_response, encode_inference

PROMPT = [5, 17, 99, 3, 42]
WAIT_S = 20.0


class Hub:
    """Stands where the coordinator stands for the sessions it opens; what the server tells about
    them lands in `heard`."""

    def __init__(self, cluster: Local) -> None:
        self.server: BlockServer = cluster.servers[0]
        self.actor: Actor = cluster.coordinator
        self.heard: asyncio.Queue[object] = asyncio.Queue()
        for kind in (Sampled, Filled, StepFailed):
            self.actor.handle(kind, self._hear)

    def _hear(self, body: Any, envelope: Envelope) -> None:
        self.heard.put_nowait(envelope.body)

    async def open(self, session: int, epoch: int, *, length: int = len(PROMPT), credit: int = 0) -> int:
        message = Open(session, epoch, 0, 0, [self.server.address], length)
        message.tokens, message.prompt_length = (PROMPT * 2)[:length], len(PROMPT)
        message.max_length, message.credit = 200, credit
        reply = await self.actor.ask(self.server.address, message, timeout=WAIT_S)
        assert isinstance(reply.body, Opened)
        return reply.body.have

    def step(self, session: int, epoch: int, seq_pos: int, ids: list[int], until: int = -1) -> None:
        data = memoryview(array("I", ids)).cast("B")
        request = InferenceRequest(session, seq_pos, "token_ids", [len(ids)], data)
        steps = [Step(session, epoch, seq_pos, len(ids), 0, until)]
        self.actor.tell(self.server.address, request, steps=steps, dtype="uint32")

    async def next(self) -> object:
        async with asyncio.timeout(WAIT_S):
            return await self.heard.get()

    async def sampled(self) -> tuple[int, int, int]:
        heard = await self.next()
        assert isinstance(heard, Sampled), heard
        (token,) = heard.tokens
        return token.epoch, token.index, token.token


@pytest_asyncio.fixture
async def hub(make_model: Callable[..., Path]) -> AsyncIterator[Hub]:
    async with local_cluster(make_model("llama"), [None]) as cluster:
        yield Hub(cluster)


async def test_a_first_step_samples_and_the_ring_runs_on_its_credit(hub: Hub) -> None:
    assert await hub.open(1, 1, credit=len(PROMPT) + 3) == 0
    hub.step(1, 1, 0, PROMPT)
    first = [await hub.sampled() for _ in range(3)]
    assert [(epoch, index) for epoch, index, _ in first] == [(1, 5), (1, 6), (1, 7)]
    hub.actor.tell(hub.server.address, Credit(1, 1, len(PROMPT) + 4))
    assert (await hub.sampled())[:2] == (1, 8)
    assert await hub.open(1, 2, length=9) == 8  # the last token was sampled but not run


async def test_repeating_a_step_under_a_new_epoch_changes_nothing(hub: Hub) -> None:
    tokens = []
    for epoch in (1, 2):
        await hub.open(1, epoch, credit=6)
        hub.step(1, epoch, 0, PROMPT)
        tokens.append(await hub.sampled())
    assert tokens[0][1:] == tokens[1][1:]


async def test_history_in_pieces_equals_history_at_once(hub: Hub) -> None:
    await hub.open(1, 1, credit=6)
    hub.step(1, 1, 0, PROMPT)
    _, _, wanted = await hub.sampled()
    await hub.open(2, 1, credit=6)
    hub.step(2, 1, 0, PROMPT[:2])
    assert await hub.next() == Filled(2, 1, 0, 2)
    hub.step(2, 1, 2, PROMPT[2:])
    assert await hub.sampled() == (1, 5, wanted)


async def test_going_back_forgets_what_came_after(hub: Hub) -> None:
    await hub.open(1, 1, length=8)
    hub.step(1, 1, 0, [*PROMPT, 1, 2])
    assert await hub.next() == Filled(1, 1, 0, 7)
    assert await hub.open(1, 2, length=5, credit=6) == 5
    hub.step(1, 2, 3, PROMPT[3:])
    _, _, token = await hub.sampled()
    await hub.open(2, 1, credit=6)
    hub.step(2, 1, 0, PROMPT)
    assert (await hub.sampled())[2] == token


async def test_a_replay_that_ends_here_samples_nothing(hub: Hub) -> None:
    await hub.open(1, 1, credit=20)
    hub.step(1, 1, 0, PROMPT, until=0)
    assert await hub.next() == Filled(1, 1, 0, 5)


@pytest.mark.parametrize(("opened", "seq_pos", "have"), [(True, 3, 0), (False, 3, 0), (False, 0, 0)])
async def test_a_gap_is_told_with_what_is_held(hub: Hub, opened: bool, seq_pos: int, have: int) -> None:
    if opened:
        await hub.open(1, 1)
    hub.step(1, 1, seq_pos, [4])
    failed = await hub.next()
    assert isinstance(failed, StepFailed)
    assert (failed.session, failed.have, failed.fault.kind, failed.fault.where) == (1, have, "kv_gap", "stage0")


async def test_an_older_epoch_is_dropped_and_counted(hub: Hub) -> None:
    await hub.open(1, 5, credit=6)
    before = hub.server.turns.tally.dropped_stale
    hub.step(1, 4, 0, PROMPT)
    hub.actor.tell(hub.server.address, Credit(1, 4, 100))
    with pytest.raises(ZrtError) as caught:
        await hub.open(1, 4)
    assert caught.value.kind == "cancelled"
    assert hub.server.turns.tally.dropped_stale == before + 3
    hub.step(1, 5, 0, PROMPT)
    assert (await hub.sampled())[0] == 5


async def test_close_frees_the_pages_and_steps_after_it_find_a_gap(hub: Hub) -> None:
    await hub.open(1, 1, credit=6)
    hub.step(1, 1, 0, PROMPT)
    await hub.sampled()
    engine = hub.server.turns.engine
    assert engine is not None
    assert engine.stats().used == 1
    await hub.actor.ask(hub.server.address, Close(1, 1), timeout=WAIT_S)
    hub.step(1, 1, 5, [4])
    failed = await hub.next()
    assert isinstance(failed, StepFailed)
    assert await hub.server.turns.executor.run(lambda: engine.stats().used) == 0


async def test_one_bad_step_fails_alone(hub: Hub) -> None:
    """Two sessions wait for the same turn; the one with a gap does not spoil the other."""
    await hub.open(1, 1, credit=6)
    await hub.open(2, 1, credit=6)
    hub.step(2, 1, 9, [4])
    hub.step(1, 1, 0, PROMPT)
    heard = [await hub.next(), await hub.next()]
    assert sorted(type(message).__name__ for message in heard) == ["Sampled", "StepFailed"]


# ---- what must not be obeyed ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"length": 10**15, "tokens": []}, "context_exceeded"),
        ({"page_keys": [7, 7]}, "bad_request"),
        ({"page_keys": list(range(1000))}, "bad_request"),
        ({"stage": 3}, "bad_request"),
        ({"tokens": [1, 2]}, "bad_request"),
    ],
)
async def test_an_open_that_makes_no_sense_leaves_nothing(hub: Hub, change: dict[str, object], kind: str) -> None:
    message = Open(1, 1, 0, 0, [hub.server.address], len(PROMPT), tokens=PROMPT, prompt_length=len(PROMPT))
    for field, value in change.items():
        setattr(message, field, value)
    with pytest.raises(ZrtError) as raised:
        await hub.actor.ask(hub.server.address, message, timeout=WAIT_S)
    assert raised.value.kind == kind
    assert len(hub.server.routed) == 0


async def test_an_open_for_which_there_is_no_place_leaves_nothing(hub: Hub) -> None:
    for session in range(64):
        await hub.open(session + 1, 1)
    with pytest.raises(ZrtError) as raised:
        await hub.open(65, 1)
    assert raised.value.kind == "overloaded"
    assert len(hub.server.routed) == 64


async def test_steps_of_a_process_that_is_not_on_the_route_are_dropped(hub: Hub) -> None:
    """It knows the session and its epoch, and speaks in the coordinator's name, but is another
    incarnation."""
    await hub.open(1, 1, credit=6)
    stranger = Actor("coordinator")
    await stranger.start()
    data = memoryview(array("I", [9, 9])).cast("B")
    for session in (1, 77):
        request = InferenceRequest(session, 0, "token_ids", [2], data)
        stranger.tell(hub.server.address, request, steps=[Step(session, 1, 0, 2)], dtype="uint32")
    for order in (Close(1, 9), Credit(1, 1, 50)):
        with pytest.raises(ZrtError) as raised:
            await stranger.ask(hub.server.address, order, timeout=WAIT_S)
        assert raised.value.kind == "unauthorized"
    assert hub.server.turns.tally.dropped_stale == 2
    hub.step(1, 1, 0, PROMPT)
    assert (await hub.sampled())[:2] == (1, 5)
    await stranger.stop()


async def test_bare_sessions_of_strangers_give_way(hub: Hub) -> None:
    """They may come in any number; what the coordinator opens finds room all the same."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(hub.server.endpoint)
        for session in range(200):
            frame = encode_inference(InferenceRequest(session, 0, "token_ids", [2], memoryview(bytes(8))))
            socket.send(frame)
            reply = decode_response(await asyncio.to_thread(socket.recv))
            assert reply.error is None or reply.error.startswith("overloaded: ")
        assert len(hub.server.bare) == 64
        assert await hub.open(1, 1, credit=6) == 0
        hub.step(1, 1, 0, PROMPT)
        assert (await hub.sampled())[:2] == (1, 5)
        assert len(hub.server.bare) == 63


async def test_a_bare_request_that_is_refused_is_no_session(hub: Hub) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(hub.server.endpoint)
        kinds = set()
        for request in (
            InferenceRequest(1, 7, "token_ids", [1], memoryview(bytes(4))),
            InferenceRequest(2, 0, "token_ids", [1], memoryview(b"\xff\xff\0\0")),
            InferenceRequest(3, 0, "token_ids", [257], memoryview(bytes(4 * 257))),
            InferenceRequest(4, 0, "token_ids", [30_000], memoryview(bytes(4 * 30_000))),
        ):
            socket.send(encode_inference(request))
            reply = decode_response(await asyncio.to_thread(socket.recv))
            kinds.add((reply.error or "").partition(":")[0])
        assert kinds == {"kv_gap", "bad_request", "context_exceeded", "too_large"}
    assert len(hub.server.bare) == 0
