"""Gated activations of the feed-forward part: SwiGLU and GeGLU (arXiv 2002.05202)."""

import torch
from torch import Tensor
from torch.nn import functional

from zrt.runtime.compute import native, rowwise


def gate_(gate: Tensor, up: Tensor, is_silu: bool) -> None:
    """gate = activation(gate) * up, SiLU or else GELU in its tanh form; both [rows, width], parts of one tensor."""
    if native.take(gate):
        rowwise.gate(gate, up, gelu=not is_silu)
        return
    if is_silu:
        functional.silu(gate, inplace=True)
    else:
        torch.ops.aten.gelu_(gate, approximate="tanh")
    gate.mul_(up)
