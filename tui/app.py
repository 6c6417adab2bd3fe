"""The application of `zrt top`: the cluster in a terminal, live. Views are tables of one feed; keys
act on the row under the cursor."""

import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import ClassVar

from textual.app import App, ComposeResult, SystemCommand
from textual.binding import BindingType
from textual.command import Provider
from textual.containers import Horizontal, Vertical
from textual.screen import Screen
from textual.widgets import ContentSwitcher, Footer, Input, Static

from zrt.runtime.client.client import Client
from zrt.runtime.errors import ZrtError
from zrt.runtime.formatting import counted, escaped
from zrt.runtime.messages.client import Cluster
from zrt.runtime.messages.cluster import SessionInfo
from zrt.tui.detail import Detail
from zrt.tui.feed import Feed
from zrt.tui.keys import HELP, KEYS, ONLY, VIEWS
from zrt.tui.lines import Lines
from zrt.tui.palette import Commands
from zrt.tui.plots import Plots
from zrt.tui.screens import Chat, Confirm, Page
from zrt.tui.state import MonitorState
from zrt.tui.status import as_json
from zrt.tui.tables import DRAINS, EVENTS, ORDERS, REPLIES, SESSIONS, clock, events, sessions
from zrt.tui.tree import TREE, TreeNode, nodes

DRAW_S = 0.25
DRAIN_S = 30.0


class Top(App[None]):
    """The monitor of the cluster at `endpoint`; exports go to `folder`."""

    TITLE = "zrt top"
    CSS = """
    #title { height: 1; background: $panel; }
    #views { width: auto; }
    #told { width: 1fr; text-align: right; padding: 0 1; }
    #banner { height: auto; max-height: 4; background: $error; color: $text; display: none; }
    #filter { display: none; }
    ContentSwitcher { height: 1fr; }
    #actors { height: 30%; min-height: 3; }
    #plots { height: 1fr; color: $text-accent; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [*KEYS]
    COMMANDS: ClassVar[set[type[Provider] | Callable[[], type[Provider]]]] = {Commands}

    def __init__(self, endpoint: str, folder: Path) -> None:
        super().__init__()
        self.state = MonitorState()
        self.feed = Feed(endpoint, self._take)
        self.paused = False
        self._folder = folder
        self._view = VIEWS[0]
        self._order = "age"
        self._wanted = ""
        self._dirty = True
        self._top = ("", "")
        self._trouble = ""
        self._views = Static("", id="views", markup=False)
        self._told = Static("", id="told", markup=False)
        self._banner = Static("", id="banner", markup=False)
        self._plots = Plots(id="plots")
        self._filter = Input(placeholder="filter; escape clears it", id="filter")
        self._tables = {
            "cluster": Lines(TREE, id="cluster"),
            "sessions": Lines(SESSIONS, id="sessions", empty="no session"),
            "actors": Lines(DRAINS, id="actors", empty="no block server was drained"),
            "replies": Lines(REPLIES, id="replies", empty="no group of ranks has run a step"),
            "events": Lines(EVENTS, id="events", empty="no event"),
        }

    def compose(self) -> ComposeResult:
        with Horizontal(id="title"):
            yield self._views
            yield self._told
        yield self._banner
        with ContentSwitcher(initial=VIEWS[0]):
            yield self._tables["cluster"]
            yield self._tables["sessions"]
            with Vertical(id="drains"):
                yield self._tables["actors"]
                yield self._tables["replies"]
            yield self._tables["events"]
            with Vertical(id="throughput"):
                yield self._plots
        yield self._filter
        yield Footer()

    def on_mount(self) -> None:
        self._tables["cluster"].focus()
        self.run_worker(self.feed.run(), exit_on_error=False)
        self.set_interval(DRAW_S, self._tick)

    # ---- drawing ---------------------------------------------------------------------------------

    def _take(self, cluster: Cluster) -> None:
        self.state.take(cluster, time.time())
        self._dirty = True

    def _tick(self) -> None:
        self.feed.look()
        banner = self._banner
        if banner.display != bool(self.feed.trouble):
            banner.display = bool(self.feed.trouble)
        if self.feed.trouble != self._trouble:
            banner.update(escaped(f"trying again: {self.feed.trouble}"))
            self._dirty = True
        self._trouble = self.feed.trouble
        if self._dirty and not self.paused:
            self._dirty = False
            self._draw()

    def _draw(self) -> None:
        cluster = self.state.cluster
        self._draw_title(cluster)
        if cluster is None:
            return
        for table in self._tables.values():
            table.old = bool(self.feed.trouble)
        match self._view:
            case "cluster":
                self._tables["cluster"].show(nodes(cluster))
            case "sessions":
                self._tables["sessions"].show(sessions(cluster.sessions, self._order, self._wanted))
            case "drains":
                self._tables["actors"].show(cluster.drains[::-1])
                self._tables["replies"].show(list(self.state.replies)[::-1])
            case "events":
                self._tables["events"].show(events(self.state.happened, self._wanted))
            case _:
                self._plots.show(self.state.pace)

    def _draw_title(self, cluster: Cluster | None) -> None:
        views = " ".join(f"[{name}]" if name == self._view else name for name in VIEWS)
        told = []
        if cluster is not None:
            state = "ready" if cluster.ready else "NOT READY"
            if self.feed.trouble:
                state = f"LOST, as of {clock(self.state.at)}"
            told = [state, counted(len(cluster.sessions), "session")]
        told += [text for text in (self.paused and "paused", self._wanted and f"/{self._wanted}") if text]
        if self._view == "sessions":
            told.append(f"by {self._order}")
        top = views, ", ".join(told)
        if top != self._top:
            self._top = top
            self._views.update(views)
            self._told.update(escaped(top[1], breaks=True))

    # ---- views -----------------------------------------------------------------------------------

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "filter" and (isinstance(self.focused, Input) or len(self.screen_stack) > 1):
            return False  # the slash is typed into the filter like any other letter
        return self._view in ONLY.get(action, VIEWS)

    def action_view(self, name: str) -> None:
        again = name == self._view
        self._view = name
        self.query_one(ContentSwitcher).current = name
        if name == "drains":
            on_first = self.focused is self._tables["actors"]
            self.set_focus(self._tables["replies" if again and on_first else "actors"])
        elif name == "throughput":
            self.set_focus(None)
        else:
            self.set_focus(self._tables[name])
        self.refresh_bindings()
        self._draw()

    def action_next_view(self) -> None:
        if len(self.screen_stack) > 1:
            self.screen.focus_next()
        else:
            self.action_view(VIEWS[(VIEWS.index(self._view) + 1) % len(VIEWS)])

    def action_sort(self) -> None:
        orders = list(ORDERS)
        self._order = orders[(orders.index(self._order) + 1) % len(orders)]
        self._draw()

    def action_filter(self) -> None:
        self._filter.display = True
        self.screen.set_focus(self._filter)  # at once, since what is typed next is for the filter

    def on_input_changed(self, event: Input.Changed) -> None:
        if event.input.id == "filter":
            self._wanted = event.value.lower()
            self._draw()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if event.input.id == "filter":
            self._leave_filter()

    def key_escape(self) -> None:
        self._filter.value = ""
        self._leave_filter()

    def _leave_filter(self) -> None:
        self._filter.display = False
        self.action_view(self._view)

    def action_pause(self) -> None:
        self.paused = not self.paused
        self._draw()

    def action_light(self) -> None:
        self.theme = "textual-dark" if self.theme == "textual-light" else "textual-light"

    def action_help(self) -> None:
        self.push_screen(Page("zrt top", HELP))

    def action_chat(self) -> None:
        self.push_screen(Chat(self.feed))

    def on_lines_chosen(self, event: Lines.Chosen) -> None:
        lines = event.lines
        if isinstance(lines.item, SessionInfo):
            self.push_screen(Detail(self.feed, self.state, lines.item.session))
        elif lines.item is not None:
            self.push_screen(Page(lines.id or "", "\n".join(lines.table.described(lines.item))))

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        for binding in KEYS:
            action = binding.action
            if action not in ("next_view", "quit") and self.check_action(action, ()):
                yield SystemCommand(f"zrt: {binding.description}", f"key {binding.key}", self._runner(action))
        yield from super().get_system_commands(screen)

    def _runner(self, action: str) -> Callable[[], Awaitable[bool]]:
        return lambda: self.run_action(action)

    # ---- what is done to the cluster -------------------------------------------------------------

    def _item(self) -> object:
        focused = self.focused
        return focused.item if isinstance(focused, Lines) else None

    def _process(self, *kinds: str) -> str | None:
        """Return the process under the cursor, if it is of these kinds."""
        item = self._item()
        actor = item.actor if isinstance(item, TreeNode) and item.rank is None else None
        if actor is None or actor.kind not in kinds:
            words = " or ".join(kind.replace("_", " ") for kind in kinds)
            self.notify(f"put the cursor on a {words} of the cluster", severity="warning")
            return None
        return actor.name

    def _do(self, told: str, work: Callable[[Client], Awaitable[object]]) -> None:
        async def done() -> None:
            try:
                await work(self.feed.client)
            except ZrtError as error:
                self.notify(escaped(str(error), breaks=True), title="not done", severity="error", markup=False)
            else:
                self.notify(told, markup=False)

        self.run_worker(done(), exit_on_error=False)

    def _confirm(
        self, question: str, told: str, work: Callable[[Client, float], Awaitable[object]], seconds: float | None = None
    ) -> None:
        def answered(given: float | None) -> None:
            if given is not None:
                self._do(told, lambda client: work(client, given))

        self.push_screen(Confirm(question, seconds), answered)

    def action_cancel(self) -> None:
        item = self.screen if isinstance(self.screen, Detail) else self._item()
        if not isinstance(item, SessionInfo | Detail):
            self.notify("put the cursor on a session", severity="warning")
            return
        name, session = f"session {item.session:016x}", item.session
        self._confirm(f"Cancel {name}?", f"{name} is cancelled", lambda client, _: client.cancel(session))

    def action_drain(self) -> None:
        if name := self._process("block_server"):
            self._confirm(f"Drain {name}?", f"{name} is drained", lambda client, s: client.drain(name, s), DRAIN_S)

    def action_undrain(self) -> None:
        if name := self._process("block_server"):
            self._confirm(f"Let {name} serve again?", f"{name} serves again", lambda client, _: client.undrain(name))

    def action_restart(self) -> None:
        if name := self._process("block_server", "layer_worker"):
            self._confirm(
                f"Kill {name} and start it again?", f"{name} starts again", lambda client, _: client.restart(name)
            )

    # ---- out of here -----------------------------------------------------------------------------

    def action_copy(self) -> None:
        focused = self.focused
        row = focused.row if isinstance(focused, Lines) else None
        if row is not None:
            self.copy_to_clipboard(row.text.rstrip())
            self.notify("copied")

    def action_export_svg(self) -> None:
        self._write("svg", lambda: self.export_screenshot(title="zrt top").encode())

    def action_export_json(self) -> None:
        self._write("json", lambda: as_json(self.state.cluster) if self.state.cluster is not None else b"null")

    def _write(self, ending: str, content: Callable[[], bytes]) -> None:
        path = self._folder / f"zrt-top-{time.strftime('%Y%m%d-%H%M%S')}.{ending}"
        try:
            path.write_bytes(content())
        except OSError as error:
            self.notify(str(error), severity="error", markup=False)
        else:
            self.notify(f"written: {path.absolute()}", markup=False)


def run(endpoint: str) -> int:
    """Run the monitor until it is left, and return the exit status."""
    top = Top(endpoint, Path())
    top.run()
    return top.return_code or 0
