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
    """A prompt, and how it is to be answered; `chat` holds what goes with the prompt in the model's
    chat template, `sampling` the given options, both as keywords of Client.generate."""

    prompt: str | None = None
    token_ids: list[int] | None = None
    raw: bool = False
    json: bool = False
    chat: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)


def add_question_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a question except its prompt, which every command adds itself."""
    add_sampling_arguments(parser)
    add_chat_arguments(parser)
    parser.add_argument("--raw", action="store_true", help="send the prompt as it is, without the chat template")
    parser.add_argument("--token-ids", type=argument_types.ids, metavar="1,2,3", help="token ids in place of a prompt")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout in place of the stream")


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of what goes into the model's chat template besides prompts."""
    parser.add_argument("--system", type=argument_types.prompt, metavar="TEXT", help="a system prompt")
    parser.add_argument(
        "--template-option",
        type=argument_types.template_option,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a variable of the model's chat template, such as enable_thinking=false (repeatable)",
    )
    parser.add_argument(
        "--special-as-text",
        action="store_true",
        help="take names of special tokens in a prompt, such as <|im_end|>, as text (default: as these tokens)",
    )


def given_chat(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what was given of these, as keywords of Client.generate. ZrtError bad_config: an
    option was given twice."""
    options = dict(arguments.template_option)
    if len(options) < len(arguments.template_option):
        raise ZrtError("bad_config", "--template-option names an option twice")
    given = {"system": arguments.system, "template_options": options, "special_as_text": arguments.special_as_text}
    return {name: value for name, value in given.items() if value}


def describes_answer(arguments: argparse.Namespace) -> bool:
    """Return whether anything was given that has no meaning without a prompt. ZrtError
    bad_config."""
    return bool(arguments.raw or arguments.json or given_chat(arguments) or given_sampling(arguments))


def read_question(arguments: argparse.Namespace) -> Question:
    """Return the question in the arguments; the prompt `-` is read from standard input. ZrtError
    bad_config."""
    prompt = arguments.prompt
    if (prompt is None) == (arguments.token_ids is None):
        raise ZrtError("bad_config", "give either a prompt or --token-ids")
    if arguments.logprobs is not None and not arguments.json:
        raise ZrtError("bad_config", "--logprobs needs --json")
    chat = given_chat(arguments)
    if (arguments.raw or arguments.token_ids is not None) and chat.keys() & {"system", "template_options"}:
        raise ZrtError("bad_config", "--system and --template-option go with a chat, not with --raw or --token-ids")
    if arguments.token_ids is not None and (arguments.special_as_text or arguments.raw):
        option = "--raw" if arguments.raw else "--special-as-text"
        raise ZrtError("bad_config", f"{option} goes with a prompt, not with --token-ids")
    if prompt == "-":
        prompt = _standard_input()
    return Question(
        prompt=prompt,
        token_ids=arguments.token_ids,
        raw=arguments.raw,
        json=arguments.json,
        chat=chat,
        sampling=given_sampling(arguments),
    )


def _standard_input() -> str:
    """Return all of standard input, without the final line break, as a shell hands on what a
    command prints."""
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ZrtError("bad_config", f"standard input is not UTF-8 at byte {error.start}") from None
