"""The commands that talk to a running cluster: ask once, chat, status, cancel, down."""

import asyncio
import sys
from dataclasses import dataclass, field
from typing import Any

import msgspec

from zrt.runtime.client import Client, Stream
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.client import Finished, Piece, Progress
from zrt.runtime.show import cluster_table, figures


@dataclass(frozen=True, slots=True)
class Question:
    """One generation as the command line words it; `sampling` holds what was given of Client.generate's options."""

    prompt: str | None = None
    token_ids: list[int] | None = None
    raw: bool = False
    json: bool = False
    sampling: dict[str, Any] = field(default_factory=dict)


async def ask_once(endpoint: str | None, question: Question) -> int:
    """Connect, ask, print the answer."""
    async with Client(endpoint) as client:
        return await answer(client, question)


async def answer(client: Client, question: Question) -> int:
    """Stream one answer to stdout (text, or the ids of a model without a tokenizer), its figures to stderr."""
    stream = client.generate(question.prompt, token_ids=question.token_ids, raw=question.raw, **question.sampling)
    text, ids = [], []
    try:
        async for piece in stream:
            text.append(piece.text)
            ids += piece.token_ids
            if not question.json:
                print(_shown(piece, question), end="", flush=True)
    except ZrtError as error:
        if question.json:
            print(_json(text, ids, {"finish_reason": "error", "error": {"kind": error.kind, "message": error.message}}))
        elif text:
            print()
        raise
    finished = stream.finished
    if question.json:
        print(_json(text, ids, _summary(finished)))
    else:
        print()
        print(figures(finished), file=sys.stderr)
    return 0


def _shown(piece: Piece, question: Question) -> str:
    if piece.text or question.token_ids is None:
        return piece.text
    return "".join(f"{token} " for token in piece.token_ids)


def _summary(finished: Finished) -> dict[str, Any]:
    return {
        "prompt_tokens": finished.prompt_tokens,
        "completion_tokens": finished.completion_tokens,
        "finish_reason": finished.reason,
        "seed": finished.seed,
        "timings": finished.timings,
        "stages": finished.stages,
    }


def _json(text: list[str], ids: list[int], rest: dict[str, Any]) -> str:
    return msgspec.json.encode({"text": "".join(text), "token_ids": ids, **rest}).decode()


async def chat(endpoint: str | None, sampling: dict[str, Any]) -> int:
    """Ask, answer, ask again, with the whole talk as context; an empty line or end of input ends it. Ctrl-C ends an answer."""
    messages: list[dict[str, str]] = []
    async with Client(endpoint) as client:
        while text := await _line():
            messages.append({"role": "user", "content": text})
            stream = client.generate(messages=messages, **sampling)
            reply = await _print_answer(stream)
            messages.append({"role": "assistant", "content": reply})
    return 0


async def _line() -> str:
    """A line from the terminal, without blocking the loop: the client must go on hearing its cluster."""
    prompt = "> " if sys.stdin.isatty() else ""
    try:
        return (await asyncio.to_thread(input, prompt)).strip()
    except EOFError:
        return ""


async def _print_answer(stream: Stream) -> str:
    text = ""
    async for piece in stream:
        text += piece.text
        print(piece.text, end="", flush=True)
    print()
    return text


async def status(endpoint: str | None, *, as_json: bool) -> int:
    """Print the cluster once."""
    async with Client(endpoint) as client:
        cluster = await client.status()
    if as_json:
        print(msgspec.json.encode(cluster).decode())
    else:
        cluster_table(cluster)
    return 0


async def cancel(endpoint: str | None, session: int) -> int:
    async with Client(endpoint) as client:
        await client.cancel(session)
    return 0


async def down(endpoint: str | None) -> int:
    async with Client(endpoint) as client:
        await client.down()
    return 0


def progress_line(progress: Progress) -> str:
    """A phase in words, for a terminal's last line."""
    counts = f" {progress.done}/{progress.total}" if progress.total else ""
    reason = f" ({progress.message})" if progress.message else ""
    return f"{progress.phase}{counts}{reason}"
