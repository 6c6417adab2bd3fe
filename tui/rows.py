"""Rows of tables as lines of text, and their parts: cells, bars, sparklines, amounts. Pure: no
widgets, no clock."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Generic, Literal, TypeVar

from rich.cells import cell_len, set_cell_size

from zrt.runtime.formatting import escaped

Style = Literal["plain", "dim", "good", "warn", "bad"]
BARS: Final = "▁▂▃▄▅▆▇█"
BRANCHES: Final = " │├└"
LEAST: Final = 10
"""The fewest cells in which a cut text is still shown."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Row:
    """A line: `key` names the item it shows, over all snapshots; `text` is cut and filled to its
    columns."""

    key: str
    text: str
    style: Style = "plain"


@dataclass(frozen=True)
class Column(Generic[T]):
    """A title, a width in terminal cells (negative: flush right), and what of an item is shown in
    the column. Up to `most` the column may be wider, where its texts are."""

    title: str
    width: int
    show: Callable[[T], str]
    most: int = 0


@dataclass(frozen=True)
class Table(Generic[T]):
    """Columns, an item's key and an item's style."""

    columns: Sequence[Column[T]]
    key: Callable[[T], str]
    style: Callable[[T], Style]

    def fitted(self, items: Sequence[T], room: int) -> "Table[T]":
        """Return the table with columns as wide as these items need; by `room` cells more at
        most."""
        columns = []
        for column in self.columns:
            if column.most:
                more = max(0, min(room, column.most - column.width, _widest(column, items) - column.width))
                column, room = replace(column, width=column.width + more), room - more
            columns.append(column)
        return replace(self, columns=columns)

    def within(self, items: Sequence[T], width: int) -> "Table[T]":
        """Return the table with the columns that fit into `width` cells: of the columns that are
        not empty for these items, those from the left on; the first that does not fit may be
        cut."""
        columns: list[Column[T]] = []
        for column in self.columns:
            if not any(column.show(item) for item in items):
                continue
            need = min(abs(column.width), max(_widest(column, items), cell_len(column.title)))
            left = width - sum(abs(one.width) + 1 for one in columns)
            if need > left and (column.width < 0 or left < LEAST):
                break
            fits = min(need, left)
            columns.append(replace(column, width=fits if column.width > 0 else -fits, most=0))
            if need > left:
                break
        return replace(self, columns=columns)

    @property
    def widths(self) -> list[int]:
        return [column.width for column in self.columns]

    @property
    def head(self) -> str:
        return " ".join(_cell(column.title, column.width) for column in self.columns)

    def row(self, item: T) -> Row:
        text = " ".join(_cell(column.show(item), column.width) for column in self.columns)
        return Row(self.key(item), text, self.style(item))

    def described(self, item: T) -> list[str]:
        """Return every column of an item that is not empty, a line each, uncut, and without the
        branches of a tree."""
        shown = [(column.title, column.show(item).strip(BRANCHES)) for column in self.columns]
        return [f"{title:<14} {escaped(value, breaks=True)}" for title, value in shown if value]


def _widest(column: Column[T], items: Sequence[T]) -> int:
    return max((cell_len(escaped(column.show(item))) for item in items), default=0)


def _cell(text: str, width: int) -> str:
    """Return the text cut, with a mark, or filled to `width`, in one line."""
    text = escaped(text)
    if cell_len(text) > abs(width):
        return set_cell_size(text, abs(width) - 1) + "…"
    return set_cell_size(text, width) if width >= 0 else text.rjust(-width)


def bar(part: float, whole: float, width: int) -> str:
    """Return a share as a bar; empty when `whole` is 0."""
    if whole <= 0:
        return ""
    full = round(width * min(1.0, max(0.0, part / whole)))
    return "█" * full + "░" * (width - full)


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the last values, each as a bar relative to the largest."""
    shown = values[-width:]
    most = max(shown, default=0.0)
    if most <= 0:
        return ""
    levels = [value / most * len(BARS) for value in shown]
    return "".join(BARS[int(min(len(BARS) - 1, level))] if level > 0 else BARS[0] for level in levels)


def amount(count: float) -> str:
    """Return a number of bytes for people."""
    for unit in ("B", "K", "M", "G"):
        if count < 1024:
            return f"{count:.0f}{unit}"
        count /= 1024
    return f"{count:.1f}T"
