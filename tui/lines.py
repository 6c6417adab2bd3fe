"""A table drawn line by line: only visible rows are formatted, only changed lines are drawn
again."""

from collections.abc import Sequence
from typing import Any, ClassVar

from rich.segment import Segment
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from zrt.tui.rows import Row, Table

NARROW = 80
"""Columns of the terminal that tables are made for; in a wider one some columns are as wide as they
need."""
STYLES = ("plain", "dim", "good", "warn", "bad", "head", "cursor")


class Lines(ScrollView, can_focus=True):
    """Rows of `table`, with a title line that stays, and a cursor that stays on its row's key.
    `empty` is shown where there is no row. Rows are grey while they are `old`, when their present
    state is not known. `drawn` counts lines that were drawn. The colours still show as green,
    yellow and red in a terminal with 16 colours."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {f"lines--{style}" for style in STYLES}
    DEFAULT_CSS = """
    Lines { height: 1fr; overflow-x: hidden; scrollbar-size-vertical: 1; }
    Lines > .lines--plain { color: $foreground; }
    Lines > .lines--dim { color: $text-muted; text-style: dim; }
    Lines > .lines--good { color: #40d080; text-style: bold; }
    Lines > .lines--warn { color: #e8b030; }
    Lines > .lines--bad { color: #ff6060; }
    Lines:light > .lines--good { color: #007a00; }
    Lines:light > .lines--warn { color: #806000; }
    Lines:light > .lines--bad { color: #b00000; }
    Lines > .lines--head { color: $foreground; text-style: bold underline; }
    Lines > .lines--cursor { text-style: reverse; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "up", show=False),
        Binding("down,j", "move(1)", "down", show=False),
        Binding("pageup", "page(-1)", "page up", show=False),
        Binding("pagedown", "page(1)", "page down", show=False),
        Binding("home,g", "move(-1000000)", "first", show=False),
        Binding("end,G", "move(1000000)", "last", show=False),
        Binding("left", "shift(-8)", "left", show=False),
        Binding("right", "shift(8)", "right", show=False),
        Binding("enter", "choose", "open", show=False),
    ]

    class Chosen(Message):
        """Message that Enter was pressed on a row."""

        def __init__(self, lines: "Lines", key: str) -> None:
            super().__init__()
            self.lines = lines
            self.key = key

        @property
        def control(self) -> "Lines":
            return self.lines

    def __init__(self, table: Table[Any], *, id: str, empty: str = "") -> None:
        super().__init__(id=id)
        self.drawn = 0
        self._old = False
        self.table = self._given = table
        self._empty = empty
        self._items: Sequence[Any] = []
        self._shown: dict[int, Row] = {}
        self._cursor = 0
        self._left = 0

    @property
    def item(self) -> Any | None:
        """The item under the cursor."""
        return self._items[self._cursor] if self._items else None

    @property
    def row(self) -> Row | None:
        return self.table.row(self.item) if self._items else None

    @property
    def old(self) -> bool:
        return self._old

    @old.setter
    def old(self, old: bool) -> None:
        if old != self._old:
            self._old = old
            self.refresh()

    def show(self, items: Sequence[Any]) -> None:
        """Show these items as rows from now on."""
        key = self.table.key(self.item) if self._items else None
        count, widths = len(self._items), self.table.widths
        self.table = self._given.fitted(items, self.size.width - NARROW)
        self._items = items
        place = min(self._cursor, max(0, len(items) - 1))
        if key is not None and not (items and self.table.key(items[place]) == key):
            place = next((at for at, item in enumerate(items) if self.table.key(item) == key), place)
        moved = place != self._cursor
        self._cursor = place
        if len(items) != count:
            self.virtual_size = Size(self.size.width, len(items) + 1)
        if len(items) != count or moved or self.table.widths != widths:
            self.refresh()
            return
        top = self.scroll_offset.y
        for place in range(top, min(len(items), top + self.size.height - 1)):
            if self._shown.get(place) != self.table.row(items[place]):
                self._refresh_row(place)

    def _refresh_row(self, place: int) -> None:
        self.refresh(Region(0, place + 1 - self.scroll_offset.y, self.size.width, 1))

    def render_line(self, y: int) -> Strip:
        self.drawn += 1
        width = self.size.width
        if y == 0:
            return self._strip(self.table.head, "head", width)
        place = self.scroll_offset.y + y - 1
        if place >= len(self._items):
            return self._strip("" if place or self._items else self._empty, "dim", width)
        row = self.table.row(self._items[place])
        self._shown[place] = row
        if len(self._shown) > 4 * self.size.height + 16:
            self._shown = {place: row}
        style = "dim" if self.old else row.style
        return self._strip(row.text, style, width, cursor=place == self._cursor and self.has_focus)

    def _strip(self, text: str, style: str, width: int, *, cursor: bool = False) -> Strip:
        rich = self.get_component_rich_style(f"lines--{style}")
        if cursor:
            rich = rich + self.get_component_rich_style("lines--cursor", partial=True)
        strip = Strip([Segment(text, rich)])
        return strip.crop(self._left, self._left + width).extend_cell_length(width, rich)

    def on_resize(self) -> None:
        self.virtual_size = Size(self.size.width, len(self._items) + 1)
        self.refresh()

    def on_focus(self) -> None:
        self.refresh()

    def on_blur(self) -> None:
        self.refresh()

    def action_move(self, rows: int) -> None:
        if not self._items:
            return
        before, self._cursor = self._cursor, min(len(self._items) - 1, max(0, self._cursor + rows))
        top, height = self.scroll_offset.y, max(1, self.size.height - 1)
        if self._cursor < top:
            self.scroll_to(y=self._cursor, animate=False, immediate=True)
        elif self._cursor >= top + height:
            self.scroll_to(y=self._cursor - height + 1, animate=False, immediate=True)
        self._refresh_row(before)
        self._refresh_row(self._cursor)

    def action_page(self, pages: int) -> None:
        self.action_move(pages * max(1, self.size.height - 1))

    def action_shift(self, cells: int) -> None:
        widest = len(self.table.head)
        self._left = max(0, min(self._left + cells, widest - self.size.width))
        self.refresh()

    def action_choose(self) -> None:
        if self._items:
            self.post_message(self.Chosen(self, self.table.key(self.item)))
