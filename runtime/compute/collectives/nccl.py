"""NVIDIA's collectives for the ranks of a group on CUDA devices of one machine, through NCCL's own
C interface.

torch's process group is not used: its watchdog goes on looking at a communicator that was aborted,
and its abort never returns while a CUDA graph that holds an operation waits for a peer that is
gone. `ncclCommAbort` from another thread ends that wait at once.
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api.html
"""

import ctypes
import os
import threading
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from zrt.runtime.compute.collectives.communicator import Communicator
from zrt.runtime.compute.decoder.tp_linear import LEADER
from zrt.runtime.errors import Kind, ZrtError

ID_BYTES: Final = 128
CALL_S: Final = 1.0
"""Seconds that an abort waits for a call in progress: a call that the device's full queue holds up
ends only by the abort."""

_DTYPES: Final = {
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
_SUM: Final = 0


class _UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_byte * ID_BYTES)]


@cache
def _library() -> Any:
    """Return the NCCL that torch has loaded."""
    # All ranks are on this machine, so no other machine need reach them.
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    library = ctypes.CDLL("libnccl.so.2")
    at = c_void_p
    for name, arguments in {
        "ncclGetUniqueId": [POINTER(_UniqueId)],
        "ncclCommInitRank": [POINTER(at), c_int, _UniqueId, c_int],
        "ncclCommAbort": [at],
        "ncclAllReduce": [at, at, c_size_t, c_int, c_int, at, at],
        "ncclBroadcast": [at, at, c_size_t, c_int, c_int, at, at],
        "ncclSend": [at, c_size_t, c_int, c_int, at, at],
        "ncclRecv": [at, c_size_t, c_int, c_int, at, at],
        "ncclGroupStart": [],
        "ncclGroupEnd": [],
    }.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, c_int
    library.ncclGetErrorString.argtypes, library.ncclGetErrorString.restype = [c_int], c_char_p
    library.ncclGetLastError.argtypes, library.ncclGetLastError.restype = [at], c_char_p
    return library


def unique_id() -> bytes:
    """Return the id by which the ranks of a new group find each other; the process that asks for it
    waits for the ranks in a thread of NCCL's."""
    own = _UniqueId()
    _check(_library().ncclGetUniqueId(byref(own)), "nccl_init_failed", "no group can be formed here")
    return bytes(own.bytes)


class Nccl(Communicator):
    """The communicator of ranks on CUDA devices. Operations are put on the device's current stream,
    and may be captured in CUDA graphs."""

    def __init__(self, unique: bytes, rank: int, world: int, device: torch.device) -> None:
        """Join the group. Blocks until all ranks have joined. ZrtError nccl_init_failed."""
        super().__init__(rank, world, device)
        torch.cuda.set_device(device)
        self._library = _library()
        self._call = threading.Lock()
        self._aborted = False
        self._communicator = c_void_p()
        own = _UniqueId.from_buffer_copy(unique)
        status = self._library.ncclCommInitRank(byref(self._communicator), world, own, rank)
        _check(status, "nccl_init_failed", f"rank {rank} of {world} could not join its group on {device}")

    def all_reduce(self, x: Tensor) -> None:
        at = x.data_ptr()
        with self._call:
            self._made(self._library.ncclAllReduce(at, at, x.numel(), _DTYPES[x.dtype], _SUM, *self._where()))

    def broadcast(self, x: Tensor) -> None:
        at = x.data_ptr()
        with self._call:
            self._made(self._library.ncclBroadcast(at, at, x.numel(), _DTYPES[x.dtype], LEADER, *self._where()))

    def gather(self, x: Tensor) -> Tensor | None:
        library, kind = self._library, _DTYPES[x.dtype]
        if self.rank != LEADER:
            with self._call:
                self._made(library.ncclSend(x.data_ptr(), x.numel(), kind, LEADER, *self._where()))
            return None
        out = torch.empty(self.world, *x.shape, dtype=x.dtype, device=x.device)
        out[LEADER].copy_(x)
        with self._call:
            self._made(library.ncclGroupStart())
            for rank in range(self.world):
                if rank != LEADER:
                    self._made(library.ncclRecv(out[rank].data_ptr(), x.numel(), kind, rank, *self._where()))
            self._made(library.ncclGroupEnd())
        return out

    def abort(self) -> None:
        """End every wait for a peer, from any thread, and the group. Returns once no CUDA graph
        holds an operation any more."""
        free = self._call.acquire(timeout=CALL_S)
        try:
            if self._aborted:
                return
            self._aborted = True
        finally:
            if free:
                self._call.release()
        self._library.ncclCommAbort(self._communicator)

    def _where(self) -> tuple[c_void_p, int]:
        if self._aborted:
            raise ZrtError("rank_failed", "the group was aborted")
        return self._communicator, torch.cuda.current_stream(self.device).cuda_stream

    def _made(self, status: int) -> None:
        _check(status, "rank_failed", "a collective failed", self._communicator)


def _check(status: int, kind: Kind, what: str, communicator: c_void_p | None = None) -> None:
    if status != 0:
        library = _library()
        words = [library.ncclGetErrorString(status), library.ncclGetLastError(communicator)]
        said = ": ".join(word.decode(errors="replace").strip() for word in words if word)
        raise ZrtError(kind, f"{what}: {said}")
