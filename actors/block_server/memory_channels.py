"""The channels in memory by which block servers of one machine hand each other rows, in place of
bytes (compute/shared_rows/channel.py).

A block server whose turns can do that offers it (`Header.near`) to the next stage; one of the same
machine answers `HandOver`, and gets its rows in memory from then on, until it answers that it does
not. Each side watches the processes whose memory it reads: when one dies, what it has not written
yet is void.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch

from zrt.runtime.actor.envelope import Envelope
from zrt.runtime.actor.executor import ComputeExecutor
from zrt.runtime.actor.member import Member
from zrt.runtime.compute.cuda import stream_flags
from zrt.runtime.compute.engine import Holding
from zrt.runtime.compute.shared_rows.channel import HandedRows, Inlet, Outlet
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.control import Address
from zrt.runtime.messages.header import HandedOver, Header
from zrt.runtime.messages.inference import InferenceRequest
from zrt.runtime.messages.members import Assignment
from zrt.runtime.messages.sessions import HandOver

log = logging.getLogger(__name__)

MOST_INLETS = 64


class MemoryChannels:
    """The row channels of one block server, whose executor computes. `near` is the machine's name
    while turns can hand over, empty otherwise."""

    def __init__(self, actor: Member, executor: ComputeExecutor) -> None:
        self.near = ""
        self._actor = actor
        self._executor = executor
        self._place_bytes = 0
        self._offered: set[int] = set()  # incarnations that know that we could
        self._takers: set[int] = set()  # those that take what we hand over
        self._refused: set[int] = set()  # those whose memory we could not have
        self._outlets: dict[int, Outlet] = {}
        self._spare: Outlet | None = None  # for the first that takes rows: made before somebody waits for it
        self._inlets: dict[tuple[int, int], Inlet] = {}  # by incarnation and the memory's inode
        actor.handle(HandOver, self._on_hand_over)
        actor.on_peer_death(self._taker_gone)

    def serve(self, engine: Holding | None, assignment: Assignment | None) -> None:
        """Hand over the results of this engine's turns from now on (None: of no turns)."""
        self.near = ""
        self._offered.clear()
        self._takers.clear()
        self._drop_outlets()
        if engine is None or assignment is None or not engine.hands_over:
            return
        if not (engine.shard.is_first and engine.shard.is_last):
            row = 8 if engine.shard.is_last else engine.spec.hidden_size * engine.shard.dtype.itemsize
            self._place_bytes = row * (assignment.sessions + (0 if engine.shard.is_last else assignment.chunk))
            self._spare = self._new_outlet()
            self._actor.spawn(self._prepare(self._spare), "shared memory")

    async def _prepare(self, outlet: Outlet) -> None:
        """Offer the outlet to the next stage once it is known to work here."""
        try:
            await self._executor.run(outlet.prepare)
        except (ZrtError, OSError) as error:
            log.warning(
                "%s: stages cannot share memory here, activations go through sockets: %s", self._actor.name, error
            )
        else:
            if outlet is self._spare:
                self.near = _machine()

    def stop(self) -> None:
        """Wait for no other process any more."""
        self.near = ""
        for inlet in list(self._inlets.values()):
            self._writer_gone(inlet)

    # ---- what we hand over -----------------------------------------------------------------------

    def offer(self, address: Address) -> str:
        """Return what a message to this stage says in `Header.near`."""
        if self.near and address.incarnation not in self._takers:
            self._offered.add(address.incarnation)
            return self.near
        return ""

    def outlet(self, address: Address) -> Outlet | None:
        """Return the outlet to a stage, if that takes rows in memory."""
        if not self.near or address.incarnation not in self._takers:
            return None
        if address.incarnation not in self._outlets:
            self._outlets[address.incarnation], self._spare = self._spare or self._new_outlet(), None
        return self._outlets[address.incarnation]

    def _new_outlet(self) -> Outlet:
        return Outlet(self._place_bytes, stream_flags)

    def take_back(self, handed: HandedOver) -> None:
        """Free the place of rows that no message will tell of."""
        for outlet in self._outlets.values():
            outlet.take_back(handed)

    def _on_hand_over(self, message: HandOver, envelope: Envelope) -> None:
        incarnation = envelope.header.incarnation
        if not message.takes:
            self._give_up(incarnation)
        elif incarnation in self._offered:
            self._takers.add(incarnation)

    def _taker_gone(self, address: Address) -> None:
        self._offered.discard(address.incarnation)
        self._refused.discard(address.incarnation)
        self._give_up(address.incarnation)

    def _give_up(self, incarnation: int) -> None:
        self._takers.discard(incarnation)
        outlet = self._outlets.pop(incarnation, None)
        if outlet is not None:
            self._in_executor(outlet.close)

    def _drop_outlets(self) -> None:
        if self._spare is not None:
            self._outlets[0], self._spare = self._spare, None
        for outlet in self._outlets.values():
            self._in_executor(outlet.close)
        self._outlets.clear()

    # ---- what is handed to us --------------------------------------------------------------------

    def heard(self, header: Header, before: Address) -> None:
        """Answer an offer in a message of the stage before, whose rows are in it."""
        if header.near and header.near == self.near and before.incarnation not in self._refused:
            self._answer(before, HandOver())

    def rows(self, engine: Holding, header: Header, request: InferenceRequest, before: Address) -> list[HandedRows]:
        """Return the rows of each step of a message of the stage before that are handed over.
        ZrtError stage_lost: their writer is gone, or they are to come as bytes; bad_request."""
        handed = header.handed
        assert handed is not None
        if not engine.hands_over:  # it has got other blocks meanwhile
            self._answer(before, HandOver(takes=False))
            raise ZrtError("stage_lost", "rows are handed over to a stage that takes them as bytes")
        width, dtype = engine.spec.hidden_size, engine.shard.dtype
        shape: tuple[int, ...] = (width,)
        if engine.shard.is_first:
            shape, dtype = (), torch.int64
        wire = "uint32" if engine.shard.is_first else engine.dtype
        payload = "token_ids" if engine.shard.is_first else "hidden_states"
        if (request.payload_type, header.dtype, *request.shape[2:]) != (payload, wire, *shape):
            said = f"{request.payload_type} of {header.dtype} {request.shape}"
            raise ZrtError("bad_request", f"handed: this stage takes {payload} of {wire}, {width} wide, not {said}")
        try:
            inlet = self._inlet(header, handed)
        except ZrtError:
            self._refused.add(before.incarnation)
            self._answer(before, HandOver(takes=False))
            raise
        steps = [(first, step.n) for step, first in zip(header.steps, handed.rows, strict=True)]
        return inlet.rows(handed, steps, shape, dtype)

    def _answer(self, before: Address, message: HandOver) -> None:
        with suppress(ZrtError):  # one that does not hear it goes on as it does
            self._actor.tell(before, message)

    def dismiss(self, header: Header) -> None:
        """Free the places of a message's rows: nobody wants them."""
        handed = header.handed
        if handed is not None and (self.near or (header.incarnation, handed.inode) in self._inlets):
            with suppress(ZrtError):
                self._inlet(header, handed).rows(handed, [], (), torch.uint8)

    def _inlet(self, header: Header, handed: HandedOver) -> Inlet:
        """Return the memory that a message's rows lie in, mapped at the writer's first message."""
        if inlet := self._inlets.get((header.incarnation, handed.inode)):
            return inlet
        if len(self._inlets) >= MOST_INLETS:
            raise ZrtError("overloaded", f"{MOST_INLETS} processes hand rows over to this one already")
        inlet = Inlet(handed, stream_flags)
        for (incarnation, _), older in list(self._inlets.items()):
            if incarnation == header.incarnation:  # it has begun another memory, and writes to this no more
                self._in_executor(older.close, partial(self._forget, older))
        self._inlets[header.incarnation, handed.inode] = inlet
        asyncio.get_running_loop().add_reader(inlet.pid_fd, self._writer_gone, inlet)
        return inlet

    def _writer_gone(self, inlet: Inlet) -> None:
        self._forget(inlet)
        if inlet.waits:
            log.warning("%s: the process before this one ended, rows it was to hand over are lost", self._actor.name)
        inlet.release()
        self._in_executor(inlet.close)

    def _forget(self, inlet: Inlet) -> None:
        for key in [key for key, one in self._inlets.items() if one is inlet]:
            del self._inlets[key]
            asyncio.get_running_loop().remove_reader(inlet.pid_fd)
            os.close(inlet.pid_fd)

    def _in_executor(self, fn: Callable[[], None], then: Callable[[], None] = lambda: None) -> None:
        """Run `fn` in the executor, after what the device was given to do with the memory; then
        `then`, here."""

        async def run() -> None:
            try:
                with suppress(ZrtError):  # the executor is closed, and the process ends
                    await self._executor.run(fn)
            finally:
                then()

        with suppress(ZrtError):  # the actor stops
            self._actor.spawn(run(), "shared memory")


def _machine() -> str:
    """Return a name that is the same for all processes that can map each other's memory: those of
    one boot, one PID namespace, one user."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}/{os.getuid()}"
