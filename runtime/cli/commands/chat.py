"""`zrt chat`: talk with a running cluster."""

import argparse
import asyncio
import signal
import sys
from collections.abc import Iterator
from contextlib import aclosing, contextmanager, suppress
from importlib import import_module
from typing import Any

from zrt.runtime.cli.answer import Answer, follow, say_notes
from zrt.runtime.cli.cluster_arguments import add_connect_argument
from zrt.runtime.cli.question import add_chat_arguments, given_chat
from zrt.runtime.cli.sampling_arguments import add_sampling_arguments, given_sampling
from zrt.runtime.client.client import Client
from zrt.runtime.client.conversation import COMMANDS, SLASHES, Conversation
from zrt.runtime.errors import ZrtError
from zrt.runtime.process.terminal import Foreground, interruptible, say

DESCRIPTION = f"""Talk, turn by turn: each line is a turn, and all turns are context of the next. When the context is full, the
oldest turns are left out, and a line says so; the system prompt stays. Ctrl-C ends the answer that is being given;
Ctrl-C or Ctrl-D instead of a line leaves. Commands: {", ".join(COMMANDS)}; {SLASHES}."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_chat_arguments(parser)
    add_sampling_arguments(parser, without=("logprobs", "n"))
    add_connect_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Ask, answer, ask again, with the whole chat as context, until the input ends; return the exit
    status, 1 if an answer failed.

    Ctrl-C ends the answer that is being given; between answers, the chat. The event loop stands
    still while a line is awaited: nothing is open then.
    """
    options = given_chat(arguments) | given_sampling(arguments)
    conversation = Conversation(options.pop("system", None), room=options.get("max_tokens"))
    failed = False
    with Foreground() as foreground:
        client = Client(arguments.connect)
        foreground.run(client.__aenter__)
        try:
            while (line := _line()) is not None:
                if not line:
                    continue
                done = conversation.command(line)
                if done is None:
                    conversation.ask(conversation.spoken(line))
                    with _noted_interrupt() as early:
                        failed |= not _answered(foreground, client, conversation, options, early)
                elif done.leave:
                    break
                else:
                    say(done.said)
        finally:
            foreground.run(lambda: client.__aexit__(None, None, None))
    return int(failed)


def _answered(
    foreground: Foreground, client: Client, conversation: Conversation, options: dict[str, Any], early: list[int]
) -> bool:
    """Ask the open question, without the oldest turns where it does not fit with them; return
    whether it was answered. ZrtError coordinator_lost: there is no coordinator any more."""
    while True:
        answer = Answer()
        try:
            foreground.run(lambda: _reply(client, conversation, options, answer, early))  # noqa: B023 (it runs at once)
        except ZrtError as error:
            if error.kind == "coordinator_lost" and not client.connected:
                raise
            if not answer.token_ids and conversation.make_room(error):
                continue
            say(f"zrt: {conversation.failed(error)}")
            return False
        if note := conversation.answered(answer.text):
            say(f"zrt: {note}")
        return True


def _line() -> str | None:
    """Return the next line of the chat; None at its end."""
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if terminal:
        with suppress(ImportError):
            import_module("readline")  # lets input() edit lines
    try:
        return input("> " if terminal else "").strip()
    except EOFError:
        pass
    except KeyboardInterrupt:
        if not terminal:
            raise
        interruptible()  # handled here: the next command must not see this Ctrl-C
    if terminal:
        print()
    return None


@contextmanager
def _noted_interrupt() -> Iterator[list[int]]:
    """Note a Ctrl-C in the list, rather than raise it: what is asked is about to be sent, and the
    Ctrl-C is meant for that."""
    early: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: early.append(number))
    try:
        yield early
    finally:
        interruptible()


async def _reply(
    client: Client, conversation: Conversation, options: dict[str, Any], answer: Answer, early: list[int]
) -> None:
    """Print the answer to the open question, and note it in `answer`, also when Ctrl-C ended it: if
    one came `early`, before it is asked for. A second Ctrl-C raises KeyboardInterrupt."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    stream = client.generate(messages=conversation.messages, room=conversation.room, **options)

    def interrupted() -> None:
        loop.add_signal_handler(signal.SIGINT, task.cancel)
        stream.cancel()

    loop.add_signal_handler(signal.SIGINT, interrupted)
    if early:
        interrupted()
    async with aclosing(stream):
        await follow(client, stream, [answer], show=True)
    if not conversation.turns:
        say_notes(stream)
