"""A stopped process is worse than a dead one: SIGSTOP of each, in each phase. Whoever waits sees a
named error or goes on, in bounded time.

Each cell prints one JSON line: who was stopped, when, what the client saw, how long that took, and
when the cluster served again.
"""

import asyncio
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing, closing, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from support.clusters import cluster_file
from support.results import tell
from support.running import END_S, Running, family, gone, running, slow_model, start_zrt

from zrt.runtime.client.client import Client
from zrt.runtime.client.stream import Stream
from zrt.runtime.errors import ZrtError

PROMPT = [5, 17, 99, 3]
LONG = 20_000
TOKENS = {"prefill": 8, "decode": 500}
KILLED_S = 8.0
"""A stopped process is dead after this: 3 s of silence, a beat, a look each second, and a loaded
machine."""
SEEN_S = 30.0
"""The client has its answer, or its error, after this: the kill, a restart, a replay."""
DRAINED_S = 6.0
"""A session goes on for so long at a stage that is drained: longer than a stopped process lives."""
READY_S = 120.0
"""60 s for a process to get ready, and those of its successor."""
GRACE_S = 6.0
ORPHAN_S = 5.0
"""No process outlives its parent by more."""
WHO = ("up", "coordinator", "stage0", "stage1")


@pytest.fixture(scope="module")
def tiny(make_model: Callable[..., Path]) -> Path:
    return make_model("llama", eos_token_id=None, max_position_embeddings=1 << 16)


def conf_file(model: Path, home: Path, **settings: object) -> str:
    file = home / "cluster.toml"
    file.write_text(cluster_file(model, [None, None], model_context=60000, limits_lease_s=1.0, **settings))
    return str(file)


def process(cluster: Running, who: str) -> psutil.Process:
    return psutil.Process(cluster.process.pid) if who == "up" else cluster.children()[who]


@dataclass
class Seen:
    """What a generation came to, and after how many seconds since `at`."""

    ids: list[int]
    end: str
    seconds: float
    gap: float


async def hear(stream: Stream, ids: list[int], at: float) -> Seen:
    last, gap = at, 0.0
    end = ""
    try:
        async with asyncio.timeout(SEEN_S):
            async for piece in stream:
                ids += piece.token_ids
                last, gap = time.monotonic(), max(gap, time.monotonic() - last)
        end = stream.finished.reason
    except ZrtError as error:
        end = error.kind
    except TimeoutError:
        end = "hangs"
    return Seen(ids, end, time.monotonic() - at, gap)


async def begun(stream: Stream, phase: str) -> list[int]:
    """Until the phase is under way: what was generated before."""
    while True:
        event = await stream.next_event()
        if phase == "prefill" and stream.progress is not None and 0 < stream.progress.done < LONG:
            return []
        if phase == "decode" and (ids := getattr(event, "token_ids", None)):
            return list(ids)


async def serves(endpoint: str, wanted: list[int], within: float = SEEN_S) -> float:
    """Seconds until a new client's answer is right."""
    started = time.monotonic()
    while True:
        with suppress(ZrtError):
            async with asyncio.timeout(within), Client(endpoint) as client:
                assert await answer(client, "decode", 8) == wanted[:8]
                return time.monotonic() - started
        assert time.monotonic() - started < within
        await asyncio.sleep(0.2)


def ask(client: Client, phase: str, tokens: int | None = None, *, first: int = 5) -> Stream:
    """`first` is the prompt's first token: no prompt of another first token is in any cache."""
    rest = [number % 150 for number in range(1, LONG)] if phase == "prefill" else PROMPT[1:]
    return client.generate(token_ids=[first, *rest], max_tokens=tokens or TOKENS[phase], temperature=0.0)


async def answer(client: Client, phase: str, tokens: int | None = None, *, first: int = 5) -> list[int]:
    return [token async for piece in ask(client, phase, tokens, first=first) for token in piece.token_ids]


@pytest.fixture(scope="module")
def shared(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    home = tmp_path_factory.mktemp("home")
    with running(conf_file(tiny, home, limits_restarts=50), home=home) as up:
        yield up


def cells(sample: set[tuple[str, str]], *, who: tuple[str, ...], phases: tuple[str, ...]) -> list[object]:
    """All pairs; those outside of the sample run with the other chaos tests."""
    pairs = [(one, phase) for phase in phases for one in who]
    return [pytest.param(*pair, marks=[] if pair in sample else pytest.mark.chaos) for pair in pairs]


# ---- while it serves -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("who", "phase"),
    cells({("up", "decode"), ("coordinator", "decode"), ("stage1", "decode")}, who=WHO, phases=("decode", "prefill")),
)
async def test_a_process_is_stopped_while_it_serves(who: str, phase: str, shared: Running) -> None:
    first = 100 + WHO.index(who)
    async with Client(shared.endpoint) as client:
        short = await answer(client, "decode", 8)
        stream = ask(client, phase, first=first)
        ids = await begun(stream, phase)
        stopped = process(shared, who)
        stopped.suspend()
        at = time.monotonic()
        try:
            hearing = asyncio.ensure_future(hear(stream, ids, at))
            if who != "up":
                dead = await asyncio.to_thread(gone, [stopped], KILLED_S)
                killed = time.monotonic() - at
                assert dead, f"{who} still hangs after {KILLED_S} s"
            seen = await hearing
        finally:
            with suppress(psutil.Error):
                stopped.resume()
    again = await serves(shared.endpoint, short)
    async with Client(shared.endpoint) as client:
        wanted = await answer(client, phase, first=first)
    tell(stopped=who, phase=phase, client=seen.end, seconds=seen.seconds, gap=seen.gap,
         killed=None if who == "up" else killed, serves=time.monotonic() - at if again else 0.0)  # fmt: skip
    if who == "coordinator":
        assert seen.end == "coordinator_lost"
        assert seen.seconds < 10
        assert seen.ids == wanted[: len(seen.ids)]
    else:
        assert (seen.end, seen.ids) == ("length", wanted)


@pytest.mark.chaos
@pytest.mark.parametrize("who", WHO)
async def test_a_process_is_stopped_while_one_is_drained(who: str, shared: Running) -> None:
    """stage1 is drained; its session may finish there, as there is no other replica: it has as many
    tokens as take DRAINED_S here."""
    async with Client(shared.endpoint) as client:
        began = time.monotonic()
        short = await answer(client, "decode")
        tokens = int(len(short) * DRAINED_S / (time.monotonic() - began))
        stream = ask(client, "decode", tokens)
        ids = await begun(stream, "decode")
        draining = asyncio.Event()
        drain = asyncio.ensure_future(client.drain("stage1", SEEN_S, progress=lambda _: draining.set()))
        await asyncio.wait_for(draining.wait(), SEEN_S)
        stopped = process(shared, who)
        stopped.suspend()
        at = time.monotonic()
        try:
            hearing = asyncio.ensure_future(hear(stream, ids, at))
            if who != "up":
                assert await asyncio.to_thread(gone, [stopped], KILLED_S), f"{who} still hangs after {KILLED_S} s"
            seen = await hearing
            try:
                drained: str = (await asyncio.wait_for(drain, SEEN_S)).state
            except ZrtError as error:
                drained = error.kind
            asker = time.monotonic() - at
        finally:
            with suppress(psutil.Error):
                stopped.resume()
    async with asyncio.timeout(SEEN_S), Client(shared.endpoint) as client, aclosing(client.watch()) as watch:
        served = False
        async for now in watch:
            states = {actor.name: actor.state for actor in now.actors}
            if states.get("stage1") == "drained" and not served:
                await client.undrain("stage1")
                served = True  # what is told next may still be from before
            if now.ready and states.get("stage1") == "ready":
                break
    await serves(shared.endpoint, short)
    async with Client(shared.endpoint) as client:
        wanted = await answer(client, "decode", tokens)
    tell(stopped=who, phase="draining", client=seen.end, seconds=seen.seconds, drain=drained, asker=asker)
    ends = {"up": ("length", "drained"), "stage0": ("length", "drained"), "stage1": ("length", "stage_lost")}
    assert (seen.end, drained) == ends.get(who, ("coordinator_lost", "coordinator_lost"))
    assert seen.ids == wanted[: len(seen.ids)]


@pytest.mark.chaos
@pytest.mark.parametrize("seconds", [2.0, 120.0], ids=["for a moment", "until its session is gone"])
async def test_a_client_is_stopped(seconds: float, shared: Running) -> None:
    """Its session ends once what lies between them is full, and when it goes on it says why, or has
    the rest of its answer."""
    words = ["generate", "--token-ids", "5,17,99,3", "--temperature", "0", "--max-tokens"]
    tokens = 2000 if seconds < 5 else 50000
    client = start_zrt(*words, str(tokens), "--connect", shared.endpoint, home=shared.home)
    try:
        assert client.stdout is not None
        client.stdout.read(1)
        client.send_signal(signal.SIGSTOP)
        at, free = time.monotonic(), None
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds), Client(shared.endpoint) as other, aclosing(other.watch()) as watch:
                async for now in watch:
                    if seconds > 5 and not now.sessions:
                        free = time.monotonic() - at
                        break
        client.send_signal(signal.SIGCONT)
        resumed = time.monotonic()
        _, said = await asyncio.to_thread(client.communicate, timeout=SEEN_S)
    finally:
        client.kill()
        client.wait()
    last = said.strip().splitlines()[-1] if said.strip() else ""
    tell(stopped="client", phase="decode", client=f"exit {client.returncode}", said=last,
         seconds=time.monotonic() - resumed, session_gone=free)  # fmt: skip
    if seconds < 5:
        assert client.returncode == 0, said
    else:
        assert client.returncode == 1
        assert last.startswith("zrt: ")
        assert free is not None


@pytest.mark.chaos
async def test_a_stage_that_goes_on_after_it_was_given_up_is_not_obeyed_as_what_it_was(shared: Running) -> None:
    """Nobody can kill it: `zrt up` is stopped as well. It joins again, and its sessions are
    replayed."""
    async with Client(shared.endpoint) as client:
        wanted = await answer(client, "decode")
        stream = ask(client, "decode")
        ids = await begun(stream, "decode")
        stage, up = process(shared, "stage1"), process(shared, "up")
        up.suspend()
        stage.suspend()
        at = time.monotonic()
        hearing = asyncio.ensure_future(hear(stream, ids, at))
        try:
            async with asyncio.timeout(KILLED_S), aclosing(client.watch()) as watch:
                async for now in watch:
                    if not any(actor.name == "stage1" and actor.state == "ready" for actor in now.actors):
                        break
            given_up = time.monotonic() - at
            stage.resume()
            seen = await hearing
        finally:
            up.resume()
            stage.resume()
        assert stage.is_running()
    tell(stopped="stage1 and up", phase="decode", client=seen.end, seconds=seen.seconds, given_up=given_up)
    assert (seen.end, seen.ids) == ("length", wanted)
    await serves(shared.endpoint, wanted)


# ---- killed parents ------------------------------------------------------------------------------


def ports(processes: list[psutil.Process]) -> list[int]:
    return [port.laddr.port for one in processes for port in one.net_connections("tcp") if port.status == "LISTEN"]


@pytest.mark.parametrize("who", ["stage0", "coordinator", "up"])
def test_nothing_outlives_a_killed_process_and_its_ports_are_free(who: str, shared: Running) -> None:
    """Of `zrt up` every process is a descendant; so it comes last."""
    deadline = time.monotonic() + READY_S
    while len(ports(list(shared.children().values()))) < 3:
        assert time.monotonic() < deadline
    killed = process(shared, who)
    descendants = [killed, *killed.children(recursive=True)]
    taken = ports(descendants)
    at = time.monotonic()
    killed.kill()
    if who == "up":
        shared.process.wait()
    assert gone(descendants, ORPHAN_S)
    seconds = time.monotonic() - at
    for port in taken if who != "coordinator" else []:  # that one's successor comes back where it was
        with closing(socket.socket()) as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind(("127.0.0.1", port))
    tell(killed=who, processes=len(descendants), ports=len(taken), seconds=seconds)
    assert len(descendants) >= (4 if who == "up" else 1)
    if who == "up":
        assert family(shared.home) == []


# ---- while it starts -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return slow_model(tmp_path_factory.mktemp("slow"))


def started(up: "subprocess.Popen[str]", home: Path, who: str, phase: str) -> psutil.Process:
    """The process, once it is there and in this phase."""
    cluster = Running(up, "", home)
    deadline = time.monotonic() + READY_S
    awaited = who if who != "up" else "coordinator"
    while awaited not in cluster.children():
        assert time.monotonic() < deadline
        assert up.poll() is None
    if phase == "loading":
        assert up.stderr is not None
        while not (line := up.stderr.readline()).endswith("…\n") or (who.startswith("stage") and who not in line):
            assert time.monotonic() < deadline
    return process(cluster, who)


@pytest.mark.chaos
@pytest.mark.timeout(200)
@pytest.mark.parametrize(("who", "phase"), cells(set(), who=WHO, phases=("loading", "starting")))
def test_a_process_is_stopped_while_the_cluster_starts(who: str, phase: str, slow: Path, tmp_path: Path) -> None:
    """`zrt up` says how it went: ready, or why not; and then nothing is left. `zrt up` itself goes
    on where it was stopped."""
    up = start_zrt("up", conf_file(slow, tmp_path, model_weights="random"), home=tmp_path)
    try:
        stopped = started(up, tmp_path, who, phase)
        stopped.suspend()
        at = time.monotonic()
        if who == "up":
            time.sleep(GRACE_S)
            stopped.resume()
        last = ""
        assert up.stderr is not None
        for line in up.stderr:
            last = line.strip()
            if "is ready at" in line:
                break
        seconds = time.monotonic() - at
        tell(stopped=who, phase=phase, up=last, seconds=seconds)
        assert seconds < READY_S
        if "is ready at" not in last:
            assert up.wait(END_S) == 1
            assert last.startswith("zrt: coordinator_lost: ")
            assert family(tmp_path) == []
        if who != "up":
            assert gone([stopped], 0)
    finally:
        left = family(tmp_path)
        with suppress(psutil.Error):
            stopped.resume()
        up.kill()
        up.communicate()
        assert gone(left)
