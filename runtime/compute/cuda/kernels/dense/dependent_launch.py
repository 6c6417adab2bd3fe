"""Programmatic dependent launch, where the GPUs have it: a kernel may start while the previous one
ends.

Such a kernel loads only data that no kernel writes (weights), and waits before it touches anything
else. As every program waits, all earlier kernels are complete then. GPUs before compute capability
9.0 lack it: kernels there wait for each other as a whole.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

DEPENDENT: Final = all(torch.cuda.get_device_capability(index) >= (9, 0) for index in range(torch.cuda.device_count()))
"""Whether kernels use programmatic dependent launch: all GPUs that this process sees must have
it."""
_DEPENDENT = tl.constexpr(DEPENDENT)


@triton.jit
def wait():
    """Wait for all earlier kernels."""
    if _DEPENDENT:
        gdc_wait()


@triton.jit
def launch_dependents():
    """Let the next kernel start."""
    if _DEPENDENT:
        gdc_launch_dependents()
