"""The base of every client request, and the prompt of a generation."""

from typing import Annotated

from msgspec import Meta, Struct

from zrt.runtime.messages.control import snake

Id = Annotated[str, Meta(min_length=1, max_length=64)]


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
    """

    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    token_ids: list[Annotated[int, Meta(ge=0)]] | None = None
    raw: bool = False
