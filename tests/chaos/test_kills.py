"""SIGKILL of stages, in every phase of a session and with every way to go on; and a hundred of them
under load. Real processes.

Each cell prints one JSON line: who was killed, when, which way there was, what the client saw, and
the seconds until its next token.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.clusters import cluster_file
from support.results import tell
from support.running import Running, running

from zrt.runtime.client.client import Client
from zrt.runtime.cluster.file_loader import parse
from zrt.runtime.cluster.memory import block_server_bytes
from zrt.runtime.messages.client import Cluster, Piece, Progress
from zrt.runtime.messages.cluster import ActorInfo
from zrt.runtime.models.architecture.spec import read_spec

PHASES = ("before the first token", "during a prefill chunk", "mid-decode", "during another's replay")
WAYS: dict[str, dict[str, Any]] = {
    "replica": {"replicas": 2},
    "spare": {"spares_count": 1},
    "two narrower spares": {"spares_count": 2},
    "restart": {},
}
FIRST, LAST, BOTH = "first stage", "last stage", "both stages"
PROMPT = 6000
TOKENS = 300
WAIT_S = 60.0
CHUNK = 128


def plan(folder: Path, way: str, home: Path, **settings: Any) -> Path:
    """The cluster file of two stages with this way to go on after a loss."""
    settings = {"model_context": 8192, "limits_restarts": 1000, "limits_chunk": CHUNK, **WAYS[way], **settings}
    text = cluster_file(folder, ["0-1", "2-3"], **settings)
    if way == "two narrower spares":
        conf, spec = parse(text, "test"), read_spec(folder)
        narrow = max(block_server_bytes(conf, spec, block, block) for block in range(4))
        assert narrow < min(block_server_bytes(conf, spec, *stage) for stage in ((0, 1), (2, 3)))
        text = text.replace("[spares]", f"[spares]\nmemory = {narrow}")
    file = home / "cluster.toml"
    file.write_text(text)
    return file


@pytest.fixture(scope="module")
def tiny(make_model: Callable[..., Path]) -> Path:
    return make_model("llama", eos_token_id=None, max_position_embeddings=1 << 16)


@pytest.fixture(scope="module")
def undisturbed(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The endpoint of a cluster of one stage that nobody touches."""
    home = tmp_path_factory.mktemp("undisturbed")
    conf = home / "cluster.toml"
    conf.write_text(cluster_file(tiny, [None], model_context=8192))
    with running(str(conf), home=home) as cluster:
        yield cluster.endpoint


@pytest.fixture(scope="module")
def clusters(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Running]]:
    """The cluster with this way to go on. One of narrower spares is new each time, since its plan
    has grown."""
    with ExitStack() as stack:
        up: dict[str, tuple[Running, ExitStack]] = {}

        def get(way: str) -> Running:
            if way in up and way == "two narrower spares":
                up.pop(way)[1].close()
            if way not in up:
                own = stack.enter_context(ExitStack())
                home = tmp_path_factory.mktemp("home")
                up[way] = own.enter_context(running(str(plan(tiny, way, home)), home=home)), own
            return up[way][0]

        yield get


@dataclass
class Heard:
    """What one session's client hears. `since` is when the kill was, 0 before; `recovered` seconds
    later came the first token of the new way."""

    ids: list[int] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    prefilled: int = 0
    since: float = 0.0
    replays: bool = False
    recovered: float = 0.0
    reason: str = ""
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def note(self, event: object) -> None:
        if isinstance(event, Progress):
            if self.phases[-1:] != [event.phase]:
                self.phases.append(event.phase)
            if event.phase in ("prefill", "replaying", "waiting"):
                self.replays |= self.since > 0
            if event.phase == "prefill":
                self.prefilled = event.done
        elif isinstance(event, Piece):
            assert event.index == len(self.ids), "a token is missing, or came twice"
            self.ids += event.token_ids
            if self.replays and not self.recovered:
                self.recovered = time.monotonic() - self.since

    def killed(self, at: float) -> None:
        self.since = at

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S), self.changed:
            await self.changed.wait_for(condition)


@asynccontextmanager
async def session(client: Client, **request: Any) -> AsyncIterator[tuple[Heard, "asyncio.Task[None]"]]:
    """One generation that runs beside the test. Its error is the task's."""
    heard = Heard()

    async def run() -> None:
        stream = client.generate(ignore_eos=True, **request)
        while not stream.over:
            event = await stream.next_event()
            async with heard.changed:
                heard.note(event)
                heard.changed.notify_all()
        heard.reason = stream.finished.reason

    task = asyncio.create_task(run())
    try:
        yield heard, task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def answer(endpoint: str, **request: Any) -> list[int]:
    async with Client(endpoint) as client:
        return [token async for piece in client.generate(ignore_eos=True, **request) for token in piece.token_ids]


async def until(client: Client, wanted: Callable[[Cluster], bool]) -> Cluster:
    async with asyncio.timeout(WAIT_S), aclosing(client.watch()) as watch:
        async for seen in watch:
            if wanted(seen):
                return seen
    raise AssertionError("the watch ended")


def servers(seen: Cluster) -> list[ActorInfo]:
    return [actor for actor in seen.actors if actor.kind == "block_server"]


def whole(seen: Cluster) -> bool:
    """Every process is back, with blocks or as a spare, and no session lives."""
    return seen.ready and not seen.sessions and complete(seen)


def complete(seen: Cluster) -> bool:
    return all(one.state in ("ready", "blank") for one in servers(seen))


async def routed(client: Client, prompt_tokens: int) -> list[str]:
    """The block servers that the session with so long a prompt runs through, as soon as it has a
    route."""
    async with asyncio.timeout(WAIT_S):
        while True:
            for one in (await client.status()).sessions:
                if one.prompt_tokens == prompt_tokens and len(one.route) > 1:
                    return one.route


def kill(cluster: Running, names: list[str]) -> float:
    """SIGKILL these; when that was."""
    children = cluster.children()
    victims = [children[name] for name in names]
    at = time.monotonic()
    for victim in victims:
        victim.kill()
    return at


def of_stage(route: list[str], stage: str) -> list[str]:
    return {FIRST: route[:1], LAST: route[-1:], BOTH: [route[0], route[-1]]}[stage]


def cells() -> list[Any]:
    """All; two of them, of one cluster, in `make test`."""
    every = [(way, phase, stage) for way in WAYS for phase in PHASES for stage in (FIRST, LAST)]
    every += [(way, "mid-decode", BOTH) for way in WAYS]
    chooser = random.Random(1)
    way = chooser.choice(["replica", "spare", "restart"])
    sample = chooser.sample([cell for cell in every if cell[0] == way], 2)
    return [pytest.param(*cell, marks=[] if cell in sample else pytest.mark.chaos) for cell in every]


@pytest.mark.parametrize(("way", "phase", "stage"), cells())
async def test_a_stage_is_killed(
    way: str, phase: str, stage: str, clusters: Callable[[str], Running], undisturbed: str
) -> None:
    """The client gets every token once, and they are those of a cluster that nothing happened
    to."""
    cluster = await asyncio.to_thread(clusters, way)
    chooser = random.Random(f"{way} {phase} {stage}")
    short = phase == "mid-decode"
    prompt = chooser.choices(range(3, 160), k=200 if short else PROMPT)
    request = {"token_ids": prompt, "max_tokens": TOKENS, "temperature": chooser.choice([0.0, 0.8]), "seed": 7}
    async with Client(cluster.endpoint) as client:
        await until(client, whole)
        async with session(client, **request) as (heard, task):
            if phase == "before the first token":
                route = await routed(client, len(prompt))
            elif phase == "during a prefill chunk":
                await heard.until(lambda: 0 < heard.prefilled < PROMPT)
            else:
                await heard.until(lambda: len(heard.ids) > 20)
            if phase == "during another's replay":
                other = {**request, "token_ids": chooser.choices(range(3, 160), k=PROMPT - 7)}
                async with session(client, **other) as (another, replays):
                    await another.until(lambda: len(another.ids) > 3)
                    route = await routed(client, PROMPT - 7)
                    kill(cluster, of_stage(route, LAST if stage == FIRST else FIRST))
                    await another.until(lambda: "replaying" in another.phases)
                    route = await routed(client, PROMPT - 7)
                    another.killed(kill(cluster, of_stage(route, stage)))
                    async with asyncio.timeout(WAIT_S):
                        await asyncio.gather(task, replays)
                assert another.ids == await answer(undisturbed, **other)
                seen = another
            else:
                route = await routed(client, len(prompt))
                if phase != "mid-decode":
                    assert not heard.ids
                heard.killed(kill(cluster, of_stage(route, stage)))
                async with asyncio.timeout(WAIT_S):
                    await task
                seen = heard
        assert heard.ids == await answer(undisturbed, **request)
    tell(
        fault=f"SIGKILL of {stage}", phase=phase, way=way, client=[*seen.phases, seen.reason], recovery_s=seen.recovered
    )
    assert seen.recovered > 0


# ---- a hundred -----------------------------------------------------------------------------------

SESSIONS = 8
WARM = 10
"""Kills until those who stay have all they need."""
GROWTH = 16 << 20
DESCRIPTORS = 4


class Load:
    """Sessions that run one after another in each of 8 places, half of them greedy, until they are
    told to end; each answer is checked."""

    def __init__(self, client: Client, wanted: list[list[int]]) -> None:
        self.answers = 0
        self._client = client
        self._wanted = wanted
        self._ending = False
        self._some = asyncio.Condition()
        self._tokens = [0] * SESSIONS
        self._tasks = [asyncio.create_task(self._run(index)) for index in range(SESSIONS)]

    @staticmethod
    def request(index: int) -> dict[str, Any]:
        prompt = random.Random(index).choices(range(3, 160), k=9 + 5 * index)
        return {"token_ids": prompt, "max_tokens": TOKENS, "temperature": 0.8 * (index % 2), "seed": index}

    async def _run(self, index: int) -> None:
        while not self._ending:
            ids: list[int] = []
            async with aclosing(self._client.generate(ignore_eos=True, **self.request(index))) as stream:
                async for piece in stream:
                    assert piece.index == len(ids), "a token is missing, or came twice"
                    ids += piece.token_ids
                    async with self._some:
                        self._tokens[index] += len(piece.token_ids)
                        self._some.notify_all()
            assert ids == self._wanted[index]
            self.answers += 1

    async def all_get_on(self) -> None:
        """Wait until every place has a token more than now. The error of a session that failed."""
        before = list(self._tokens)
        async with asyncio.timeout(WAIT_S), self._some:
            while not all(now > then for now, then in zip(self._tokens, before, strict=True)):
                for task in self._tasks:
                    if task.done():
                        task.result()
                await asyncio.wait_for(self._some.wait(), WAIT_S)

    async def end(self) -> None:
        """Wait for the answers that are under way."""
        self._ending = True
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*self._tasks)

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()


async def busy(client: Client) -> list[ActorInfo]:
    """The block servers that run a session."""
    async with asyncio.timeout(WAIT_S):
        while True:
            seen = await client.status()
            names = {name for one in seen.sessions for name in one.route}
            found = [one for one in servers(seen) if one.name in names and one.pid]
            if found:
                return found


def held(processes: list[psutil.Process]) -> list[tuple[int, int]]:
    """Resident bytes and descriptors of each."""
    return [(process.memory_info().rss, process.num_fds()) for process in processes]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kills", "seed"),
    [(2, 0), pytest.param(50, 1, marks=pytest.mark.chaos), pytest.param(50, 2, marks=pytest.mark.chaos)],
)
async def test_kills_under_load_lose_nothing(
    kills: int, seed: int, clusters: Callable[[str], Running], tiny: Path, undisturbed: str, tmp_path: Path
) -> None:
    """Whoever is killed runs a session; when all 8 get on again, the next is. Many kills meet
    spares besides."""
    chooser = random.Random(seed)
    wanted = [await answer(undisturbed, **Load.request(index)) for index in range(SESSIONS)]
    with ExitStack() as stack:
        if kills < WARM:
            cluster = await asyncio.to_thread(clusters, "replica")
        else:
            conf = plan(tiny, "replica", tmp_path, spares_count=2)
            cluster = await asyncio.to_thread(stack.enter_context, running(str(conf), home=tmp_path))
        stay = [psutil.Process(cluster.process.pid), cluster.children()["coordinator"]]
        async with Client(cluster.endpoint) as client:
            await until(client, whole)
            load = Load(client, wanted)
            try:
                await load.all_get_on()
                recoveries, killed, warm = [], [], held(stay)
                while len(killed) < kills:
                    victim = chooser.choice(await busy(client))
                    at = time.monotonic()
                    psutil.Process(victim.pid).kill()
                    killed.append(victim.name)
                    await until(client, lambda seen, pid=victim.pid: all(one.pid != pid for one in seen.actors))
                    await load.all_get_on()  # what was on its way when it died does not count
                    recoveries.append(time.monotonic() - at)
                    if len(killed) == WARM:
                        await until(
                            client, complete
                        )  # each block server that is there costs the coordinator descriptors
                        warm = held(stay)
                await load.end()
            finally:
                load.stop()
            seen = await until(
                client, lambda seen: whole(seen) and all(one.kv is None or one.kv.used == 0 for one in servers(seen))
            )
        pools = [one.kv for one in servers(seen) if one.kv is not None and one.state == "ready"]
        after = held(stay)
        tell(
            kills=len(killed),
            seed=seed,
            sessions=load.answers,
            failed=0,
            lost=0,
            duplicated=0,
            leaked_pages=sum(pool.total - pool.free - pool.cached for pool in pools),
            recovery_s_median=sorted(recoveries)[kills // 2],
            recovery_s_worst=max(recoveries),
            rss_growth_bytes=[now[0] - then[0] for now, then in zip(after, warm, strict=True)],
            descriptor_growth=[now[1] - then[1] for now, then in zip(after, warm, strict=True)],
        )
        assert len(pools) >= 4
        assert all(pool.free + pool.cached + pool.used == pool.total and pool.used == 0 for pool in pools)
        assert stay[1].is_running()
        if kills > WARM:
            for (rss, fds), (rss_then, fds_then) in zip(after, warm, strict=True):
                assert rss <= rss_then + GROWTH
                assert fds <= fds_then + DESCRIPTORS
