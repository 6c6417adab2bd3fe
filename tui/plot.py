"""Throughput as a plot of block characters. Pure."""

from collections.abc import Sequence

EIGHTHS = " ▁▂▃▄▅▆▇█"


def plot(title: str, values: Sequence[float], width: int, height: int) -> list[str]:
    """`height` lines: a title with the newest and the largest value, and columns, the newest at the right."""
    rows = max(1, height - 1)
    shown = list(values[-max(1, width) :])
    most = max(shown, default=0.0)
    newest = shown[-1] if shown else 0.0
    lines = [f"{title}: {newest:.1f}, most {most:.1f}"]
    levels = [round(value / most * rows * 8) if most > 0 else 0 for value in shown]
    for row in reversed(range(rows)):
        filled = "".join(EIGHTHS[min(8, max(0, level - row * 8))] for level in levels)
        lines.append(filled.rjust(width))
    return lines
