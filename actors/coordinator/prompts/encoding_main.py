"""A process that tokenises long texts for its parent: `python -m
zrt.actors.coordinator.prompts.encoding_main CONTEXT`.

Reads from its parent, over the socket that is its standard input: TokenizerFiles, then
PromptRequest any number of times. Writes to it, for each of these: Told any number of times, then
Encoded or Refused. It ends with that socket.
"""

import os
import socket
import sys
import time
from array import array
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import msgspec
from msgspec import Struct

from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.prompt import PromptRequest
from zrt.runtime.process.lifeline import hold
from zrt.runtime.text.encoding_limit import EncodingLimit
from zrt.runtime.text.prompts import encode_prompt
from zrt.runtime.text.tokenizer import Tokenizer
from zrt.runtime.text.tokenizer_files import TokenizerFiles

LENGTH_BYTES: Final = 4
"""The bytes before each message that hold its length, the highest first."""

NICE: Final = 10
"""How much the process steps back for others: it gets a tenth of a core that others want whole."""

TOLD_S: Final = 0.2
"""Seconds between two reports of how far a text is."""


class Told(Struct, tag=True):
    """Report that `done` of `total` characters are tokenised."""

    done: int
    total: int


class Encoded(Struct, tag=True):
    """A prompt's token ids, uint32 in the machine's own order."""

    ids: bytes


class Refused(Struct, tag=True):
    """The error, as of a ZrtError, that a prompt came to instead."""

    kind: str
    message: str


Reply = Told | Encoded | Refused


def main() -> None:
    hold()
    os.nice(NICE)
    with socket.socket(fileno=0) as parent:
        serve(parent, int(sys.argv[1]))


def serve(parent: socket.socket, context: int) -> None:
    """Answer each request that `parent` sends, until it closes its end or is gone."""
    with suppress(ConnectionError):  # a reset is an end too: the parent was killed
        tokenizer = None
        for message in received(parent):
            if tokenizer is None:
                tokenizer = Tokenizer.of(msgspec.msgpack.decode(message, type=TokenizerFiles))
            else:
                request = msgspec.msgpack.decode(message, type=PromptRequest)
                say(parent, answer(parent, tokenizer, request, context))


def received(parent: socket.socket) -> Iterator[bytes]:
    """Yield each message that `parent` sends whole."""
    with parent.makefile("rb") as stream:
        while len(head := stream.read(LENGTH_BYTES)) == LENGTH_BYTES:
            message = stream.read(size := int.from_bytes(head))
            if len(message) < size:
                return
            yield message


def answer(parent: socket.socket, tokenizer: Tokenizer, request: PromptRequest, context: int) -> Reply:
    said = time.monotonic()

    def told(done: int, total: int) -> None:
        nonlocal said
        if (now := time.monotonic()) - said >= TOLD_S:
            said = now
            say(parent, Told(done, total))

    try:
        ids = encode_prompt(tokenizer, request, EncodingLimit(context, told))
    except ZrtError as error:
        return Refused(error.kind, error.message)
    return Encoded(array("I", ids).tobytes())


def say(parent: socket.socket, reply: Reply) -> None:
    body = msgspec.msgpack.encode(reply)
    parent.sendall(len(body).to_bytes(LENGTH_BYTES) + body)


if __name__ == "__main__":
    main()
