"""What a client's request means by the model's own files: token ids, a length limit and sampling
options. No torch."""

import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path

from msgspec.structs import replace

from zrt.actors.coordinator.prompts.encoder import PromptEncoder, WaitingText
from zrt.runtime.errors import ZrtError
from zrt.runtime.formatting import counted
from zrt.runtime.messages.client import Generate
from zrt.runtime.messages.prompt import PromptRequest
from zrt.runtime.messages.sampling import SAMPLING_OPTIONS, SEED_MAX, Sampling, stage_sampling
from zrt.runtime.models.architecture.generation_config import GenerationDefaults, eos_ids, generation_defaults
from zrt.runtime.models.architecture.spec import ModelSpec
from zrt.runtime.text.detokenizer import Detokenizer
from zrt.runtime.text.encoding_limit import too_long
from zrt.runtime.text.stop_strings import stop_tokens
from zrt.runtime.text.tokenizer import Tokenizer
from zrt.runtime.text.tokenizer_files import TokenizerFiles


class Requests:
    """The reader of requests for one model, with its tokenizer, end tokens and defaults; `notes`
    says which of the model's defaults are not followed."""

    def __init__(self, folder: Path, spec: ModelSpec, context: int) -> None:
        files = TokenizerFiles.read(folder)
        self.tokenizer: Tokenizer | None = None
        self._encoder: PromptEncoder | None = None
        if files is not None:
            self.tokenizer = Tokenizer.of(files)
            self._encoder = PromptEncoder(self.tokenizer, files, context)
        self.eos = frozenset(token for token in eos_ids(folder, self.tokenizer) if 0 <= token < spec.vocab_size)
        self.context = context
        self.defaults: GenerationDefaults = generation_defaults(folder)
        self.notes = self.defaults.notes()
        self._vocab_size = spec.vocab_size

    async def close(self) -> None:
        """End what tokenises."""
        if self._encoder is not None:
            await self._encoder.close()

    def offer(self, request: Generate) -> WaitingText | None:
        """Take the text of a (checked) request, to be tokenised; return None if the request has
        token ids instead. ZrtError overloaded."""
        if request.token_ids is not None or self._encoder is None:
            return None
        fields = {name: getattr(request, name) for name in PromptRequest.__struct_fields__}
        return self._encoder.offer(PromptRequest(**fields), request.n)

    def check(self, request: Generate) -> None:
        """Check what can be said of a request before its text is tokenised. ZrtError bad_request,
        context_exceeded."""
        given = [request.prompt is not None, request.messages is not None, request.token_ids is not None]
        if sum(given) != 1:
            raise ZrtError("bad_request", "give exactly one of prompt, messages, token_ids")
        if request.raw and request.prompt is None:
            raise ZrtError("bad_request", "raw goes with prompt alone")
        if request.token_ids is not None and request.special_as_text:
            raise ZrtError("bad_request", "special_as_text goes with a text, not with token_ids")
        if (request.token_ids is not None or request.raw) and request.template_options:
            raise ZrtError("bad_request", "template_options go with a chat, not with raw or token_ids")
        if self.tokenizer is None:
            if request.stop:
                raise ZrtError("bad_request", "this model has no tokenizer, so stop strings cannot be matched")
            if request.token_ids is None:
                raise ZrtError("bad_request", "this model has no tokenizer: give token_ids (--token-ids 1,2,3)")
        if request.token_ids is not None:
            self.check_prompt(request, request.token_ids)
            self._check_ids("token_ids", request.token_ids)

    def check_text(self, request: Generate, ids: Sequence[int]) -> None:
        """Check the token ids that a request's text came to. ZrtError as `check_prompt`."""
        self.check_prompt(request, ids)
        if (highest := max(ids)) >= self._vocab_size and self.tokenizer is not None:
            name = self.tokenizer.backend.id_to_token(highest)
            text = f"the text has the token {name!r}, id {highest}, outside the model's vocabulary of {self._vocab_size}: leave it out"
            raise ZrtError("bad_request", text)

    def check_prompt(self, request: Generate, ids: Sequence[int]) -> None:
        """Check the token ids of a request's prompt. ZrtError bad_request; context_exceeded: the
        context has no room for an answer."""
        if not ids:
            raise ZrtError("bad_request", "the prompt is empty")
        has, limit = counted(len(ids), "token"), self.max_length(len(ids), request.max_tokens)
        if len(ids) >= self.context:
            raise too_long(has, self.context)
        if len(ids) >= limit:
            text = f"{has}, and the model's generation_config ends answers at {limit} with it (max_length): give max_tokens"
        elif self.context - len(ids) < min(request.room, self.context // 4):
            text = f"{has}, the context holds {self.context}, and {request.room} are wanted for the answer: shorten it"
        else:
            return
        raise ZrtError("context_exceeded", f"the prompt has {text}")

    def max_length(self, prompt: int, max_tokens: int | None) -> int:
        """Return where the history ends at the latest, in tokens."""
        return self.defaults.length_limit(prompt, max_tokens, self.context)

    def detokeniser(self, prompt: Sequence[int]) -> Detokenizer | None:
        """Return what makes text of the tokens that follow this prompt; None without a
        tokenizer."""
        return Detokenizer(self.tokenizer, prompt, self.eos) if self.tokenizer is not None else None

    def ends(self, request: Generate) -> frozenset[int]:
        """Return the token ids that end this request's generation, special tokens that are a stop
        string among them."""
        stops = frozenset() if self.tokenizer is None else stop_tokens(request.stop, self.tokenizer, self.eos)
        named = frozenset(token for token in stops if token < self._vocab_size)
        return frozenset(request.stop_token_ids) | named | (frozenset() if request.ignore_eos else self.eos)

    def sampling(self, request: Generate) -> Sampling:
        """Return what the request says, and the model's generation_config where it says nothing.
        Without a seed one is drawn.

        ZrtError bad_request: values that do not go together, or ids outside of the vocabulary.
        """
        for option in SAMPLING_OPTIONS:
            if option.holds_token_ids:
                self._check_ids(option.name, getattr(request, option.name))
        sampling = stage_sampling(request, self.defaults.sampling)
        return replace(sampling, min_tokens=self._min_tokens(request, sampling.min_tokens), seed=_seed(request))

    def _min_tokens(self, request: Generate, asked: int) -> int:
        """Return how many tokens come at least: `asked`, or what `max_tokens` leaves of the model's
        own wish."""
        if request.max_tokens is not None and asked > request.max_tokens:
            if request.min_tokens is not None:
                raise ZrtError("bad_request", f"min_tokens is {asked}, but max_tokens is {request.max_tokens}")
            asked = request.max_tokens
        if asked and len(self.ends(request)) >= self._vocab_size:
            raise ZrtError("bad_request", "min_tokens: every token of the vocabulary would end the generation")
        return asked

    def _check_ids(self, field: str, ids: Iterable[int]) -> None:
        high = max(ids, default=0)
        if high >= self._vocab_size:
            raise ZrtError("bad_request", f"{field}: token id {high} is outside the vocabulary of {self._vocab_size}")


def _seed(request: Generate) -> int:
    """Return the request's seed, or a new one; there is one for each answer from there on."""
    seed = secrets.randbits(32) if request.seed is None else request.seed
    if seed + request.n - 1 > SEED_MAX:
        raise ZrtError("bad_request", f"seed is {seed}: sample {request.n - 1} would need one beyond {SEED_MAX}")
    return seed
