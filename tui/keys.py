"""The monitor's views and keys, and their descriptions."""

from typing import Final

from textual.binding import Binding

VIEWS: Final = ("cluster", "sessions", "drains", "events", "throughput")
ONLY: Final = {
    "cancel": ("sessions",),
    "sort": ("sessions",),
    "filter": ("sessions", "events"),
    **dict.fromkeys(("drain", "undrain", "restart"), ("cluster",)),
}
"""Actions that only some views have."""

HELP: Final = """\
1 to 5, tab     cluster, sessions, drains, events, throughput;
                3 again: from one table of drains to the other
arrows          move; left and right: more columns
page up, down   a page; home, end: first and last
enter           a session's text, route and times; all columns of other rows

c               cancel the session
d, u            drain the block server, let it serve again
r               restart the block server or layer worker
t               chat

/               filter sessions and events; escape: all of them
s               another order of sessions
space           hold the display
y               copy the row
x, X            export the screen as SVG, the cluster as JSON
l               light or dark
ctrl+p          all commands by name
q, ctrl+c       quit"""

KEYS: Final = (
    *(Binding(str(place + 1), f"view('{name}')", name, show=False) for place, name in enumerate(VIEWS)),
    Binding("tab", "next_view", "view", priority=True),
    Binding("question_mark", "help", "help"),
    Binding("q", "quit", "quit"),
    Binding("ctrl+c", "quit", "quit", show=False),
    Binding("c", "cancel", "cancel"),
    Binding("d", "drain", "drain"),
    Binding("u", "undrain", "undrain"),
    Binding("r", "restart", "restart"),
    # Before the focused widget gets the key, so that what is typed next goes to the filter.
    Binding("slash", "filter", "filter", priority=True),
    Binding("s", "sort", "sort"),
    Binding("t", "chat", "chat"),
    Binding("space", "pause", "hold", show=False),
    Binding("y", "copy", "copy", show=False),
    Binding("x", "export_svg", "export", show=False),
    Binding("X", "export_json", "export JSON", show=False),
    Binding("l", "light", "light/dark", show=False),
)
