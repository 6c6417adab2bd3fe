"""Communicators that join the ranks of a group: gloo through torch.distributed on CPUs, NCCL on
CUDA devices.

A group is found by its comm id, 128 bytes as 256 hex digits: NCCL's own, or for gloo a nonce, port
and host of the leader's rendezvous store, then zeros. Every group has an id of its own, so that no
rank of an earlier one can join it.
"""

import secrets
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from threading import Thread
from typing import Any, Final

import torch
from torch import Tensor, distributed

from zrt.runtime.compute.decoder.tp_linear import LEADER
from zrt.runtime.errors import ZrtError
from zrt.runtime.watchdog import beside

dist: Any = distributed  # partly typed
COMM_ID_BYTES: Final = 128
JOIN_S: Final = 30.0
"""Seconds that all ranks may take to join."""
WAIT_S: Final = 60.0
"""Seconds that gloo waits for the other ranks in an operation. Only a backstop: a rank that waits
too long is killed, or all ranks that it waits for are."""
LOOK_S: Final = 0.5
"""Seconds after which a rank that waits in an operation over gloo looks again whether its group was
aborted."""

_NONCE: Final = 16


class Communicator(ABC):
    """One rank's end of a group; see `tp_linear.Collectives`. Used by one thread, except for
    `abort`."""

    def __init__(self, rank: int, world: int, device: torch.device) -> None:
        self.rank = rank
        self.world = world
        self.device = device

    @abstractmethod
    def all_reduce(self, x: Tensor) -> None: ...

    @abstractmethod
    def broadcast(self, x: Tensor) -> None: ...

    @abstractmethod
    def gather(self, x: Tensor) -> Tensor | None: ...

    @abstractmethod
    def abort(self) -> None:
        """End the group, and free a rank that waits in an operation, from any thread. Returns once
        no CUDA graph holds an operation any more."""

    def sum_of_ones(self) -> int:
        """Return the sum over all ranks when each gives 1: the number of ranks, if the group
        works."""
        one = torch.ones(1, dtype=torch.int32, device=self.device)
        self.all_reduce(one)
        return int(one)


class Rendezvous:
    """The meeting point of the ranks of one group on `device`s of this machine, held by the leader.
    It lasts until `close`, or as long as this object."""

    def __init__(self, device: torch.device, host: str = "127.0.0.1") -> None:
        """Open the meeting point. ZrtError nccl_init_failed."""
        self._device = device
        self._server: Any = None
        if device.type == "cuda":
            from zrt.runtime.compute.collectives.nccl import unique_id

            self.comm_id = unique_id().hex()
            return
        # The store binds every interface unless it is given a socket.
        with socket.create_server((host, 0), backlog=128) as server:
            port = server.getsockname()[1]
            self._server = dist.TCPStore(
                host,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=JOIN_S),
                master_listen_fd=server.detach(),
            )
        name = host.encode()
        packed = secrets.token_bytes(_NONCE) + port.to_bytes(2, "big") + bytes([len(name)]) + name
        self.comm_id = packed.ljust(COMM_ID_BYTES, b"\0").hex()

    def join(self, world: int) -> Communicator:
        """Join the group as rank 0. Blocks until all ranks have joined, or the rendezvous is
        closed. ZrtError nccl_init_failed."""
        return join(self.comm_id, LEADER, world, self._device, left=lambda: self._server is None)

    def close(self) -> None:
        """Free a rank that still waits in `join` for others, over gloo; from any thread."""
        self._server = None


def join(
    comm_id: str, rank: int, world: int, device: torch.device, left: Callable[[], bool] = lambda: False
) -> Communicator:
    """Join the group of this id. Blocks until all ranks have joined, or over gloo until `left` is
    true. ZrtError bad_request: not an id; nccl_init_failed."""
    try:
        packed = bytes.fromhex(comm_id)
    except ValueError:
        packed = b""
    if len(packed) != COMM_ID_BYTES:
        raise ZrtError("bad_request", f"comm_id: expected {COMM_ID_BYTES} bytes in hex")
    if device.type == "cuda":
        from zrt.runtime.compute.collectives.nccl import Nccl

        return Nccl(packed, rank, world, device)
    return Gloo(_place(packed), comm_id[: 2 * _NONCE], rank, world, device, left)


class Gloo(Communicator):
    """The communicator of ranks on CPUs.

    The gloo of torch 2.13 does not always notice that a peer has died: not in the middle of a
    message, nor while joining. A rank that waits then waits for all of WAIT_S. So no rank depends
    on gloo alone: while it waits it checks now and then whether its group was aborted or its
    joining given up, and leaves.
    """

    def __init__(
        self, place: tuple[str, int], nonce: str, rank: int, world: int, device: torch.device, left: Callable[[], bool]
    ) -> None:
        """Join the other ranks by the store at this host and port. Blocks until all ranks have
        joined, or `left` is true. ZrtError nccl_init_failed."""
        super().__init__(rank, world, device)

        def joined() -> Any:
            store = dist.TCPStore(*place, is_master=False, timeout=timedelta(seconds=JOIN_S))  # it tries this long
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            options._timeout = timedelta(seconds=WAIT_S)
            options._threads = 1
            return dist.ProcessGroupGloo(dist.PrefixStore(nonce, store), rank, world, options)

        def look() -> None:
            if left():
                raise TimeoutError("joining was cancelled")

        try:
            self._group = beside(_THREAD, joined, look, LOOK_S)
        except (RuntimeError, ValueError, TimeoutError) as error:
            raise ZrtError("nccl_init_failed", f"rank {rank} of {world} could not join its group: {error}") from None
        self._aborted = False

    def all_reduce(self, x: Tensor) -> None:
        self._wait(self._group.allreduce([x], _SUM))

    def broadcast(self, x: Tensor) -> None:
        self._wait(self._group.broadcast(x, LEADER))

    def gather(self, x: Tensor) -> Tensor | None:
        options = dist.GatherOptions()
        options.rootRank = LEADER
        if self.rank != LEADER:
            self._wait(self._group.gather([], [x], options))
            return None
        out = torch.empty(self.world, *x.shape, dtype=x.dtype, device=x.device)
        self._wait(self._group.gather([list(out.unbind(0))], [x], options))
        return out

    def abort(self) -> None:
        """Abort the group. The end of its peers' processes frees a waiting rank at once; where gloo
        does not notice that end, the rank finds the abort itself."""
        self._aborted = True

    def _wait(self, work: Any) -> None:
        """Wait until the other ranks have joined an operation. ZrtError rank_failed: a rank is
        gone, or the group was aborted."""
        while (failed := _failure(work, _LOOK)) is not None and not work.is_completed():
            if self._aborted:
                # While gloo waits, dropping the group would wait for gloo, with the
                # GIL held.
                Thread(target=_outlast, args=(self._group, work), name=_THREAD, daemon=True).start()
                raise ZrtError("rank_failed", "a collective operation ended: its group was aborted")
        if failed is not None and (failed := _failure(work, _LOOK)) is not None:  # it may have ended by now
            raise ZrtError("rank_failed", f"a collective operation failed: {failed}")


_SUM: Final = dist.AllreduceOptions()
_LOOK: Final = timedelta(seconds=LOOK_S)
_THREAD: Final = "gloo"


def _failure(work: Any, patience: timedelta) -> str | None:
    """Wait at most `patience` for an operation. Return what it says of its failure, or that it is
    not over; None when it succeeded."""
    try:
        work.wait(patience)
    except RuntimeError as error:
        text = str(error).partition("] ")[2] or str(error)  # the text before names a line of gloo's source
        return text.split(". ")[0]
    return None


def _outlast(group: Any, work: Any) -> None:
    """Keep a group alive until an operation of it is over, WAIT_S at most."""
    _failure(work, timedelta(seconds=2 * WAIT_S))
    del work, group


def _place(packed: bytes) -> tuple[str, int]:
    """Return the host and port of the store that a comm id names. ZrtError bad_request: it names
    none."""
    length = packed[_NONCE + 2]
    host = packed[_NONCE + 3 : _NONCE + 3 + length].decode(errors="replace")
    port = int.from_bytes(packed[_NONCE : _NONCE + 2], "big")
    if not host or not port:
        raise ZrtError("bad_request", "comm_id does not name a rendezvous store")
    return host, port
