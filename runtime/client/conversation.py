"""A chat as a person holds it: its turns, its commands, and what is left out when the context is
full. Pure."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from zrt.runtime.errors import ZrtError
from zrt.runtime.formatting import counted, escaped
from zrt.runtime.paths import expanded

ROOM: Final = 512
"""The tokens of the context that a chat keeps for an answer, unless it says how long answers may
be."""
FULL: Final = frozenset({"context_exceeded", "kv_full"})
"""The errors that a shorter chat may not have."""

COMMANDS: Final = {
    "/help": "list the commands",
    "/clear": "forget all turns; the system prompt stays",
    "/system TEXT": "set the system prompt from the next turn on; without TEXT, take it away",
    "/undo": "take the last turn back",
    "/save FILE": "write the chat into a new file, as JSON",
    "/exit": "leave; so does /quit",
}
"""The commands of a chat, with what each does."""
SLASHES: Final = "a line that begins with // is sent, with one / less"


@dataclass(frozen=True, slots=True)
class CommandDone:
    """What a command has to say, and whether the chat is to be left."""

    said: str = ""
    leave: bool = False


class Conversation:
    """The turns of a chat, each a question and its answer, and the question that is open.

    `ask` opens a question. Whoever holds the chat sends `messages` with `room`, and calls
    `answered`, or, for an error before any of the answer has come, `make_room`: while that is true,
    the question is to be sent again, since the oldest turns were left out. Else `failed`.
    """

    def __init__(self, system: str | None = None, *, room: int | None = None) -> None:
        """Take the system prompt, and how many tokens an answer may have (None: that is open)."""
        self.system = system or ""
        self._wanted_room = ROOM if room is None else room
        self.room = self._wanted_room
        """The tokens that the question is to leave for its answer."""
        self._turns: list[tuple[str, str]] = []
        self._question: str | None = None
        self._left_out = 0
        self._saved: Path | None = None

    @property
    def turns(self) -> list[tuple[str, str]]:
        """The questions with their answers, the oldest first."""
        return list(self._turns)

    @property
    def question(self) -> str | None:
        """The question that has no answer yet."""
        return self._question

    @property
    def messages(self) -> list[dict[str, str]]:
        """The chat as it is to be sent: system prompt, turns, the open question."""
        said = [("system", self.system)] if self.system else []
        for question, answer in self._turns[self._left_out :]:
            said += [("user", question), ("assistant", answer)]
        if self._question is not None:
            said.append(("user", self._question))
        return [{"role": role, "content": content} for role, content in said]

    # ---- turns -----------------------------------------------------------------------------------

    def ask(self, text: str) -> None:
        """Open a question."""
        self._question = text
        self._left_out = 0
        self.room = self._wanted_room

    def make_room(self, error: ZrtError) -> bool:
        """Leave out the oldest turns of what is sent, after an error because of its length: at
        first one, then ever more, so that few attempts do, and the next questions find room. When
        none is left, less room for the answer must do. Return False if the error is another, or
        nothing more can be left out."""
        if error.kind not in FULL:
            return False
        left = len(self._turns) - self._left_out
        if left:
            self._left_out += min(left, max(1, self._left_out))
            return True
        tight, self.room = self.room > 0, 0
        return tight and error.kind == "context_exceeded"

    def answered(self, answer: str) -> str:
        """Close the question with its answer, if there is one, and forget the turns left out;
        return what is to be said about those."""
        gone = self._left_out
        del self._turns[:gone]
        if answer and self._question is not None:
            self._turns.append((self._question, answer))
        self._close()
        return f"the context is full: the oldest {counted(gone, 'turn')} left out of it, for good" if gone else ""

    def failed(self, error: ZrtError) -> str:
        """Drop the question, keep all turns, and return what is to be said."""
        alone = error.kind in FULL and 0 < len(self._turns) == self._left_out
        self._close()
        if not alone:
            return str(error)
        return f"{error} (this message alone is too long, without the turns before it: they are kept)"

    def _close(self) -> None:
        self._question = None
        self._left_out = 0

    # ---- commands --------------------------------------------------------------------------------

    def command(self, line: str) -> CommandDone | None:
        """Do what a line that begins with a slash says; return None for any other line, which is
        a question: `spoken` is its text."""
        if not line.startswith("/") or line.startswith("//"):
            return None
        word, _, rest = line.partition(" ")
        done = self._commands().get(word)
        if done is None:
            return CommandDone(f"there is no command {word}: /help lists them; {SLASHES}")
        return done(rest.strip())

    @staticmethod
    def spoken(line: str) -> str:
        """Return the question in a line that is no command."""
        return line[1:] if line.startswith("//") else line

    def _commands(self) -> dict[str, Callable[[str], CommandDone]]:
        return {
            "/help": lambda _: CommandDone(help_text()),
            "/clear": lambda _: self._clear(),
            "/system": self._set_system,
            "/undo": lambda _: self._undo(),
            "/save": self._save,
            "/exit": lambda _: CommandDone(leave=True),
            "/quit": lambda _: CommandDone(leave=True),
        }

    def _clear(self) -> CommandDone:
        gone = len(self._turns)
        self._turns.clear()
        return CommandDone(f"{counted(gone, 'turn')} forgotten")

    def _set_system(self, text: str) -> CommandDone:
        before, self.system = self.system, text
        if text:
            return CommandDone("the system prompt is set")
        return CommandDone(f"no system prompt; it was: {before}" if before else "there is no system prompt")

    def _undo(self) -> CommandDone:
        if not self._turns:
            return CommandDone("there is no turn to take back")
        question, _ = self._turns.pop()
        return CommandDone(f"taken back: {question[:60]}")

    def _save(self, name: str) -> CommandDone:
        if not name:
            return CommandDone("say where to: /save FILE")
        try:
            path = expanded(name)
        except ZrtError as error:
            return CommandDone(error.message)
        text = json.dumps({"messages": self.messages}, ensure_ascii=False, indent=1)
        try:
            with path.open("w" if path == self._saved else "x", encoding="utf-8", errors="replace") as file:
                file.write(text + "\n")
        except FileExistsError:
            return CommandDone(f"{path} is there already: give another name")
        except FileNotFoundError:
            return CommandDone(
                f"not saved: there is no folder {escaped(str(path.parent))}: make it, or give another name"
            )
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            reason = error.strerror if isinstance(error, OSError) else str(error)
            return CommandDone(f"not saved as {escaped(str(path))}: {reason}; give another name")
        self._saved = path
        return CommandDone(f"saved: {path}")


def help_text() -> str:
    """Return the list of commands, a line each."""
    width = max(map(len, COMMANDS))
    return "\n".join([*(f"{name:<{width}}  {about}" for name, about in COMMANDS.items()), SLASHES])
