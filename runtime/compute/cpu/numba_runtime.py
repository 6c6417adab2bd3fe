"""The compilation of numba kernels and the threads they run on.

A kernel is a native function that the OpenMP runtime of torch runs on torch's own threads, so that
a process has one pool of them: the threads of two pools would take each other's cores while they
spin. Each thread takes the next part of the job until none is left, which keeps all equally busy
however long a part takes. The result of a part does not depend on the thread that runs it, nor on
the number of rows or sessions.

Importing a module of kernels compiles them, or reads them from `home()/kernels`; numba holds the
GIL for it. A disk that is full or a file that is damaged only costs the time to compile. Such a
module imports numba's names from this module: numba reads its environment when it is first
imported.
"""

import ctypes
import logging
import math
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import llvmlite.binding
import numpy as np
import torch
from torch import Tensor

from zrt.runtime.paths import home

log = logging.getLogger(__name__)


def _prepare() -> bool:
    """Set what numba reads once, when it is imported; return whether compiled kernels can be
    kept."""
    features = llvmlite.binding.get_host_cpu_features()
    if features.get("avx512f"):  # LLVM prefers half the width on most processors that have it
        os.environ.setdefault("NUMBA_CPU_NAME", llvmlite.binding.get_host_cpu_name())
        os.environ.setdefault("NUMBA_CPU_FEATURES", features.flatten() + ",-prefer-256-bit")
    folder = home() / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    os.environ.setdefault("NUMBA_CACHE_DIR", str(folder))
    return os.access(folder, os.W_OK)


__all__ = [
    "FAST",
    "LANES",
    "LOWEST",
    "ONE",
    "ZERO",
    "cgutils",
    "exp",
    "floats",
    "integers",
    "intrinsic",
    "ir",
    "kernel",
    "njit",
    "np",
    "run",
    "take",
    "take_next",
    "types",
]

_KEPT: Final = _prepare()
LANES: Final = 16 if llvmlite.binding.get_host_cpu_features().get("avx512f") else 8
"""The float32 numbers of a vector register."""

from llvmlite import ir  # noqa: E402
from numba import cfunc, njit, types  # noqa: E402
from numba.core import cgutils  # noqa: E402
from numba.extending import intrinsic  # noqa: E402

FAST: Final = {"fastmath": True, "boundscheck": False, "error_model": "numpy"}
_JOB: Final = types.void(types.CPointer(types.int64))

ZERO: Final = np.float32(0)
LOWEST: Final = np.float32(-87.0)  # e to this is the least normal float32
_LOG2_E: Final = np.float32(math.log2(math.e))
_LN2_HIGH: Final = np.float32(0.693359375)  # ln 2 in two parts: the first has few bits, so that its multiples are exact
_LN2_LOW: Final = np.float32(math.log(2) - 0.693359375)
_HALF: Final = np.float32(0.5)
_E2, _E3, _E4, _E5, _E6 = (np.float32(1 / math.factorial(n)) for n in (2, 3, 4, 5, 6))
_E7: Final = np.float32(1 / math.factorial(7))
ONE: Final = np.float32(1)


def kernel(function: Callable[[Any], None]) -> Any:
    """Return a native function of one array of int64 (see `run`), compiled now, or loaded from the
    cache."""
    if _KEPT:
        for _ in range(2):
            try:
                return cfunc(_JOB, cache=True, **FAST)(function)
            except OSError as error:
                log.warning("compiled kernels cannot be kept: %s", error)
                break
            except Exception as error:  # unpickling raises whatever it likes
                log.warning("the kept kernel %s is damaged, and compiled anew: %r", function.__name__, error)
                _forget(function.__name__)
    return cfunc(_JOB, **FAST)(function)


def _forget(name: str) -> None:
    for file in Path(os.environ["NUMBA_CACHE_DIR"]).rglob(f"*.{name}-*.nb?"):
        with suppress(OSError):
            file.unlink()


@intrinsic  # type: ignore[untyped-decorator]
def floats(typing: Any, address: Any) -> Any:
    """Return the float32 numbers at an address."""
    signature = types.CPointer(types.float32)(types.int64)

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return signature, lower


@intrinsic  # type: ignore[untyped-decorator]
def integers(typing: Any, address: Any) -> Any:
    """Return the int64 numbers at an address."""
    signature = types.CPointer(types.int64)(types.int64)

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return signature, lower


@intrinsic  # type: ignore[untyped-decorator]
def take_next(typing: Any, counter: Any) -> Any:
    """Increment a counter atomically; return its value before."""
    signature = types.int64(types.CPointer(types.int64))

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", args[0], context.get_constant(types.int64, 1), "monotonic")

    return signature, lower


@intrinsic  # type: ignore[untyped-decorator]
def _power_of_two(typing: Any, exponent: Any) -> Any:
    """Return 2 to an integer within float32's normal exponents."""
    signature = types.float32(types.int32)

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        biased = builder.add(args[0], context.get_constant(types.int32, 127))
        bits = builder.shl(biased, context.get_constant(types.int32, 23))
        return builder.bitcast(bits, context.get_value_type(types.float32))

    return signature, lower


@njit(error_model="numpy")  # type: ignore[untyped-decorator]  # without fastmath, which would merge the two parts of ln 2
def exp(x: Any) -> Any:
    """Return e to `x` of -87 to 0, within 2e-7 of it: a Taylor polynomial after Cody and Waite's
    reduction."""
    n = np.int32(x * _LOG2_E - _HALF)
    f = (x - np.float32(n) * _LN2_HIGH) - np.float32(n) * _LN2_LOW
    p = _E2 + f * (_E3 + f * (_E4 + f * (_E5 + f * (_E6 + f * _E7))))
    return (ONE + f * (ONE + f * p)) * _power_of_two(n)


def _runtime() -> "Callable[..., None] | None":
    """Return OpenMP's "run this function on all threads", of the runtime that torch has loaded."""
    try:
        run: Callable[..., None] = ctypes.CDLL(None).GOMP_parallel
    except AttributeError:
        return None
    run.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)  # type: ignore[attr-defined]
    run.restype = None  # type: ignore[attr-defined]
    return run


_parallel: Final = _runtime()


def take(tensor: Tensor) -> bool:
    """Return whether the kernels accept a weight, a cache or an activation such as this."""
    return _parallel is not None and tensor.dtype == torch.float32 and tensor.device.type == "cpu"


def run(kernel: int, job: Any, threads: int) -> None:
    """Run the native function at an address on `threads` threads, all given the same array of
    int64; its first number counts parts."""
    assert _parallel is not None
    _parallel(kernel, ctypes.addressof(job), threads, 0)
