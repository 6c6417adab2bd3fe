"""What opens over the monitor: a question with yes and no, a session's details, a chat, the list of keys."""

from contextlib import aclosing
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Footer, Input, Static

from zrt.runtime.client import Stream
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.client import Finished, Piece
from zrt.runtime.messages.cluster import SessionInfo
from zrt.tui.feed import Feed
from zrt.tui.rows import sparkline
from zrt.tui.state import State

DRAW_S = 0.25
MOST_TEXT = 8000
"""Characters of a session's text that are shown, the last ones."""


class Confirm(ModalScreen[float | None]):
    """A question. Answered by the seconds that were entered (`seconds` if none are asked for), None for no."""

    CSS = """
    Confirm { align: center middle; }
    Confirm > Vertical { width: 60; height: auto; border: round $warning; background: $surface; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter,y", "yes", "yes", priority=True),
        Binding("escape,n", "no", "no", priority=True),
    ]

    def __init__(self, question: str, seconds: float | None = None) -> None:
        super().__init__()
        self._question = question
        self._seconds = seconds

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(self._question, markup=False)
            if self._seconds is not None:
                yield Static("seconds that sessions may go on:")
                yield Input(f"{self._seconds:g}", type="number", id="seconds")
            yield Footer()

    def action_yes(self) -> None:
        if self._seconds is None:
            self.dismiss(0.0)
            return
        field = self.query_one(Input)
        try:
            seconds = float(field.value)
        except ValueError:
            seconds = -1.0
        if 0 <= seconds <= 86_400:
            self.dismiss(seconds)
        else:
            self.notify("give seconds, 0 to 86400", severity="error")

    def action_no(self) -> None:
        self.dismiss(None)


class Help(ModalScreen[None]):
    """The keys."""

    CSS = """
    Help { align: center middle; }
    Help > VerticalScroll { width: 70; height: 90%; border: round $accent; background: $surface; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,question_mark", "dismiss", "close")]

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(self._text, markup=False)
        yield Footer()


class Detail(ModalScreen[None]):
    """One session: its text as it streams, where its time goes, what happened to it."""

    CSS = """
    Detail > Static { height: auto; max-height: 12; background: $surface; }
    Detail > VerticalScroll { height: 1fr; border-top: solid $accent; background: $surface; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "dismiss", "close")]

    def __init__(self, feed: Feed, state: State, session: int) -> None:
        super().__init__()
        self._feed = feed
        self._state = state
        self._session = session
        self._text = ""
        self._ended = ""
        self._drawn: tuple[str, str] | None = None

    def compose(self) -> ComposeResult:
        yield Static("", id="facts", markup=False)
        with VerticalScroll(id="scroll"):
            yield Static("", id="text", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        self.run_worker(self._follow(), exit_on_error=False)
        self.set_interval(DRAW_S, self._draw)
        self._draw()

    async def _follow(self) -> None:
        try:
            async with aclosing(self._feed.client.follow(self._session)) as events:
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
        sessions = cluster.sessions if cluster is not None else []
        info = next((one for one in sessions if one.session == self._session), None)
        lines = [f"session {self._session:016x}  {self._ended}"]
        if info is not None:
            lines += facts(info)
        where = f"{self._session:016x}"
        lines += [f"{one.kind}: {one.text}" for one in self._state.happened if one.where == where][-3:]
        drawn = ("\n".join(lines), self._text)
        if drawn != self._drawn:
            self._drawn = drawn
            self.query_one("#facts", Static).update(drawn[0])
            self.query_one("#text", Static).update(drawn[1])
            self.query_one("#scroll", VerticalScroll).scroll_end(animate=False)


def facts(info: SessionInfo) -> list[str]:
    """A session in a few lines."""
    lines = [
        f"{info.state}  prompt {info.prompt_tokens}  new {info.completion_tokens}  {info.tokens_s:.1f} tokens/s  "
        f"first token {info.ttft_ms:.0f} ms  epoch {info.epoch}  pages {info.kv_pages}",
        f"client {info.client}  between tokens {sparkline(info.gaps_ms, 24)}",
    ]
    lines += [
        f"  {hop.name}: queue {hop.queue_ms:.2f}, compute {hop.compute_ms:.2f}, encode {hop.encode_ms:.2f} ms a token"
        for hop in info.hops
    ]
    if info.hops:
        lines.append(f"  network: {info.network_ms:.2f} ms a token")
    return [*lines, info.fault] if info.fault else lines


class Chat(ModalScreen[None]):
    """Talk with the model, turn by turn. Escape ends the answer that comes, else the talk."""

    CSS = """
    Chat > VerticalScroll { height: 1fr; background: $surface; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", "stop / close", priority=True)]

    def __init__(self, feed: Feed) -> None:
        super().__init__()
        self._feed = feed
        self._messages: list[dict[str, str]] = []
        self._stream: Stream | None = None
        self._answer = ""
        self._trouble = ""

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="scroll"):
            yield Static("", id="talk", markup=False)
        yield Input(placeholder="say something", id="say")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one(Input).focus()
        self.set_interval(DRAW_S, self._draw)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if self._stream is None and event.value.strip():
            self._messages.append({"role": "user", "content": event.value.strip()})
            event.input.value = ""
            self.run_worker(self._ask(), exit_on_error=False)

    async def _ask(self) -> None:
        self._answer, self._trouble = "", ""
        try:
            self._stream = self._feed.client.generate(messages=self._messages)
            async with aclosing(self._stream) as stream:
                async for piece in stream:
                    self._answer += piece.text
        except ZrtError as error:
            self._trouble = str(error)
        finally:
            self._stream = None
        if self._answer:
            self._messages.append({"role": "assistant", "content": self._answer})
        else:
            self._messages.pop()
        self._answer = ""
        self._draw()

    def _draw(self) -> None:
        said = [f"{'> ' if one['role'] == 'user' else ''}{one['content']}" for one in self._messages]
        said += [text for text in (self._answer, self._trouble) if text]
        self.query_one("#talk", Static).update("\n".join(said)[-MOST_TEXT:])
        self.query_one("#scroll", VerticalScroll).scroll_end(animate=False)

    def action_leave(self) -> None:
        if self._stream is not None:
            self._stream.cancel()
        else:
            self.dismiss()
