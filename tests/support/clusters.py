"""A whole cluster in this process: the real coordinator and block servers with real sockets and
executors, on the test's own loop."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zrt.actors.block_server.block_server import BlockServer
from zrt.actors.coordinator.coordinator import Coordinator
from zrt.actors.coordinator.prompts.requests import Requests
from zrt.actors.layer_worker.layer_worker import LayerWorker
from zrt.runtime.client.client import Client
from zrt.runtime.cluster.file_loader import parse
from zrt.runtime.cluster.file_schema import Conf
from zrt.runtime.cluster.memory import process_bytes
from zrt.runtime.cluster.seats import seat_name, spare_names
from zrt.runtime.messages.client import Cluster
from zrt.runtime.messages.sessions import Close
from zrt.runtime.models.architecture.spec import read_spec
from zrt.runtime.models.checkpoint.formats.dense import FLOAT32
from zrt.runtime.models.checkpoint.layout import block_bytes, ends_bytes

READY_S = 60.0


@dataclass
class Local:
    """A cluster whose parts a test may reach into."""

    coordinator: Coordinator
    servers: list[BlockServer]
    client: Client
    stack: AsyncExitStack
    workers: dict[str, LayerWorker]
    cache: Path

    async def join_worker(self, name: str, memory: int = 0, device: str = "cpu") -> LayerWorker:
        """Start a layer worker. All workers share one cache, as if they ran one after the other on
        one machine."""
        worker = LayerWorker(
            name,
            join=self.coordinator.endpoint,
            cache=self.cache,
            device=device,
            threads=1,
            listen="tcp://127.0.0.1:0",
            memory_bytes=memory,
        )
        await worker.start()
        self.stack.push_async_callback(worker.stop)
        self.workers[name] = worker
        return worker

    async def join(self, name: str, memory: int = 0, device: str = "cpu") -> BlockServer:
        """Start one more block server."""
        server = make_server(name, self.coordinator.endpoint, memory, device)
        await server.start()
        self.stack.push_async_callback(server.stop)
        self.servers.append(server)
        return server

    def server(self, name: str) -> BlockServer:
        return next(server for server in self.servers if server.name == name)

    async def lose(self, name: str) -> None:
        """Stop this block server, which loses what it held."""
        server = self.server(name)
        self.servers.remove(server)
        await server.stop()

    async def until(self, wanted: Callable[[Cluster], bool]) -> Cluster:
        """Wait until a snapshot of the cluster is as `wanted` says, and return that snapshot."""
        async with asyncio.timeout(READY_S), aclosing(self.client.watch()) as watch:
            async for seen in watch:
                if wanted(seen):
                    break
        return seen

    async def loaded(self) -> None:
        """Wait until the cluster is ready, and with it every replica that has a seat: a cluster is
        ready with one replica of each stage."""
        await until_ready(self.client)
        names = {server.name for server in self.servers}
        await self.until(
            lambda seen: names <= {info.name for info in seen.actors if info.state not in ("starting", "loading")}
        )

    async def settled(self) -> None:
        """Wait until no session lives and every stage has heard that all have ended, so that what
        its executor runs next finds them gone."""
        async with asyncio.timeout(READY_S), aclosing(self.client.watch()) as watch:
            async for seen in watch:
                if not seen.sessions:
                    break
        for server in self.servers:  # whatever was sent there arrives before this
            await self.coordinator.ask(server.address, Close(session=0, epoch=0), timeout=READY_S)

    async def used_pages(self) -> int:
        """Return how many KV pages still belong to a session once none lives."""
        await self.settled()
        loops = [server.turns for server in self.servers]
        stats = [await turns.executor.run(turns.engine.stats) for turns in loops if turns.engine is not None]
        return sum(each.used for each in stats)

    async def generate(self, **request: object) -> tuple[str, list[int], str]:
        """Return text, token ids and finish reason of one generation."""
        text, ids = "", []
        stream = self.client.generate(**request)  # type: ignore[arg-type]
        async for piece in stream:
            text += piece.text
            ids += piece.token_ids
        return text, ids, stream.finished.reason

    async def greedy(self, prompt: Sequence[int], tokens: int) -> list[int]:
        _, ids, _ = await self.generate(token_ids=list(prompt), max_tokens=tokens, temperature=0.0)
        return ids


def cluster_file(
    folder: Path,
    stages: Sequence[str | None],
    *,
    threads: int = 1,
    device: str = "cpu",
    replicas: int = 1,
    tp: Sequence[int] = (),
    lend: Mapping[str, Sequence[str]] | None = None,
    lending: int = 0,
    helped: bool = False,
    memory: int = 0,
    **settings: object,
) -> str:
    """Return the text of a cluster file on a free port. `stages` are block ranges, None where
    planned; `tp` the ranks of each stage, if that is not 1; `lend` the blocks of stage `lending`
    that each layer worker holds. With `helped` the first stage takes help; `memory` is the most
    each stage may take.

    Settings are `table_key=value`.
    """
    tables: dict[str, dict[str, object]] = {
        "cluster": {"name": "test", "listen": "tcp://127.0.0.1:0"},
        "model": {"ref": str(folder), "context": 256},
        "spares": {"count": 0},
        "kv": {"bytes": "64MiB"},
        "limits": {},
        "metrics": {},
        "log": {},
    }
    for setting, value in settings.items():
        table, _, key = setting.partition("_")
        tables[table][key] = value
    lines = []
    for table, keys in tables.items():
        lines.append(f"[{table}]")
        lines += [f"{key} = {_toml(value)}" for key, value in keys.items()]
    for number, blocks in enumerate(stages):
        lines.append("[[stage]]")
        if tp:
            lines.append(f"tp = {tp[number]}")
        lines.append(f'device = "{device}"')
        lines.append(f"threads = {threads}")
        lines.append(f"replicas = {replicas}")
        if blocks is not None:
            lines.append(f'blocks = "{blocks}"')
        if memory:
            lines.append(f"memory = {memory}")
        if helped and number == 0:
            lines.append('backend = "layers"')
        for worker, held in (lend or {}).items() if number == lending else ():
            for each in held:
                lines += ["[[stage.lend]]", f'worker = "{worker}"', f'blocks = "{each}"']
    for worker in lend or {}:
        lines += ["[[worker]]", f'name = "{worker}"', "join = true"]
    return "\n".join(lines)


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


def memory_for(model: Path, blocks: int, *, worker: bool = False, kv_bytes: int = 64 << 20) -> int:
    """Return the bytes that a block server, or a worker, takes with so many blocks, and a little
    more."""
    spec = read_spec(model)
    conf = parse(cluster_file(model, [None]), "test")
    block = block_bytes(spec, FLOAT32) + kv_bytes // spec.num_blocks
    ends = 0 if worker else ends_bytes(spec, True, True, FLOAT32)
    return process_bytes(conf, spec) + ends + blocks * block + block // 2


@asynccontextmanager
async def local_cluster(
    folder: Path,
    stages: Sequence[str | None],
    *,
    workers: Mapping[str, int] | None = None,
    worker_device: str = "cpu",
    waits: bool = True,
    **settings: Any,
) -> AsyncIterator[Local]:
    """Run a cluster, ready when the block begins, and stop all of it at the end. `workers` that the
    file does not know join as well, before the block servers, each with the most memory it may take
    (0: what there is). Without `waits` no worker of the file is started, and nothing is waited
    for."""
    conf = parse(cluster_file(folder, stages, **settings), "test")
    async with AsyncExitStack() as stack:
        coordinator = make_coordinator(conf, folder)
        await coordinator.start()
        stack.push_async_callback(coordinator.stop)
        client = await stack.enter_async_context(Client(coordinator.endpoint))
        cache = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cluster = Local(coordinator, [], client, stack, {}, cache)
        for name, memory in (workers or {}).items():
            await (await cluster.join_worker(name, memory, worker_device)).there()
        for stage, stage_conf in enumerate(conf.stages):
            for replica in range(stage_conf.replicas):
                name = seat_name(stage, replica, stage_conf.replicas)
                await cluster.join(name, stage_conf.memory or 0, stage_conf.device)
        for name in spare_names(conf):
            await cluster.join(name, conf.spares.memory or 0)
        if waits:
            for worker in conf.workers:
                await cluster.join_worker(worker.name, device=worker_device)
            await cluster.loaded()
        yield cluster


def make_coordinator(conf: Conf, folder: Path, **settings: Any) -> Coordinator:
    spec = read_spec(folder)
    prompts = Requests(folder, spec, min(conf.model.context, spec.max_positions))
    return Coordinator(conf, folder, spec, prompts, **settings)


def make_server(name: str, join: str, memory: int = 0, device: str = "cpu") -> BlockServer:
    return BlockServer(
        name,
        join=join,
        device=device,
        threads=(1, 1),
        listen="tcp://127.0.0.1:0",
        advertise=None,
        memory_bytes=memory,
    )


async def until_ready(client: Client) -> None:
    async with asyncio.timeout(READY_S), aclosing(client.watch()) as watch:
        async for cluster in watch:
            assert not cluster.fault, cluster.fault
            if cluster.ready:
                return
