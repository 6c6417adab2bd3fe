"""The prompt of a request as token ids: by the model's template, or as it is."""

from zrt.runtime.messages.prompt import PromptRequest
from zrt.runtime.text.encoding_limit import UNLIMITED, EncodingLimit
from zrt.runtime.text.tokenizer import Tokenizer


def encode_prompt(tokenizer: Tokenizer, request: PromptRequest, limit: EncodingLimit = UNLIMITED) -> list[int]:
    """Return the ids of a request's text, `prompt` or `messages`. ZrtError bad_request,
    context_exceeded."""
    if request.raw:
        return tokenizer.encode_raw(request.prompt or "", special_as_text=request.special_as_text, limit=limit)
    if request.messages is None:
        messages = [{"role": "user", "content": request.prompt or ""}]
    else:
        messages = [{"role": message.role, "content": message.content} for message in request.messages]
    return tokenizer.encode_chat(
        messages, request.template_options, special_as_text=request.special_as_text, limit=limit
    )
