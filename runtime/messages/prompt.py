"""The base of every client request, and the prompt of a generation."""

from typing import Annotated

from msgspec import Meta, Struct

from zrt.runtime.messages.control import snake
from zrt.runtime.messages.header import U32

Id = Annotated[str, Meta(min_length=1, max_length=64)]
OptionName = Annotated[str, Meta(min_length=1, max_length=64)]
TemplateValue = bool | Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | float | Annotated[str, Meta(max_length=4096)]
TemplateOptions = Annotated[dict[OptionName, TemplateValue], Meta(max_length=64)]
"""Variables for the chat template, by name."""


class Request(Struct, tag_field="type", tag=snake, forbid_unknown_fields=True, kw_only=True):
    """Base of a client's requests."""

    id: Id


class ChatMessage(Struct, forbid_unknown_fields=True):
    """One turn of a chat: who said what."""

    role: str
    content: str


class PromptRequest(Request):
    """Prompt of a generation. Exactly one of `prompt`, `messages`, `token_ids` is given.

    `prompt` is one user message put through the model's chat template, or plain text with `raw`.
    `template_options` are variables of the template, such as `enable_thinking`; those that a
    template does not use have no effect. The name of a special token within a text is that token,
    or, with `special_as_text`, text like any other.

    `room` refuses (context_exceeded) a prompt that does not leave so many tokens of the context for
    the answer, or a quarter of the context if that is less.
    """

    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    token_ids: list[Annotated[int, Meta(ge=0)]] | None = None
    raw: bool = False
    template_options: TemplateOptions = {}
    special_as_text: bool = False
    room: U32 = 0
