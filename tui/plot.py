"""A plot of throughput in block characters, with its axes. Pure."""

import math
from collections.abc import Sequence
from typing import Final

EIGHTHS: Final = " ▁▂▃▄▅▆▇█"
GUTTER: Final = 7
"""Cells of the numbers at the left, with their line."""
LEAST: Final = 3
"""Lines of a plot with title and axis."""


def plot(title: str, values: Sequence[float], width: int, height: int, *, seconds: float = 1.0) -> list[str]:
    """Return `height` lines: a title with the newest value, columns over `values` (one every
    `seconds`, the newest at the right), and their time axis."""
    columns = max(1, width - GUTTER)
    rows = max(1, height - LEAST + 1)
    shown = list(values[-columns:])
    top = _round_up(max(shown, default=0.0))
    levels = [round(min(1.0, value / top) * rows * 8) if value > 0 else 0 for value in shown]
    lines = [f"{title}: {shown[-1] if shown else 0.0:.1f} now, {max(shown, default=0.0):.1f} most"]
    for row in reversed(range(rows)):
        label = f"{top:g}" if row == rows - 1 else ""
        filled = "".join(EIGHTHS[min(8, max(0, level - row * 8))] for level in levels)
        lines.append(f"{label:>{GUTTER - 2}} ┤{filled.rjust(columns)}")
    ago = f"{len(shown) * seconds:.0f} s ago" if shown else ""
    axis = f"{ago:<{max(1, len(shown) - 3)}}now" if len(shown) > len(ago) + 4 else "now"
    lines.append(f"{'0':>{GUTTER - 2}} └{axis.rjust(columns)}"[:width])
    return lines[:height]


def _round_up(value: float) -> float:
    """Return the next of 1, 2, 5, 10, 20, …"""
    if not 0 < value < math.inf:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(value))
    return next(step * unit for step in (1, 2, 5, 10) if step * unit >= value)
