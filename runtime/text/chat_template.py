"""Chat templates: Jinja programs that come with a model and write a chat the way it was trained on.

What a template may use is documented by transformers ("Writing a chat template"): the variables
`messages`, `tools`, `documents`, `add_generation_prompt` and the special tokens by name, the
functions `raise_exception` and `strftime_now`, a `tojson` that leaves characters as they are,
`break` and `continue`, and a `generation` block, which only marks what the assistant says.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

GIVEN: Final = (
    *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
    *("raise_exception", "strftime_now"),
)
"""The variables and functions that zrt gives every template, besides special tokens, or that
transformers would."""


class ChatTemplate:
    """A chat template, which runs in Jinja's sandbox: it may fail in any way, but reach nothing
    outside of its arguments."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Take a template's source; `special_tokens` are by the names that templates use, such as
        bos_token."""
        self._source = source
        self._special_tokens = dict(special_tokens)
        self.reserved = frozenset((*GIVEN, *special_tokens))
        """Names that are no option's: what every template is given."""

    def render(self, messages: Sequence[Mapping[str, str]], options: Mapping[str, object] | None = None) -> str:
        """Return the text of a chat of {role, content}, up to where the assistant goes on;
        `options` are further variables. Raises what the template raises."""
        given = {
            "messages": [dict(message) for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }
        return self._compiled.render({**(options or {}), **given, **self._special_tokens})

    @cached_property
    def _compiled(self) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda style: datetime.now().strftime(style)
        return environment.from_string(self._source)


class _GenerationTag(Extension):
    """The tag `{% generation %} … {% endgeneration %}`, whose body is rendered as if the tags were
    not there."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own way to declare them)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: object, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
