"""The commands that talk to a running cluster: ask once, chat, cancel, drain, undrain, down."""

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Final

import msgspec

from zrt.runtime.cli.progress import Notice, figures
from zrt.runtime.client.client import DOWN_S, Client
from zrt.runtime.client.stream import Stream
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.client import Drained, Finished, Piece, Progress
from zrt.runtime.messages.sampling import TokenLogprobs
from zrt.runtime.process import runfiles
from zrt.runtime.process.terminal import Foreground, interruptible, say

BROKEN_S: Final = 0.3
"""How long a connection may be gone before that is said: most are made again at once."""
NAME_S: Final = 1.0
"""How long a cluster that is to end may take to say its name."""


@dataclass(frozen=True, slots=True)
class Question:
    """One generation as the command line words it; `sampling` holds what was given of
    Client.generate's options."""

    prompt: str | None = None
    token_ids: list[int] | None = None
    raw: bool = False
    json: bool = False
    sampling: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Answer:
    """What has come of an answer so far."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None

    def add(self, piece: Piece) -> str:
        """What to show of it: its text, or its ids where the model has no tokenizer and so no text
        ever comes."""
        self.text += piece.text
        self.token_ids += piece.token_ids
        if piece.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *piece.logprobs]
        return piece.text if self.text else _ids(piece.token_ids)

    def shown(self) -> str:
        """All of what `add` returned."""
        return self.text or _ids(self.token_ids)

    def fields(self) -> dict[str, object]:
        """What `--json` says of it."""
        asked = {} if self.logprobs is None else {"logprobs": self.logprobs}
        return {"text": self.text, "token_ids": self.token_ids, **asked}


def _ids(token_ids: list[int]) -> str:
    return "".join(f"{token} " for token in token_ids)


def as_json(**fields: object) -> str:
    """One JSON object, in one line."""
    return msgspec.json.encode(fields).decode()


async def ask_once(endpoint: str | None, question: Question) -> int:
    """Connect, ask, print the answer."""
    async with Client(endpoint) as client:
        return await answer(client, question)


async def answer(client: Client, question: Question) -> int:
    """Stream an answer to stdout (text, or the ids of a model without a tokenizer), its figures to
    stderr. The exit status.

    Several answers are printed one after the other once all are there. With `question.json` stdout
    gets one object instead, also when the answer breaks off: then with `error`; several are its
    `choices`.
    """
    stream = client.generate(question.prompt, token_ids=question.token_ids, raw=question.raw, **question.sampling)
    got = [Answer() for _ in range(question.sampling.get("n", 1))]
    try:
        async with aclosing(stream):
            await _follow(client, stream, got, show=not question.json and len(got) == 1)
        if any(finished.reason == "cancelled" for finished in stream.all_finished):
            raise ZrtError("cancelled", "the session was ended by another command")
    except ZrtError as error:
        if question.json:
            broken = {"finish_reason": "error", "error": {"kind": error.kind, "message": error.message}}
            print(_json([one.fields() for one in got], **broken), flush=True)
        say(f"zrt: {error}")
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
    _say_notes(stream)
    return 0


async def _follow(client: Client, stream: Stream, got: list[Answer], *, show: bool) -> None:
    """Take all answers in until they have finished; with `show`, print what comes on the way."""
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
    """Meanwhile it is said when the connection is gone for longer than a moment, and taken back
    when there is one again."""
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
    """One answer as it is, several as `choices`."""
    return as_json(**answers[0], **rest) if len(answers) == 1 else as_json(choices=answers, **rest)


def _say_notes(stream: Stream) -> None:
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


def chat(endpoint: str | None, sampling: dict[str, Any]) -> int:
    """Ask, answer, ask again, with the whole talk as context, until the input ends. The exit
    status: 1 if an answer failed.

    Ctrl-C ends the answer that is being given; between answers, the talk. The loop stands still
    while a line is awaited: nothing is open then.
    """
    messages: list[dict[str, str]] = []
    failed = False
    with Foreground() as foreground:
        client = Client(endpoint)
        foreground.run(client.__aenter__)
        try:
            while (text := _line()) is not None:
                if not text:
                    continue
                messages.append({"role": "user", "content": text})
                try:
                    reply = foreground.run(lambda: _reply(client, messages, sampling))
                except ZrtError as error:
                    if error.kind == "coordinator_lost" and not client.connected:
                        raise
                    say(f"zrt: {error}")
                    reply, failed = "", True
                if reply:
                    messages.append({"role": "assistant", "content": reply})
                else:
                    messages.pop()
        finally:
            foreground.run(lambda: client.__aexit__(None, None, None))
    return int(failed)


def _line() -> str | None:
    """The next line of the talk; None at its end."""
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if terminal:
        with suppress(ImportError):
            import_module("readline")  # input() edits lines with it
    try:
        return input("> " if terminal else "").strip()
    except EOFError:
        pass
    except KeyboardInterrupt:
        if not terminal:
            raise
        interruptible()  # this one is answered here: what runs next is not to see it
    if terminal:
        print()
    return None


async def _reply(client: Client, messages: list[dict[str, str]], sampling: dict[str, Any]) -> str:
    """Print the answer to the last message; what came of it, also when Ctrl-C ended it. The second
    Ctrl-C is KeyboardInterrupt."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    stream, got = client.generate(messages=messages, **sampling), [Answer()]

    def interrupted() -> None:
        loop.add_signal_handler(signal.SIGINT, task.cancel)
        stream.cancel()

    loop.add_signal_handler(signal.SIGINT, interrupted)
    async with aclosing(stream):
        await _follow(client, stream, got, show=True)
    if len(messages) == 1:
        _say_notes(stream)
    return got[0].text


async def cancel(endpoint: str | None, session: int) -> int:
    async with Client(endpoint) as client:
        await client.cancel(session)
    return 0


async def drain(endpoint: str | None, name: str, timeout: float) -> int:
    """Take a block server out of service; how its sessions get on, and what became of them, go to
    stderr."""
    said = ""

    def tell(event: Drained) -> None:
        nonlocal said
        if (text := _drained(event)) != said:
            say(text)
            said = text

    async with Client(endpoint) as client:
        try:
            tell(await client.drain(name, timeout, progress=tell))
        except asyncio.CancelledError:
            if said:
                say(
                    f"zrt: the drain of {name} goes on: `zrt status` shows how it gets on, `zrt undrain {name}` ends it"
                )
            raise
    return 0


def _drained(event: Drained) -> str:
    counts = {"left": event.left, "moved": event.moved, "finished": event.finished, "parked": event.parked}
    told = [f"{count} {what}" for what, count in counts.items() if count]
    return f"zrt: {event.name} is {event.state}: {', '.join(told) or 'no session ran there'}"


async def undrain(endpoint: str | None, name: str) -> int:
    async with Client(endpoint) as client:
        await client.undrain(name)
    return 0


async def down(endpoint: str | None, timeout: float) -> int:
    """Bring the cluster down, once no session runs or the time is up; returns when it is gone, and
    its `zrt up` with it if that runs on this machine."""
    async with Client(endpoint) as client:
        parent = runfiles.parent_of(client.endpoint)
        ended = None if parent is None else _end_of(parent)
        name = "the cluster"
        with suppress(ZrtError, TimeoutError):  # one that does not answer is told to end all the same
            name = (await asyncio.wait_for(client.status(), NAME_S)).name
        try:
            await client.down(timeout)
            if ended is not None:
                await asyncio.wait_for(ended, DOWN_S)
        except (ZrtError, TimeoutError) as error:
            if parent is None or (isinstance(error, ZrtError) and error.kind != "deadline"):
                raise
            text = f"`zrt up` (process {parent}) does not end: `kill -9 {parent}` ends it and all it started"
            raise ZrtError("deadline", text) from None
    say(f"zrt: {name} is down")
    return 0


def _end_of(pid: int) -> "asyncio.Future[None]":
    """Done when the process has ended."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        ended.set_result(None)
        return ended

    def over() -> None:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        if not ended.done():
            ended.set_result(None)

    loop.add_reader(pidfd, over)
    return ended
