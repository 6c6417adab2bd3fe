"""Buffers that every block of a forward writes over, and the views of them that the block works
with.

At one row, making a view costs as much as an operation: its code has left the caches while weights
streamed through. So all views of a number of rows are made once and kept.
"""

from typing import Final

import torch
from torch import Tensor

from zrt.runtime.models.architecture.spec import ModelSpec

VIEWS_KEPT: Final = 64


class Workspace:
    """The buffers of one decoder, grown to the largest batch seen."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self._spec = spec
        self._device = device
        self._dtype = dtype
        self._capacity = 0
        self._buffers: dict[str, Tensor] = {}
        self._views: dict[int, Views] = {}

    def views(self, rows: int) -> "Views":
        """Return the views of the first `rows` rows. The contents of the buffers are lost at the
        next call."""
        if rows > self._capacity:
            self._grow(rows)
        if rows not in self._views:
            if len(self._views) == VIEWS_KEPT:
                self._views.clear()
            self._views[rows] = Views(self._spec, {name: buffer[:rows] for name, buffer in self._buffers.items()})
        return self._views[rows]

    def _grow(self, rows: int) -> None:
        spec = self._spec
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        widths = {
            "hidden": spec.hidden_size,
            "normed": spec.hidden_size,
            "qkv": (heads + 2 * kv_heads) * spec.head_dim,
            "swapped": (heads + kv_heads) * spec.rope_dim,
            "attended": heads * spec.head_dim,
            "gate_up": 2 * spec.intermediate_size,
        }
        self._views.clear()
        self._buffers = {
            name: torch.empty(rows, width, dtype=self._dtype, device=self._device) for name, width in widths.items()
        }
        self._buffers["scale"] = torch.empty(rows, 1, device=self._device)
        self._buffers["head_scale"] = torch.empty(rows, heads + kv_heads, 1, device=self._device)
        self._capacity = rows


class Views:
    """The views of the work buffers for one number of rows; `group` is heads / kv heads."""

    def __init__(self, spec: ModelSpec, buffers: dict[str, Tensor]) -> None:
        heads, kv_heads, head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.hidden = buffers["hidden"]  # [rows, hidden], the residual stream
        self.normed = buffers["normed"]  # [rows, hidden]
        self.scale = buffers["scale"]  # float32 [rows, 1]
        self.qkv = buffers["qkv"]  # [rows, (heads + 2 x kv heads) x head_dim]
        rows = len(self.qkv)
        parts = self.qkv.view(rows, heads + 2 * kv_heads, head_dim)
        self.qk = parts[:, : heads + kv_heads]  # [rows, heads + kv heads, head_dim]
        half = spec.rope_dim // 2
        self.rotated = self.qk[..., : 2 * half]  # [rows, heads + kv heads, rope_dim]
        self.rotated_halves = (self.rotated[..., half:], self.rotated[..., :half])
        self.swapped = buffers["swapped"].view(self.rotated.shape)
        self.qk_scale = buffers["head_scale"]  # float32 [rows, heads + kv heads, 1]
        self.q = self.qkv[:, : heads * head_dim]  # [rows, heads x head_dim]
        self.k = self.qkv[:, heads * head_dim : (heads + kv_heads) * head_dim]  # [rows, kv heads x head_dim]
        self.queries = parts[:, :heads].view(
            rows, kv_heads, heads // kv_heads, head_dim
        )  # [rows, kv heads, group, head_dim]
        self.kv = parts[:, heads:].view(rows, 2, kv_heads, head_dim)  # [rows, 2, kv heads, head_dim]
        self.kv_by_head = self.kv.permute(1, 2, 0, 3)  # [2, kv heads, rows, head_dim]
        self.attended = buffers["attended"]  # [rows, heads x head_dim]
        self.attended_heads = self.attended.view(self.queries.shape)  # [rows, kv heads, group, head_dim]
        self.gate_up = buffers["gate_up"]  # [rows, 2 x intermediate]
        self.gate, self.up = self.gate_up.chunk(2, dim=1)  # two [rows, intermediate]
