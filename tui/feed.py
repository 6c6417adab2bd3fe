"""The monitor's connection: snapshots as they come, for as long as the monitor runs, even if
connections and coordinators are lost."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing

from zrt.runtime.client.client import Client
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.client import Cluster

AGAIN_S = 1.0
EVERY_S = 0.25


class Feed:
    """Feed of the cluster's snapshots. `take` gets each snapshot. `trouble` says why none comes;
    empty while they do."""

    def __init__(self, endpoint: str, take: Callable[[Cluster], None]) -> None:
        self.endpoint = endpoint
        self.trouble = "connecting"
        self._take = take
        self._client: Client | None = None

    @property
    def client(self) -> Client:
        """The connected client. ZrtError coordinator_lost while there is no connection."""
        if self._client is None or not self._client.connected:
            raise ZrtError("coordinator_lost", f"there is no connection to {self.endpoint} now")
        return self._client

    def look(self) -> None:
        """Set `trouble` if the connection is lost."""
        if self._client is not None and not self._client.connected:
            self.trouble = f"the connection to {self.endpoint} is lost"

    async def run(self) -> None:
        """Connect, hand snapshots to `take` and reconnect, until cancelled."""
        while True:
            try:
                async with Client(self.endpoint) as client:
                    self._client = client
                    async with aclosing(client.watch(every=EVERY_S)) as watch:
                        async for cluster in watch:
                            self.trouble = ""
                            self._take(cluster)
            except ZrtError as error:
                self.trouble = str(error)
            finally:
                self._client = None
            await asyncio.sleep(AGAIN_S)
