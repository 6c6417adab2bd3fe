"""One session, in a screen of its own: its text as it streams, where its time goes, what happened
to it."""

from contextlib import aclosing
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Footer, Static

from zrt.runtime.errors import ZrtError
from zrt.runtime.formatting import counted, escaped
from zrt.runtime.messages.client import Cluster, Finished, Piece
from zrt.runtime.messages.cluster import Happened, SessionInfo
from zrt.tui.feed import Feed
from zrt.tui.rows import bar, sparkline
from zrt.tui.state import MonitorState
from zrt.tui.tables import clock

DRAW_S = 0.25
MOST_TEXT = 8000
"""The most characters of a session's text that are shown: the last ones."""
MOST_HOPS = 6
MOST_EVENTS = 3


class Detail(ModalScreen[None]):
    """One session: its text as it streams, where its time goes, what happened to it."""

    CSS = """
    Detail > #facts { height: auto; max-height: 60%; background: $surface; padding: 0 1; }
    Detail > VerticalScroll { height: 1fr; border-top: solid $accent; background: $surface; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "dismiss", "close"),
        Binding("c", "cancel", "cancel"),
        Binding("y", "copy", "copy its text"),
    ]

    def __init__(self, feed: Feed, state: MonitorState, session: int) -> None:
        super().__init__()
        self.session = session
        self._feed = feed
        self._state = state
        self._text = ""
        self._ended = ""
        self._last: SessionInfo | None = None
        self._drawn: tuple[str, str] | None = None

    def compose(self) -> ComposeResult:
        yield Static("", id="facts", markup=False)
        with VerticalScroll(id="scroll"):
            yield Static("", id="text", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()
        self.run_worker(self._follow(), exit_on_error=False)
        self.set_interval(DRAW_S, self._draw)
        self._draw()

    async def _follow(self) -> None:
        try:
            async with aclosing(self._feed.client.follow(self.session)) as events:
                async for event in events:
                    if isinstance(event, Piece):
                        said = event.text or " ".join(map(str, event.token_ids)) + " "
                        self._text = (self._text + said)[-MOST_TEXT:]
                    elif isinstance(event, Finished):
                        self._ended = f"finished: {event.reason}"
        except ZrtError as error:
            self._ended = str(error)

    def _draw(self) -> None:
        cluster = self._state.cluster
        if cluster is not None:
            self._last = next((one for one in cluster.sessions if one.session == self.session), self._last)
        where = f"{self.session:016x}"
        happened = [one for one in self._state.happened if one.where == where][-MOST_EVENTS:]
        lines = facts(self.session, self._last, cluster, happened, self._ended)
        drawn = (escaped("\n".join(lines), breaks=True), escaped(self._text, breaks=True))
        if drawn != self._drawn:
            self._drawn = drawn
            self.query_one("#facts", Static).update(drawn[0])
            self.query_one("#text", Static).update(drawn[1])
            self.query_one("#scroll", VerticalScroll).scroll_end(animate=False)

    def action_copy(self) -> None:
        self.app.copy_to_clipboard(self._text)
        self.notify("copied")

    async def action_cancel(self) -> None:
        await self.app.run_action("cancel")


def facts(
    session: int, info: SessionInfo | None, cluster: Cluster | None, happened: list[Happened], ended: str
) -> list[str]:
    """Return a session in lines; `info` is the last known information about it."""
    lines = [f"session {session:016x}  {ended or (info.state if info is not None else '')}"]
    if info is not None:
        age = (cluster.up_ms - info.asked_ms) / 1e3 if cluster is not None else 0.0
        lines += [
            f"prompt {info.prompt_tokens}, new {info.completion_tokens}, {info.tokens_s:.1f} tokens/s, "
            f"first token {info.ttft_ms:.0f} ms, {counted(info.kv_pages, 'page')}, epoch {info.epoch}",
            f"asked {age:.0f} s ago by {info.client}; route {' → '.join(info.route) or '–'}",
        ]
        if info.gaps_ms:
            low, high = min(info.gaps_ms), max(info.gaps_ms)
            lines.append(f"between tokens {sparkline(info.gaps_ms, 24)} {low:.0f} to {high:.0f} ms")
        lines += _hops(info)
        if info.fault:
            lines.append(info.fault)
    return lines + [f"{clock(one.at)} {one.kind}: {one.text}" for one in happened]


def _hops(info: SessionInfo) -> list[str]:
    """Return where a token's time goes: each stage's queue, compute and encoding, and the rest in
    the network."""
    if not info.hops:
        return []
    sums = [hop.queue_ms + hop.compute_ms + hop.encode_ms for hop in info.hops]
    whole = sum(sums) + info.network_ms
    lines = [f"{'ms a token':<18} {'queue':>8} {'compute':>8} {'encode':>8} {'sum':>8}"]
    for hop, spent in list(zip(info.hops, sums, strict=True))[:MOST_HOPS]:
        lines.append(
            f"{hop.name[:18]:<18} {hop.queue_ms:>8.2f} {hop.compute_ms:>8.2f} {hop.encode_ms:>8.2f} {spent:>8.2f} "
            f"{bar(spent, whole, 20)}"
        )
    if len(info.hops) > MOST_HOPS:
        lines.append(f"{counted(len(info.hops) - MOST_HOPS, 'more stage'):<18} {sum(sums[MOST_HOPS:]):>35.2f}")
    lines.append(f"{'network':<18} {info.network_ms:>35.2f} {bar(info.network_ms, whole, 20)}")
    return lines
