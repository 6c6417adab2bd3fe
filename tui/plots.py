"""Widget of the throughput of the last minutes: drawn anew for the size it has, whenever that
changes."""

from collections.abc import Iterable

from textual.content import Content
from textual.widget import Widget

from zrt.tui.plot import plot


class Plots(Widget):
    """Plots of tokens a second above, sessions below."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._pace: list[tuple[float, int]] | None = None

    def show(self, pace: Iterable[tuple[float, int]]) -> None:
        """Show tokens a second and sessions: one pair a second, the newest last."""
        self._pace = list(pace)
        self.refresh()

    def render(self) -> Content:
        if self._pace is None:
            return Content("")
        width, height = max(10, self.size.width), max(6, self.size.height)
        upper = height * 2 // 3
        lines = plot("tokens/s", [tokens for tokens, _ in self._pace], width, upper)
        lines += plot("sessions", [float(count) for _, count in self._pace], width, height - upper)
        return Content("\n".join(lines))
