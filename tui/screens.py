"""Screens that open over the monitor: a question with yes and no, the facts of a row, a chat, the
list of keys."""

from contextlib import aclosing
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Footer, Input, Static

from zrt.runtime.client.conversation import Conversation
from zrt.runtime.client.stream import Stream
from zrt.runtime.errors import ZrtError
from zrt.runtime.formatting import escaped
from zrt.tui.feed import Feed

DRAW_S = 0.25
MOST_TEXT = 8000
"""The most characters of a chat that are shown: the last ones."""


class Confirm(ModalScreen[float | None]):
    """A question with yes and no. Its result is the number of seconds entered (0 if none are asked
    for), None for no."""

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


class Page(ModalScreen[None]):
    """A text under a title: the keys, or everything known of a row."""

    CSS = """
    Page { align: center middle; }
    Page > VerticalScroll {
        width: 76; max-width: 100%; height: auto; max-height: 90%;
        border: round $accent; border-title-style: bold; background: $surface; padding: 0 1;
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark,enter", "dismiss", "close"),
        Binding("y", "copy", "copy"),
    ]

    def __init__(self, title: str, text: str) -> None:
        super().__init__()
        self._title = escaped(title)
        self._text = escaped(text, breaks=True)

    def compose(self) -> ComposeResult:
        with VerticalScroll() as scroll:
            yield Static(self._text, markup=False)
        scroll.border_title = Content(self._title).markup
        yield Footer()

    def action_copy(self) -> None:
        self.app.copy_to_clipboard(self._text)
        self.notify("copied")


class Chat(ModalScreen[None]):
    """Chat with the model, turn by turn, with the commands of `zrt chat`. Escape ends the answer
    that is being given, else the chat."""

    CSS = """
    Chat > VerticalScroll { height: 1fr; background: $surface; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", "stop / close", priority=True)]

    def __init__(self, feed: Feed) -> None:
        super().__init__()
        self._feed = feed
        self._conversation = Conversation()
        self._stream: Stream | None = None
        self._answer = ""
        self._said = ""
        self._drawn = ""

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="scroll"):
            yield Static("", id="talk", markup=False)
        yield Input(placeholder="say something; /help lists commands", id="say")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one(Input).focus()
        self.set_interval(DRAW_S, self._draw)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        line = event.value.strip()
        if self._conversation.question is not None or not line:
            return
        event.input.value = ""
        done = self._conversation.command(line)
        if done is None:
            self._conversation.ask(self._conversation.spoken(line))
            self.run_worker(self._ask(), exit_on_error=False)
        elif done.leave:
            self.dismiss()
        else:
            self._said = done.said

    async def _ask(self) -> None:
        conversation = self._conversation
        self._said = ""
        while conversation.question is not None:
            self._answer = ""
            try:
                self._stream = self._feed.client.generate(messages=conversation.messages, room=conversation.room)
                async with aclosing(self._stream) as stream:
                    async for piece in stream:
                        self._answer += piece.text
            except ZrtError as error:
                if self._answer or not conversation.make_room(error):
                    self._said = conversation.failed(error)
            else:
                self._said = conversation.answered(self._answer)
            finally:
                self._stream = None
        self._answer = ""
        self._draw()

    def _draw(self) -> None:
        conversation = self._conversation
        said = [text for question, answer in conversation.turns for text in (f"> {question}", answer)]
        if conversation.question is not None:
            said += [f"> {conversation.question}", self._answer + ("▌" if self._stream is not None else "")]
        talk = escaped("\n\n".join([*said, *([self._said] if self._said else [])])[-MOST_TEXT:], breaks=True)
        if talk != self._drawn:
            self._drawn = talk
            self.query_one("#talk", Static).update(talk)
            self.query_one("#scroll", VerticalScroll).scroll_end(animate=False)

    def action_leave(self) -> None:
        if self._stream is not None:
            self._stream.cancel()
        else:
            self.dismiss()
