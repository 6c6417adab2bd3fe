"""A network that breaks: a TCP proxy that can be cut, held and shut."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class Proxy:
    """A pipe of bytes to and from `target` (tcp://host:port). `endpoint` is the proxy's own, and
    stays the same after it was shut and opened again."""

    def __init__(self, target: str) -> None:
        self._host, self._port = target.removeprefix("tcp://").split(":")
        self._own = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        self._left: int | None = None
        self.connections = 0

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self._own}"

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._own)
        self._own = self._server.sockets[0].getsockname()[1]

    def shut(self) -> None:
        """Cut all connections, and accept no more."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.cut()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    def cut_after(self, octets: int) -> None:
        """Cut once, when `octets` more bytes have come from the target: mostly in the middle of a
        message."""
        self._left = octets

    def hold(self) -> None:
        """Let nothing through, without closing a connection."""
        self._flows.clear()

    def go_on(self) -> None:
        self._flows.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        there, back = await asyncio.open_connection(self._host, int(self._port))
        self._writers |= {writer, back}
        with suppress(ConnectionError):
            await asyncio.gather(self._pipe(reader, back), self._pipe(there, writer, back=True))
        self._writers -= {writer, back}

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, back: bool = False) -> None:
        try:
            while data := await reader.read(4096):
                await self._flows.wait()
                if back and self._left is not None:
                    if len(data) >= self._left:
                        writer.write(data[: self._left])
                        await writer.drain()
                        self._left = None
                        self.cut()
                        return
                    self._left -= len(data)
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()


@asynccontextmanager
async def proxy(target: str) -> AsyncIterator[Proxy]:
    made = Proxy(target)
    await made.open()
    try:
        yield made
    finally:
        made.go_on()
        made.shut()
        await asyncio.sleep(0)
