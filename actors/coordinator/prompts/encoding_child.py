"""The parent's side of a process that tokenises long texts: started for the first, kept for the
next, killed where a text is given up."""

import asyncio
import logging
import socket
from array import array
from collections.abc import Callable
from typing import Final

import msgspec

from zrt.actors.coordinator.prompts.encoding_main import LENGTH_BYTES, Encoded, Refused, Reply, Told
from zrt.runtime.errors import ZrtError
from zrt.runtime.process.python_command import python_command
from zrt.runtime.process.spawn import Process, Ready, ended_by

log = logging.getLogger(__name__)

START_S: Final = 60.0
"""Seconds that the process may take to start and to load the tokenizer, before its first reply."""
GRACE_S: Final = 20.0
"""Seconds that a process which has replied before may take besides: to be given a core, or to make
the tokenizer for which names of special tokens are text."""
BYTES_S: Final = 20_000
"""Bytes of a text that are tokenised in a second at least, or the process counts as hung."""
REPLY_BYTES: Final = 128 << 20
"""The most bytes of one reply: it holds an id for each byte of the longest text, and more."""
IDLE_S: Final = 60.0
"""Seconds without a text after which the process is ended."""
END_S: Final = 5.0
"""Seconds that a killed process may take to be gone."""

_REPLIES: Final = msgspec.msgpack.Decoder(Reply)


class EncodingChild:
    """At most one process that tokenises for a model whose context holds `context` tokens; `name`
    is its name in the log. `files` are encoded TokenizerFiles, which each process is given."""

    def __init__(self, name: str, files: bytes, context: int) -> None:
        self._name = name
        self._command = python_command("zrt.actors.coordinator.prompts.encoding_main", str(context))
        self._files = files
        self._process: Process | None = None
        self._latest: Process | None = None
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self._replied = False
        self._idle: asyncio.TimerHandle | None = None

    async def encode(self, request: bytes, told: Callable[[int, int], None]) -> "array[int]":
        """Return the ids of an encoded PromptRequest, one at a time. A caller that is cancelled has
        the process killed.

        ZrtError: what the prompt comes to; deadline: the process hangs; internal: it ended.
        """
        if self._idle is not None:
            self._idle.cancel()
        grace = GRACE_S if self._process is not None and self._replied else START_S
        try:
            async with asyncio.timeout(grace + len(request) / BYTES_S):
                ids = await self._ask(request, told)
        except ZrtError:
            raise
        except TimeoutError:
            await self.end()
            raise ZrtError("deadline", f"a text of {len(request)} bytes was not tokenised in time") from None
        except (OSError, EOFError, msgspec.DecodeError) as error:
            raise ZrtError("internal", f"the process that tokenised the text {await self._fate() or error}") from None
        except asyncio.CancelledError:
            self._kill()
            raise
        finally:
            if self._process is not None:
                self._idle = asyncio.get_running_loop().call_later(IDLE_S, self._kill)
        return ids

    async def end(self) -> None:
        """Kill the process, if there is one, and wait until it is gone."""
        self._kill()
        if self._latest is not None:
            await self._latest.gone(END_S)

    # ---- as the owner of a process ---------------------------------------------------------------

    def on_ready(self, ready: Ready) -> None:
        """Take no notice: this process is ready when it answers."""

    def on_exit(self, process: Process) -> None:
        if process is self._process:
            self._forget()

    # ---- one request -----------------------------------------------------------------------------

    async def _ask(self, request: bytes, told: Callable[[int, int], None]) -> "array[int]":
        if self._process is None:
            await self._start()
        await self._say(request)
        while True:
            match await self._reply():
                case Told(done, total):
                    told(done, total)
                case Encoded(ids):
                    return array("I", ids)
                case Refused(kind, message):
                    raise ZrtError.of(kind, message)

    async def _say(self, message: bytes) -> None:
        self._writer.writelines([len(message).to_bytes(LENGTH_BYTES), message])
        await self._writer.drain()

    async def _reply(self) -> Reply:
        size = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES))
        if size > REPLY_BYTES:
            raise EOFError(f"announced a reply of {size} bytes")
        reply: Reply = _REPLIES.decode(await self._reader.readexactly(size))
        self._replied = True
        return reply

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._reader, self._writer = await asyncio.open_connection(sock=ours)
            try:
                process = Process(self._name, self._command, {}, self, sink=None, stdin=theirs.fileno())
            except ZrtError:
                self._writer.close()
                raise
        self._process = self._latest = process
        self._replied = False
        log.info("%s started, process %d", self._name, process.pid)
        await self._say(self._files)

    async def _fate(self) -> str:
        """Return how the last process ended, "" if it did not: then it is killed."""
        if self._latest is not None and await self._latest.gone(END_S):
            return ended_by(self._latest.exit)
        self._kill()
        return ""

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._forget()

    def _forget(self) -> None:
        self._process = None
        self._writer.close()
