"""From a client's request to token ids, a length limit and sampling options, by the model's own files. No torch."""

from pathlib import Path

from zrt.runtime.compute.spec import ModelSpec
from zrt.runtime.errors import ZrtError
from zrt.runtime.lane import Lane
from zrt.runtime.messages.client import Generate
from zrt.runtime.messages.sampling import Sampling
from zrt.runtime.text import GenerationDefaults, Tokenizer, eos_ids, generation_defaults


class Prompts:
    """One model's tokenizer, end tokens and defaults. Tokenising runs in a thread of its own: a long prompt takes a while."""

    def __init__(self, folder: Path, spec: ModelSpec, context: int) -> None:
        self.tokenizer: Tokenizer | None = Tokenizer.open(folder)
        self.eos: frozenset[int] = eos_ids(folder, self.tokenizer)
        self.context = context
        self._defaults: GenerationDefaults = generation_defaults(folder)
        self._vocab_size = spec.vocab_size
        self._lane = Lane("tokenise")

    def close(self) -> None:
        self._lane.close()

    async def encode(self, request: Generate) -> list[int]:
        """The prompt's token ids. ZrtError bad_request, context_exceeded."""
        given = [request.prompt is not None, request.messages is not None, request.token_ids is not None]
        if sum(given) != 1:
            raise ZrtError("bad_request", "give exactly one of prompt, messages, token_ids")
        if request.raw and request.prompt is None:
            raise ZrtError("bad_request", "raw goes with prompt alone")
        if request.stop and self.tokenizer is None:
            raise ZrtError("bad_request", "this model has no tokenizer, so stop strings cannot be matched")
        ids = request.token_ids if request.token_ids is not None else await self._encode_text(request)
        if not ids:
            raise ZrtError("bad_request", "the prompt is empty")
        high = max(ids)
        if high >= self._vocab_size:
            raise ZrtError("bad_request", f"token id {high} is outside the vocabulary of {self._vocab_size}")
        if len(ids) >= self.context:
            raise ZrtError(
                "context_exceeded",
                f"the prompt has {len(ids)} tokens, the context holds {self.context}: shorten it or raise [model] context",
            )
        return list(ids)

    async def _encode_text(self, request: Generate) -> list[int]:
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise ZrtError("bad_request", "this model has no tokenizer: give token_ids (--token-ids 1,2,3)")
        if request.messages is not None:
            messages = [{"role": message.role, "content": message.content} for message in request.messages]
            return await self._lane.run(tokenizer.encode_chat, messages)
        text = request.prompt or ""
        if not text:
            raise ZrtError("bad_request", "the prompt is empty")
        if request.raw:
            return await self._lane.run(tokenizer.encode_raw, text)
        return await self._lane.run(tokenizer.encode_chat, [{"role": "user", "content": text}])

    def max_length(self, prompt: int, max_tokens: int | None) -> int:
        """Where the history ends at the latest, in tokens."""
        return self.context if max_tokens is None else min(self.context, prompt + max_tokens)

    def sampling(self, request: Generate, seed: int) -> Sampling:
        """What the request says, and the model's generation_config where it says nothing."""
        defaults = self._defaults
        return Sampling(
            defaults.temperature if request.temperature is None else request.temperature,
            defaults.top_k if request.top_k is None else request.top_k,
            defaults.top_p if request.top_p is None else request.top_p,
            seed=seed,
        )
