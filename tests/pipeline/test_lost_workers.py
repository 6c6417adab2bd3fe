"""A layer worker that is killed, or stops, in each phase of its work: the same one comes back or
another takes over, and no token is lost.

The worker is a process of its own that does it to itself; all else is in this process.
"""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from support.clusters import Local, local_cluster, memory_for
from support.peers import until
from support.results import tell
from support.tiny_models import reference

from zrt.actors.block_server.layer_lending import lending_plan
from zrt.runtime.actor.envelope import Envelope
from zrt.runtime.actor.member import Member
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.client import Piece, Progress
from zrt.runtime.messages.layers import ModelDataChunk, ModelDataTaken
from zrt.runtime.messages.members import ChildDied
from zrt.runtime.wire.envelopes import Body

PROGRAM = Path(__file__).parents[1] / "support" / "failing_worker.py"
PHASES = ("assignment", "push", "load", "prefill", "decode")
PROMPT = [5, 17, 99, 3, 42, 42, 7, 120]
TOKENS = 40


@pytest.fixture(scope="module")
def model(make_model: Callable[..., Path]) -> Path:
    return make_model("llama", num_hidden_layers=8)


@pytest.fixture(scope="module")
def wanted(model: Path) -> list[int]:
    return reference(model, PROMPT, TOKENS)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending_plan, "GRACE_S", 1.0)


@contextmanager
def failing(cluster: Local, phase: str, number: str) -> Iterator["subprocess.Popen[bytes]"]:
    """The worker `attic`; it is dead afterwards, whichever way."""
    words = [cluster.coordinator.endpoint, "attic", str(cluster.cache), phase, number]
    process = subprocess.Popen([sys.executable, str(PROGRAM), *words], stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def has_failed(process: "subprocess.Popen[bytes]") -> bool:
    """Whether it is dead, or has stopped."""
    try:
        return psutil.Process(process.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def count_pushes(cluster: Local, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes that a worker took, by file."""
    server = cluster.servers[0]
    ask, taken = server.ask, {}

    async def counting(to: object, body: Body, **words: object) -> Envelope:
        answer = await ask(to, body, **words)  # type: ignore[arg-type]
        if isinstance(body, ModelDataChunk) and isinstance(answer.body, ModelDataTaken) and "layer" in body.filename:
            taken[body.filename] = taken.get(body.filename, 0) + len(body.data)
        return answer

    monkeypatch.setattr(server, "ask", counting)
    return taken


async def greedy(cluster: Local, told: list[str]) -> list[int]:
    """The tokens; and why they are waited for, as the client is told."""
    ids: list[int] = []
    stream = cluster.client.generate(token_ids=PROMPT, max_tokens=TOKENS, temperature=0.0)
    while not stream.over:
        event = await stream.next_event()
        if isinstance(event, Piece):
            ids += event.token_ids
        elif isinstance(event, Progress):
            told.append(event.message)
    return ids


def stored(cache: Path) -> list[Path]:
    """Each layer's file, once: several plans may have brought it."""
    return list({path.name: path for path in cache.rglob("*.safetensors")}.values())


@pytest.mark.matrix("number")
@pytest.mark.parametrize("way", ["it comes back", "another takes over"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("number", ["SIGKILL", "SIGSTOP"])
async def test_a_worker_is_lost_and_no_token(
    model: Path, wanted: list[int], number: str, phase: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, object] = {"lend": {"attic": ["2-5"]}}
    if way == "another takes over":
        narrow = memory_for(model, 3, worker=True)
        settings = {"helped": True, "memory": memory_for(model, 2), "workers": {"cellar": narrow}}
    async with local_cluster(model, [None], waits=False, **settings) as cluster:
        taken = count_pushes(cluster, monkeypatch)
        with failing(cluster, phase, number) as process:
            told: list[str] = []
            asked = asyncio.create_task(greedy(cluster, told))
            await until(lambda: has_failed(process))
            lost = time.monotonic()
            await cluster.until(lambda seen: all(actor.name != "attic" for actor in seen.actors))
            process.send_signal(signal.SIGKILL)
            await cluster.join_worker("attic" if way == "it comes back" else "loft")
            assert await asked == wanted
            answered = time.monotonic() - lost
        if phase in ("prefill", "decode"):
            assert any("attic" in message for message in told), told
        seen = await cluster.until(lambda seen: seen.ready)
        lend = seen.actors[0].lend
        assert lend is not None
        assert lend.waits_for == ""
        for file in cluster.cache.rglob("*.safetensors"):
            assert (
                taken[file.name] <= file.stat().st_size
            )  # less where the answer was lost with the worker; nothing was taken twice
        tell(
            case="a layer worker is lost",
            signal=number,
            phase=phase,
            way=way,
            answered_s=round(answered, 1),
            sent_again=sum(taken.values()) - sum(path.stat().st_size for path in stored(cluster.cache)),
        )


async def test_a_pinned_worker_that_is_not_started_again_fails_its_stage_at_once_until_it_is_started_by_hand(
    model: Path, wanted: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    async with local_cluster(model, [None], lend={"attic": ["2-5"]}) as cluster:
        parent = Member("up", "supervisor", join=cluster.coordinator.endpoint)
        parent.state = "ready"
        await parent.start()
        cluster.stack.push_async_callback(parent.stop)
        await parent.registered.wait()
        attic = cluster.workers["attic"]
        report = ChildDied("attic", attic.incarnation, -9, False)
        await attic.stop()
        began = time.monotonic()
        await parent.ask_coordinator(report, timeout=5.0)
        seen = await cluster.until(lambda seen: seen.actors[0].state == "failed")
        assert time.monotonic() - began < 2.0
        lend = seen.actors[0].lend
        assert lend is not None
        assert (lend.waits_for, seen.fault.count("attic is not started again, and blocks are pinned to it")) == ("", 1)
        assert not any("layers are given out again" in record.message for record in caplog.records)
        with pytest.raises(ZrtError) as raised:
            await cluster.greedy(PROMPT, TOKENS)
        assert raised.value.kind == "worker_failed"
        await cluster.join_worker("attic")
        await cluster.until(lambda seen: seen.ready)
        assert await cluster.greedy(PROMPT, TOKENS) == wanted
