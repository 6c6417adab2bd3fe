"""The end of a cluster: by `zrt down`, by a signal, or by a loss that is final."""

import asyncio
import logging
import signal
from typing import Final

from zrt.actors.node.console import Console
from zrt.runtime.client.client import LEAVE_S, Client
from zrt.runtime.client.connection import CONNECT_S
from zrt.runtime.errors import ZrtError

log = logging.getLogger(__name__)

TELL_S: Final = 3.0
"""How long the coordinator may take, beyond the time it was given, to tell those it knows."""


class Departure:
    """The end of one cluster. `ended` is set when its processes are to be ended; `fault` then says
    why, if the reason is a loss. `hurried`: nothing is waited for any more. `announced`: the
    coordinator brings the cluster down."""

    def __init__(self, console: Console) -> None:
        self.ended = asyncio.Event()
        self.fault: ZrtError | None = None
        self.hurried = False
        self._by = "zrt down"
        self._console = console
        self._leaving: asyncio.Task[None] | None = None
        self._limit: asyncio.TimerHandle | None = None

    @property
    def announced(self) -> bool:
        return self._limit is not None

    def fail(self, fault: ZrtError) -> None:
        """End the cluster, which cannot go on."""
        self.fault = fault
        self.ended.set()

    def signalled(self, number: signal.Signals) -> None:
        """Note the signal that ends the cluster."""
        self._by = "Ctrl-C" if number is signal.SIGINT else number.name

    def leave(self, endpoint: str) -> None:
        """Have the coordinator at `endpoint` end the cluster in good order: sessions may finish for
        LEAVE_S. The second time, wait only until clients are told."""
        if self._leaving is None:
            self._leaving = asyncio.ensure_future(self._leave(endpoint, LEAVE_S, CONNECT_S + LEAVE_S))
            return
        self.hurried = True
        self._leaving.cancel()
        self._leaving = asyncio.ensure_future(self._leave(endpoint, 0.0, TELL_S))

    def expect(self, within_s: float) -> None:
        """End the cluster in `within_s` seconds and TELL_S, in case the coordinator, which brings
        it down, dies or hangs before it says that it is time."""
        if self._limit is not None:
            self._limit.cancel()
        self._limit = asyncio.get_running_loop().call_later(within_s + TELL_S, self.ended.set)

    def begin(self) -> None:
        """End the cluster now, whether or not the coordinator ends it too."""
        self.ended.set()
        if self._leaving is not None:
            self._leaving.cancel()
        if self._limit is not None:
            self._limit.cancel()

    def say_goodbye(self, cluster: str) -> None:
        self._console.say(f"zrt: {cluster} is down ({self._by})")

    async def _leave(self, endpoint: str, seconds: float, timeout: float) -> None:
        """Ask the coordinator for what `zrt down` asks for; then mark the cluster as ended."""
        try:
            async with asyncio.timeout(timeout), Client(endpoint) as client:
                if seconds and (await client.status()).sessions:
                    self._console.say(
                        f"zrt: sessions may go on for {seconds:g} s; Ctrl-C again ends the cluster at once"
                    )
                await client.down(seconds)
        except (ZrtError, TimeoutError) as error:
            log.info("the coordinator does not bring the cluster down: %s", error)
        self.ended.set()
