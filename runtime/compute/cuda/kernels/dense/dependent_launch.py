"""Programmatic dependent launch, where the GPUs have it: a kernel may start while the one before it
ends.

It loads what nobody writes (weights), and waits before it touches anything else. As every program
waits, whatever ran earlier is complete then. GPUs before compute capability 9.0 lack it: kernels
wait for each other as a whole there.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

DEPENDENT: Final = all(torch.cuda.get_device_capability(index) >= (9, 0) for index in range(torch.cuda.device_count()))
"""Whether kernels are launched like that: all GPUs that this process sees have to."""
_DEPENDENT = tl.constexpr(DEPENDENT)


@triton.jit
def wait():
    """For whatever ran earlier."""
    if _DEPENDENT:
        gdc_wait()


@triton.jit
def launch_dependents():
    """The next kernel may start."""
    if _DEPENDENT:
        gdc_launch_dependents()
