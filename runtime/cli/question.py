"""One generation as the command line describes it."""

import argparse
import sys
from dataclasses import dataclass, field
from typing import Any

from zrt.runtime.cli import argument_types
from zrt.runtime.cli.sampling_arguments import add_sampling_arguments, given_sampling
from zrt.runtime.errors import ZrtError


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, and how it is to be answered; `sampling` holds the given options, as keywords of
    Client.generate."""

    prompt: str | None = None
    token_ids: list[int] | None = None
    raw: bool = False
    json: bool = False
    sampling: dict[str, Any] = field(default_factory=dict)


def add_question_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a question except its prompt, which every command adds itself."""
    add_sampling_arguments(parser)
    parser.add_argument("--raw", action="store_true", help="send the prompt as it is, without the chat template")
    parser.add_argument("--token-ids", type=argument_types.ids, metavar="1,2,3", help="token ids in place of a prompt")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout in place of the stream")


def read_question(arguments: argparse.Namespace) -> Question:
    """Return the question in the arguments; the prompt `-` is read from standard input. ZrtError
    bad_config."""
    prompt = arguments.prompt
    if (prompt is None) == (arguments.token_ids is None):
        raise ZrtError("bad_config", "give either a prompt or --token-ids")
    if arguments.logprobs is not None and not arguments.json:
        raise ZrtError("bad_config", "--logprobs needs --json")
    if prompt == "-":
        prompt = _standard_input()
    return Question(
        prompt=prompt,
        token_ids=arguments.token_ids,
        raw=arguments.raw,
        json=arguments.json,
        sampling=given_sampling(arguments),
    )


def _standard_input() -> str:
    """Return all of standard input, without the final line break, as a shell hands on what a
    command prints."""
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ZrtError("bad_config", f"standard input is not UTF-8 at byte {error.start}") from None
