"""The coordinator's HTTP port: GET /metrics for Prometheus, GET /healthz for load balancers and
whatever restarts processes. HTTP/1.1, one request a connection.

Anybody who reaches the port is answered, in bounded time and memory: a request is a few lines, and
so many connections are served at once.
"""

import asyncio
import logging
from contextlib import suppress
from typing import Final, Protocol

from prometheus_client.exposition import CONTENT_TYPE_LATEST

from zrt.runtime.endpoints import endpoint
from zrt.runtime.errors import ZrtError

log = logging.getLogger(__name__)

REQUEST_S: Final = 5.0
"""How long a request may take to come, and its answer to be taken."""
REQUEST_BYTES: Final = 16 * 1024
CONNECTIONS: Final = 32
TEXT: Final = "text/plain; charset=utf-8"

Answer = tuple[int, str, bytes]
"""Status, content type, body."""
REASONS: Final = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


class MetricsSource(Protocol):
    """The source of what the HTTP port tells."""

    async def exposition(self) -> bytes:
        """Return the text of /metrics."""
        ...

    def unready(self) -> str:
        """Return why /healthz is 503; empty when it is 200."""
        ...


class MetricsServer:
    """The HTTP port at `listen`, which tells of `source`."""

    def __init__(self, listen: str, source: MetricsSource) -> None:
        self.port = 0
        self._host, self._wanted = endpoint(listen)
        self._source = source
        self._open = 0
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen from now on. ZrtError bad_config: the port cannot be had."""
        host = None if self._host == "*" else self._host
        try:
            self._server = await asyncio.start_server(self._serve, host, self._wanted, limit=REQUEST_BYTES)
        except OSError as error:
            text = f"[metrics] listen: {self._host}:{self._wanted} cannot be had: {error.strerror or error}"
            raise ZrtError("bad_config", text) from None
        self.port = self._server.sockets[0].getsockname()[1]
        log.info("metrics at http://%s:%d/metrics", self._host, self.port)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            async with asyncio.timeout(REQUEST_S):
                busy = self._open > CONNECTIONS
                status, kind, body = (503, TEXT, b"too many connections\n") if busy else await self._answer(reader)
                head = f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
                writer.write(f"{head}Connection: close\r\n\r\n".encode() + body)
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            pass  # whoever asked is gone, or too slow
        finally:
            self._open -= 1
            with suppress(OSError):
                writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> Answer:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return 400, TEXT, b"the request is too long\n"
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return 400, TEXT, b"this is not an HTTP/1 request\n"
        if words[0] != b"GET":
            return 405, TEXT, b"only GET is supported\n"
        match words[1].partition(b"?")[0]:
            case b"/metrics":
                try:
                    return 200, CONTENT_TYPE_LATEST, await self._source.exposition()
                except Exception:
                    log.exception("the metrics could not be rendered")
                    return 500, TEXT, b"the metrics could not be rendered\n"
            case b"/healthz":
                why = self._source.unready()
                return (503, TEXT, f"{why}\n".encode()) if why else (200, TEXT, b"ready\n")
            case _:
                return 404, TEXT, b"not found: there are /metrics and /healthz\n"
