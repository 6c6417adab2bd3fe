"""A whole cluster in this process: the real coordinator and block servers with real sockets and lanes, on the test's own loop."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from zrt.actors.block_server import BlockServer
from zrt.actors.coordinator import Coordinator
from zrt.runtime.client import Client
from zrt.runtime.compute.spec import read_spec
from zrt.runtime.config import Conf, parse
from zrt.runtime.messages.control import Close
from zrt.runtime.prompts import Prompts
from zrt.runtime.roster import seat_name

READY_S = 60.0


@dataclass
class Local:
    """What a test may reach into."""

    coordinator: Coordinator
    servers: list[BlockServer]
    client: Client

    async def settled(self) -> None:
        """Wait until no session lives and every stage has heard that they ended, so that what its lane runs next finds them gone."""
        async with asyncio.timeout(READY_S), aclosing(self.client.watch()) as watch:
            async for seen in watch:
                if not seen.sessions:
                    break
        for server in self.servers:  # whatever was sent there arrives before this
            await self.coordinator.ask(server.address, Close(session=0, epoch=0), timeout=READY_S)

    async def generate(self, **request: object) -> tuple[str, list[int], str]:
        """Text, token ids and finish reason of one generation."""
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
    folder: Path, stages: Sequence[str | None], *, threads: int = 1, tp: Sequence[int] = (), **settings: object
) -> str:
    """A cluster file on a free port. `stages` are block ranges, None where planned; `tp` the ranks of each, if it is not 1.

    Settings are `table_key=value`.
    """
    tables: dict[str, dict[str, object]] = {
        "cluster": {"name": "test", "listen": "tcp://127.0.0.1:0"},
        "model": {"ref": str(folder), "context": 256},
        "kv": {"bytes": "64MiB"},
        "limits": {},
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
        lines.append(f"threads = {threads}")
        if blocks is not None:
            lines.append(f'blocks = "{blocks}"')
    return "\n".join(lines)


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


@asynccontextmanager
async def local_cluster(folder: Path, stages: Sequence[str | None], **settings: object) -> AsyncIterator[Local]:
    """Up and ready; everything is stopped on the way out."""
    conf = parse(cluster_file(folder, stages, **settings), "test")
    async with AsyncExitStack() as stack:
        coordinator = make_coordinator(conf, folder)
        await coordinator.start()
        stack.push_async_callback(coordinator.stop)
        servers = []
        for stage in range(len(stages)):
            server = make_server(seat_name(stage, 0, 1), coordinator.endpoint)
            await server.start()
            stack.push_async_callback(server.stop)
            servers.append(server)
        client = await stack.enter_async_context(Client(coordinator.endpoint))
        await until_ready(client)
        yield Local(coordinator, servers, client)


def make_coordinator(conf: Conf, folder: Path) -> Coordinator:
    spec = read_spec(folder)
    return Coordinator(conf, folder, spec, Prompts(folder, spec, min(conf.model.context, spec.max_positions)))


def make_server(name: str, join: str) -> BlockServer:
    return BlockServer(name, join=join, device="cpu", threads=(1, 1), listen="tcp://127.0.0.1:0", advertise=None)


async def until_ready(client: Client) -> None:
    async with asyncio.timeout(READY_S), aclosing(client.watch()) as watch:
        async for cluster in watch:
            assert not cluster.fault, cluster.fault
            if cluster.ready:
                return
