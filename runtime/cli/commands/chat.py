"""`zrt chat`: talk with a running cluster."""

import argparse
import asyncio
import signal
import sys
from contextlib import aclosing, suppress
from importlib import import_module
from typing import Any

from zrt.runtime.cli.answer import Answer, follow, say_notes
from zrt.runtime.cli.cluster_arguments import add_connect_argument
from zrt.runtime.cli.sampling_arguments import add_sampling_arguments, given_sampling
from zrt.runtime.client.client import Client
from zrt.runtime.errors import ZrtError
from zrt.runtime.process.terminal import Foreground, interruptible, say

DESCRIPTION = """Talk, turn by turn: each line is a turn, and all turns are context of the next. Ctrl-C ends the answer that is being given;
Ctrl-C or Ctrl-D instead of a line leaves."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_sampling_arguments(parser, without=("logprobs", "n"))
    add_connect_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Ask, answer, ask again, with the whole chat as context, until the input ends; return the exit
    status, 1 if an answer failed.

    Ctrl-C ends the answer that is being given; between answers, the chat. The event loop stands
    still while a line is awaited: nothing is open then.
    """
    sampling = given_sampling(arguments)
    messages: list[dict[str, str]] = []
    failed = False
    with Foreground() as foreground:
        client = Client(arguments.connect)
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


async def _reply(client: Client, messages: list[dict[str, str]], sampling: dict[str, Any]) -> str:
    """Print the answer to the last message, and return its text, also when Ctrl-C ended the answer.
    A second Ctrl-C raises KeyboardInterrupt."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    stream, got = client.generate(messages=messages, **sampling), [Answer()]

    def interrupted() -> None:
        loop.add_signal_handler(signal.SIGINT, task.cancel)
        stream.cancel()

    loop.add_signal_handler(signal.SIGINT, interrupted)
    async with aclosing(stream):
        await follow(client, stream, got, show=True)
    if len(messages) == 1:
        say_notes(stream)
    return got[0].text
