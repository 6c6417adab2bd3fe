"""An answer as it is printed: its text on stdout, waits and figures on stderr."""

import asyncio
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from zrt.runtime.cli.json_output import as_json
from zrt.runtime.cli.notice import Notice, figures
from zrt.runtime.cli.question import Question
from zrt.runtime.client.client import Client
from zrt.runtime.client.stream import Stream
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.client import Finished, Piece, Progress
from zrt.runtime.messages.sampling import TokenLogprobs
from zrt.runtime.process.terminal import say

BROKEN_S: Final = 0.3
"""Seconds that a connection may be gone before this is said: most connections are made again at
once."""


@dataclass(slots=True)
class Answer:
    """The part of an answer that has arrived so far."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None

    def add(self, piece: Piece) -> str:
        """Add a piece, and return what to show of it: its text, or its ids where the model has no
        tokenizer and so no text ever comes."""
        self.text += piece.text
        self.token_ids += piece.token_ids
        if piece.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *piece.logprobs]
        return piece.text if self.text else _ids(piece.token_ids)

    def shown(self) -> str:
        """Return all that `add` returned."""
        return self.text or _ids(self.token_ids)

    def fields(self) -> dict[str, object]:
        """Return the answer's fields for `--json`."""
        asked = {} if self.logprobs is None else {"logprobs": self.logprobs}
        return {"text": self.text, "token_ids": self.token_ids, **asked}


def _ids(token_ids: list[int]) -> str:
    return "".join(f"{token} " for token in token_ids)


async def answer(client: Client, question: Question) -> int:
    """Stream an answer to stdout (text, or the ids of a model without a tokenizer), its figures to
    stderr, and return the exit status.

    Several answers are printed one after the other once all are there. With `question.json` stdout
    gets one object instead, also when the answer breaks off: then with `error`; several answers are
    its `choices`.
    """
    stream = client.generate(
        question.prompt, token_ids=question.token_ids, raw=question.raw, **question.chat, **question.sampling
    )
    got = [Answer() for _ in range(question.sampling.get("n", 1))]
    try:
        async with aclosing(stream):
            await follow(client, stream, got, show=not question.json and len(got) == 1)
        if any(finished.reason == "cancelled" for finished in stream.all_finished):
            raise ZrtError("cancelled", "the session was ended by another command")
    except ZrtError as error:
        say(f"zrt: {error}")
        if question.json:
            broken = {"finish_reason": "error", "error": {"kind": error.kind, "message": error.message}}
            print(_json([one.fields() for one in got], **broken), flush=True)
        return 1
    if question.json:
        pairs = zip(got, stream.all_finished, strict=True)
        print(_json([{**one.fields(), **_summary(finished)} for one, finished in pairs]), flush=True)
    else:
        for one, finished in zip(got, stream.all_finished, strict=True):
            if len(got) > 1:
                say(f"answer {finished.choice + 1} of {len(got)}:")
                print(one.shown() + "\n", flush=True)
            say(figures(finished))
    say_notes(stream)
    return 0


async def follow(client: Client, stream: Stream, got: list[Answer], *, show: bool) -> None:
    """Receive all answers until they have finished; with `show`, print text and progress as they
    arrive."""
    notice = Notice()
    left = len(got)
    with _says_breaks(client, stream, notice):
        try:
            while left:
                match await stream.next_event():
                    case Progress() as progress:
                        notice.progress(progress)
                    case Piece() as piece:
                        shown = got[piece.choice].add(piece)
                        notice.piece()
                        if show:
                            notice.text()
                            print(shown, end="", flush=True)
                    case Finished():
                        left -= 1
        finally:
            notice.text()
            if show and got[0].token_ids:
                print(flush=True)


@contextmanager
def _says_breaks(client: Client, stream: Stream, notice: Notice) -> Iterator[None]:
    """Say, while the block runs, when the connection is gone for longer than a moment, and take
    that back when there is a connection again."""
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle | None = None

    def changed(up: bool) -> None:
        nonlocal timer
        if timer is not None:
            timer.cancel()
            timer = None
        if up:
            notice.back()
        else:
            timer = loop.call_later(BROKEN_S, lambda: notice.broken(client.endpoint, stream.patience))

    try:
        with client.watched(changed):
            yield
    finally:
        changed(True)


def _json(answers: list[dict[str, object]], **rest: object) -> str:
    """Return the JSON object of the answers: one answer as it is, several as `choices`."""
    return as_json(**answers[0], **rest) if len(answers) == 1 else as_json(choices=answers, **rest)


def say_notes(stream: Stream) -> None:
    """Say which settings of the model's generation_config are not applied."""
    for note in stream.accepted.notes if stream.accepted else ():
        say(f"zrt: {note}")


def _summary(finished: Finished) -> dict[str, Any]:
    return {
        "prompt_tokens": finished.prompt_tokens,
        "completion_tokens": finished.completion_tokens,
        "finish_reason": finished.reason,
        "seed": finished.seed,
        "timings": finished.timings,
        "stages": finished.stages,
    }
