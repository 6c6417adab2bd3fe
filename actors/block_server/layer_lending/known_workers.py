"""The layer workers that a block server knows of: which are there, and which cannot help."""

import asyncio
import time
from collections.abc import Iterable
from typing import Final

from zrt.actors.block_server.layer_lending.lent_worker import LentWorker
from zrt.runtime.actor.actor import Actor
from zrt.runtime.messages.control import Address
from zrt.runtime.messages.members import Workers

RETRY_S: Final = 1.0
"""Seconds until a worker whose connection broke is tried again."""


class KnownWorkers:
    """The workers by name, as the coordinator has named them, and the names that it awaits.

    `refused` are those that cannot hold what they were given, with why; `roomless` those that had
    no room for a block when they were looked at. `changed` is set with every news.
    """

    def __init__(self, actor: Actor) -> None:
        self.by_name: dict[str, LentWorker] = {}
        self.awaited: set[str] = set()
        self.changed = asyncio.Event()
        self.refused: dict[Address, str] = {}
        self.roomless: set[Address] = set()
        self._actor = actor
        self._down: dict[str, float] = {}  # when each is tried again, monotonic seconds
        self._planned_with: set[Address] = set()

    def update(self, message: Workers) -> list[Address]:
        """Take what the coordinator knows; return the processes that are gone. A worker that the
        message does not name may yet be there, and goes on with what it does."""
        gone = []
        for address in message.workers:
            known = self.by_name.get(address.name)
            if known is None or known.address != address:
                if known is not None:
                    gone.append(known.address)
                self.by_name[address.name] = LentWorker(self._actor, address)
                self._down.pop(address.name, None)
        named = {address.name for address in message.workers}
        for name in [name for name in self.by_name if name not in named]:
            del self.by_name[name]
        self.awaited = set(message.awaited)
        self.changed.set()
        return gone + message.gone

    def connection_broke(self, address: Address) -> None:
        """Try the process again later, if it is known."""
        worker = self.by_name.get(address.name)
        if worker is not None and worker.address == address:
            self.try_later(worker)
            self.changed.set()

    def try_later(self, worker: LentWorker) -> None:
        """Leave a worker alone for RETRY_S."""
        self._down[worker.name] = time.monotonic() + RETRY_S
        worker.load.state = "lost"

    def there(self) -> set[str]:
        """Return the names of the workers that are to be reached."""
        now = time.monotonic()
        return {name for name in self.by_name if self._down.get(name, 0.0) <= now}

    def of_no_use(self) -> set[str]:
        """Return the names of the workers that refused, or had no room."""
        return {name for name, worker in self.by_name.items() if worker.address in self.roomless | self.refused.keys()}

    def planned_with(self, names: Iterable[str]) -> None:
        """Keep which workers the last plan was made with."""
        self._planned_with = {self.by_name[name].address for name in names if name in self.by_name}

    @property
    def has_new(self) -> bool:
        """Whether a worker is there that the last plan was made without."""
        return any(self.by_name[name].address not in self._planned_with for name in self.there())

    def forget(self) -> None:
        """Forget what was found out for an assignment that is over."""
        self.refused.clear()
        self.roomless.clear()
        self._planned_with.clear()
