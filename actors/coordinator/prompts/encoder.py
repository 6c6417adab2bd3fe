"""The texts that wait to be tokenised, in lanes by their length, and what tokenises each lane.
Those in which names of special tokens are text have a process however short they are: it makes a
second tokenizer for them, which takes as long as to load the first.

A lane is worked off in order of arrival and holds so much at most; a text that finds it full is
refused. Lanes do not wait for each other, so what is refused or late in one of them is never the
fault of longer texts than its own.
"""

import asyncio
from array import array
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from zrt.actors.coordinator.prompts.encoding_child import EncodingChild
from zrt.runtime.actor.executor import ComputeExecutor
from zrt.runtime.errors import ZrtError
from zrt.runtime.formatting import byte_size, counted
from zrt.runtime.messages.prompt import PromptRequest
from zrt.runtime.text.encoding_limit import EncodingLimit
from zrt.runtime.text.prompts import encode_prompt
from zrt.runtime.text.tokenizer import Tokenizer
from zrt.runtime.text.tokenizer_files import TokenizerFiles

THREAD_LANES: Final = (1 << 10, 16 << 10)
"""The longest texts, in bytes, of the lanes that have a thread each: 30 ms at most for one."""
CHILD_LANE: Final = 1 << 20
"""The longest text of the first lane that has a process; the last lane takes any."""
SESSIONS: Final = 1024
"""The most sessions whose texts wait in one lane."""
BYTES: Final = 48 << 20
"""The most bytes of text that wait in one lane: three texts of the greatest length."""
PACE: Final = 500_000
"""Bytes a second by which a refused client is told when to try again."""


class WaitingText:
    """One request's text, for so many `sessions`, from its arrival until it is token ids or is
    given up: a PromptRequest as msgpack. `done` of `total` of it (in bytes or characters) are
    tokenised."""

    def __init__(self, lane: "Lane", request: bytes, sessions: int) -> None:
        self.done = 0
        self.total = len(request)
        self.request = request
        self.sessions = sessions
        self._lane = lane

    @property
    def before(self) -> int:
        """How many texts are to be tokenised before this one."""
        return self._lane.before(self)

    async def encode(self) -> "array[int]":
        """Wait for its turn, and return its ids (uint32); called once. ZrtError context_exceeded,
        bad_request, deadline, internal."""
        return await self._lane.encode(self)

    def leave(self) -> None:
        """Wait no more: it is tokenised, or given up. Any number of times."""
        self._lane.leave(self)

    def told(self, done: int, total: int) -> None:
        self.done, self.total = done, total


class Lane:
    """The texts of at most `longest` bytes (None: any) that wait for `run`, one at a time."""

    def __init__(self, longest: int | None, run: Callable[[WaitingText], Awaitable["array[int]"]]) -> None:
        self.longest = longest
        self._run = run
        self._turn = asyncio.Lock()
        self._waiting: list[WaitingText] = []  # and the one that has its turn, first

    def offer(self, request: bytes, sessions: int) -> WaitingText:
        """Take a text. ZrtError overloaded."""
        held = sum(text.sessions for text in self._waiting), sum(len(text.request) for text in self._waiting)
        if self._waiting and (held[0] + sessions > SESSIONS or held[1] + len(request) > BYTES):
            raise ZrtError(
                "overloaded",
                f"too many prompts wait to be tokenised: {byte_size(held[1])} for {counted(held[0], 'session')}; "
                f"retry after {1 + held[1] // PACE} s",
            )
        text = WaitingText(self, request, sessions)
        self._waiting.append(text)
        return text

    def before(self, text: WaitingText) -> int:
        return self._waiting.index(text) if text in self._waiting else 0

    async def encode(self, text: WaitingText) -> "array[int]":
        try:
            async with self._turn:
                return await self._run(text)
        finally:
            self.leave(text)

    def leave(self, text: WaitingText) -> None:
        if text in self._waiting:
            self._waiting.remove(text)


class PromptEncoder:
    """The lanes for a model whose context holds `context` tokens. Its tokenizer is made of `files`,
    and so is that of each process, whatever lies in the model's folder meanwhile."""

    def __init__(self, tokenizer: Tokenizer, files: TokenizerFiles, context: int) -> None:
        self._tokenizer = tokenizer
        self._limit = EncodingLimit(context)
        self._executors = [ComputeExecutor(f"tokenise-{lane}") for lane in range(len(THREAD_LANES))]
        packed = msgspec.msgpack.encode(files)
        self._children = [EncodingChild(f"tokenise-{name}", packed, context) for name in ("long", "longest")]
        threads = [Lane(most, self._in_thread(one)) for most, one in zip(THREAD_LANES, self._executors, strict=True)]
        children = [Lane(most, _in_child(one)) for most, one in zip((CHILD_LANE, None), self._children, strict=True)]
        self._lanes = [*threads, *children]

    def offer(self, request: PromptRequest, sessions: int) -> WaitingText:
        """Take the text of a request that so many sessions wait for. ZrtError overloaded."""
        packed = msgspec.msgpack.encode(request)
        lanes = self._lanes[len(THREAD_LANES) :] if request.special_as_text else self._lanes
        lane = next(lane for lane in lanes if lane.longest is None or len(packed) <= lane.longest)
        return lane.offer(packed, sessions)

    async def close(self) -> None:
        """Take no more texts, and end all processes."""
        for executor in self._executors:
            executor.close()
        for child in self._children:
            await child.end()

    def _in_thread(self, executor: ComputeExecutor) -> Callable[[WaitingText], Awaitable["array[int]"]]:
        async def run(text: WaitingText) -> "array[int]":
            return await executor.run(self._encode, text.request)

        return run

    def _encode(self, request: bytes) -> "array[int]":
        return array(
            "I", encode_prompt(self._tokenizer, msgspec.msgpack.decode(request, type=PromptRequest), self._limit)
        )


def _in_child(child: EncodingChild) -> Callable[[WaitingText], Awaitable["array[int]"]]:
    async def run(text: WaitingText) -> "array[int]":
        return await child.encode(text.request, text.told)

    return run
