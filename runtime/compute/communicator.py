"""The ranks of a group joined by torch.distributed: gloo on CPUs, NCCL on CUDA devices.

A group is found by its comm id, 128 bytes as 256 hex digits like NCCL's own: a nonce, port and host of the leader's rendezvous store, then
zeros. Every group has an id of its own, so that no rank of an earlier one can join it.
"""

import secrets
import socket
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor, distributed

from zrt.runtime.compute.parallel import LEADER
from zrt.runtime.errors import ZrtError

dist: Any = distributed  # typed in part
COMM_ID_BYTES: Final = 128
JOIN_S: Final = 30.0
"""How long all ranks may take to join."""
WAIT_S: Final = 600.0
"""How long gloo waits for the others in an operation. Only a backstop: whoever waits too long is killed, or all it waits for are."""

_NONCE: Final = 16


class Rendezvous:
    """The store where the ranks of one group meet, held by the leader on its own machine. It lasts as long as this object."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        # The store binds every interface unless it is given a socket.
        with socket.create_server((host, 0), backlog=128) as server:
            port = server.getsockname()[1]
            self._store = dist.TCPStore(
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

    def join(self, world: int, device: torch.device) -> "Communicator":
        """As rank 0. Blocks until all have joined. ZrtError nccl_init_failed."""
        return _join(self._store, self.comm_id, LEADER, world, device)


def join(comm_id: str, rank: int, world: int, device: torch.device) -> "Communicator":
    """Join the group of this id. Blocks until all have. ZrtError bad_request: not an id; nccl_init_failed."""
    host, port = _place(comm_id)
    try:
        store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=JOIN_S))
    except (RuntimeError, ValueError) as error:
        raise ZrtError("nccl_init_failed", f"the group's store at {host}:{port} is not there: {error}") from None
    return _join(store, comm_id, rank, world, device)


class Communicator:
    """One rank's end of a group; see parallel.Collectives. Used by one thread, save `abort`."""

    def __init__(self, group: Any, rank: int, world: int, device: torch.device) -> None:
        self.rank = rank
        self.world = world
        self._group = group
        self._device = device

    def all_reduce(self, x: Tensor) -> None:
        self._group.allreduce([x], _SUM).wait()

    def gather(self, x: Tensor) -> Tensor | None:
        options = dist.GatherOptions()
        options.rootRank = LEADER
        if self.rank != LEADER:
            self._group.gather([], [x], options).wait()
            return None
        out = torch.empty(self.world, *x.shape, dtype=x.dtype, device=x.device)
        self._group.gather([list(out.unbind(0))], [x], options).wait()
        return out

    def sum_of_ones(self) -> int:
        """What all ranks add up to when each says 1: their number, if the group works."""
        one = torch.ones(1, dtype=torch.int32, device=self._device)
        self.all_reduce(one)
        return int(one)

    def abort(self) -> None:
        """Free a rank that waits in an operation, from another thread. On gloo the end of its peers' processes does that, and this nothing."""
        if self._device.type == "cuda":
            self._group.abort()


_SUM: Final = dist.AllreduceOptions()


def _place(comm_id: str) -> tuple[str, int]:
    try:
        packed = bytes.fromhex(comm_id)
        length = packed[_NONCE + 2]
        host = packed[_NONCE + 3 : _NONCE + 3 + length].decode()
    except (ValueError, IndexError):
        packed, host = b"", ""
    port = int.from_bytes(packed[_NONCE : _NONCE + 2], "big")
    if len(packed) != COMM_ID_BYTES or not host or not port:
        raise ZrtError("bad_request", f"comm_id: expected {COMM_ID_BYTES} bytes in hex that name a store")
    return host, port


def _join(store: Any, comm_id: str, rank: int, world: int, device: torch.device) -> Communicator:
    own = dist.PrefixStore(comm_id[: 2 * _NONCE], store)
    make = _nccl if device.type == "cuda" else _gloo
    try:
        return Communicator(make(own, rank, world, device), rank, world, device)
    except (RuntimeError, ValueError) as error:
        raise ZrtError("nccl_init_failed", f"rank {rank} of {world} could not join its group: {error}") from None


def _gloo(store: Any, rank: int, world: int, device: torch.device) -> Any:
    store.set_timeout(timedelta(seconds=JOIN_S))
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=WAIT_S)
    options._threads = 1
    return dist.ProcessGroupGloo(store, rank, world, options)


def _nccl(store: Any, rank: int, world: int, device: torch.device) -> Any:
    torch.cuda.set_device(device)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=WAIT_S)
    return dist.ProcessGroupNCCL(store, rank, world, options)
