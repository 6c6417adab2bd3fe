"""Text to token ids and back, by a model's own tokenizer.

Built on tokenizers and jinja2 alone: transformers takes half a second to import, and some of its
versions bring torch.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Final

import tokenizers

from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.prompt import TemplateValue
from zrt.runtime.text.chat_template import ChatTemplate
from zrt.runtime.text.cuts import Cuts
from zrt.runtime.text.encoding_limit import UNLIMITED, EncodingLimit
from zrt.runtime.text.least_tokens import LeastTokens
from zrt.runtime.text.literal_specials import LiteralSpecials
from zrt.runtime.text.token_decoders import TokenDecoder, decoder_steps
from zrt.runtime.text.tokenizer_files import TOKENIZER, TokenizerFiles, TokenizerSettings

CLEAN_UP: Final = (
    *((f" {mark}", mark) for mark in ".?!,"),
    (" ' ", "'"),
    *((f" {ending}", ending) for ending in ("n't", "'m", "'s", "'ve", "'re")),
)
"""The replacements that transformers' clean_up_tokenization makes in a decoded text, in order."""


class Tokenizer:
    """A model's own tokenizer: vocabulary, special tokens, chat template.

    Encoding takes time in proportion to the text (0.7 MB a second on an old core), and memory too
    where the text cannot be cut (140 bytes for each of its own); a long prompt belongs in a thread
    or process. Other threads run meanwhile: of the tokenizers library, `encode_batch_fast`, which
    is used here, releases the GIL, `encode` does not.
    """

    def __init__(self, backend: tokenizers.Tokenizer, settings: TokenizerSettings, name: str) -> None:
        """Take a loaded tokenizer and its settings; `name` is the model's name in messages."""
        self.backend = backend
        self._name = name
        # a file may carry the settings of its training, which would cut prompts silently
        backend.no_truncation()
        backend.no_padding()
        settings.add_to(backend)
        self.decoder_steps = decoder_steps(backend)
        """Description of the decoder, for TokenDecoder."""
        TokenDecoder(self.decoder_steps)  # a step that is not known is told now, not in an answer
        added = backend.get_added_tokens_decoder()
        self._special = {token.content: n for n, token in added.items() if token.special}
        self.special_ids = frozenset(self._special.values())
        self.bos_id = self._id(settings.named.get("bos_token"))
        self.eos_id = self._id(settings.named.get("eos_token"))
        self._wants_bos = self.bos_id is not None and backend.encode("a").ids[:1] == [self.bos_id]
        names = {name: token.content for name, token in settings.named.items()}
        self._template = None if settings.template is None else ChatTemplate(settings.template, names)
        self.least_tokens = LeastTokens(backend)
        self.cuts = Cuts(backend)
        self.cleans_up = settings.cleans_up and type(backend.model).__name__ != "BPE"
        """Whether decoding ends with `clean_up`. As in transformers, never for byte-pair
        vocabularies."""

    @classmethod
    def open(cls, folder: Path) -> "Tokenizer | None":
        """Load tokenizer.json, tokenizer_config.json and chat_template.jinja of `folder`.

        Return None if there is no tokenizer.json: such a model takes token ids only. ZrtError
        bad_model.
        """
        files = TokenizerFiles.read(folder)
        return None if files is None else cls.of(files)

    @classmethod
    def of(cls, files: TokenizerFiles) -> "Tokenizer":
        """Load the tokenizer that these files make. ZrtError bad_model."""
        try:
            backend = tokenizers.Tokenizer.from_buffer(files.contents[TOKENIZER])
            return cls(backend, TokenizerSettings.of(files.contents), Path(files.folder).name)
        except ZrtError:
            raise
        except Exception as error:  # the files come from outside, and tokenizers raises bare Exceptions
            raise ZrtError("bad_model", f"the tokenizer of {files.folder} does not load: {error}") from error

    @property
    def has_template(self) -> bool:
        """Whether the model has a chat template."""
        return self._template is not None

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        options: Mapping[str, TemplateValue] | None = None,
        *,
        special_as_text: bool = False,
        limit: EncodingLimit = UNLIMITED,
    ) -> list[int]:
        """Return the ids of a chat of {role, content}, ready for the assistant's turn, by the
        model's own template, to which `options` are variables.

        As in transformers, the tokenizer adds nothing: BOS is there if the template writes it. With
        `special_as_text` a special token's name in a message (its role too) or an option is text.
        ZrtError bad_request: the last message is empty, there is no template, the template raises,
        or an option has the name of what every template is given; context_exceeded by `limit`.
        """
        if not messages or not messages[-1].get("content"):
            raise ZrtError("bad_request", "the prompt is empty")
        if self._template is None:
            raise ZrtError("bad_request", f"{self._name} has no chat template: use --raw to send the text as it is")
        taken = self._template.reserved & (options or {}).keys()
        if taken:
            raise ZrtError("bad_request", f"template_options: {min(taken)} is not an option: zrt itself sets it")
        text = self._rendered(self._template, messages, options or {})
        if special_as_text:
            self._begin(text, limit)  # before the messages are looked through
            marks: dict[str, str] = {}
            mask = self._literal.masked
            hidden = [{name: mask(said, marks) for name, said in message.items()} for message in messages]
            variables = {
                name: mask(said, marks) if isinstance(said, str) else said for name, said in (options or {}).items()
            }
            if marks:
                ids = self._literal.encode_masked(self._rendered(self._template, hidden, variables), marks)
                limit.reached(len(ids), len(text), len(text))
                return ids
        return self._encode(text, limit, special=False)

    def encode_raw(self, text: str, *, special_as_text: bool = False, limit: EncodingLimit = UNLIMITED) -> list[int]:
        """Return the ids of `text` as it is, with the special tokens that the tokenizer adds. BOS
        is not doubled when the text begins with it. With `special_as_text` a special token's name
        is text. ZrtError bad_request: the text is empty; context_exceeded by `limit`."""
        if not text:
            raise ZrtError("bad_request", "the prompt is empty")
        if special_as_text:
            self._begin(text, limit)
            ids = self._literal.encode(text)
            limit.reached(len(ids), len(text), len(text))
            return ids
        ids = self._encode(text, limit, special=True)
        if self._wants_bos and ids[:2] == [self.bos_id, self.bos_id]:
            return ids[1:]
        return ids

    @cached_property
    def _literal(self) -> LiteralSpecials:
        return LiteralSpecials(self.backend, self._special)

    def _rendered(
        self, template: ChatTemplate, messages: Sequence[Mapping[str, str]], options: Mapping[str, TemplateValue]
    ) -> str:
        try:
            return template.render(messages, options)
        except Exception as error:  # a template is a program that came with the model: it may raise anything
            raise ZrtError("bad_request", f"the chat template of {self._name} refuses this chat: {error}") from error

    def _begin(self, text: str, limit: EncodingLimit) -> None:
        limit.begin(text, self.least_tokens.of(text), self.least_tokens.bytes_per_token)

    def _encode(self, text: str, limit: EncodingLimit = UNLIMITED, *, special: bool) -> list[int]:
        self._begin(text, limit)
        ids: list[int] = []
        done = 0
        for piece in self.cuts.pieces(text):
            whole = len(piece) == len(text)
            try:
                (encoding,) = self.backend.encode_batch_fast([piece], add_special_tokens=special and whole)
            except BaseException as error:  # a panic of the library is no Exception
                raise ZrtError("internal", f"the tokenizer of {self._name} fails on this text: {error}") from None
            ids += encoding.ids
            done += len(piece)
            limit.reached(len(ids), done, len(text))
        if special and not whole:
            before, after = self.cuts.around
            ids = [*before, *ids, *after]
            limit.reached(len(ids), done, len(text))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` without special tokens. Ids outside of the vocabulary have no
        text."""
        text = self.backend.decode(list(ids), skip_special_tokens=True)
        return clean_up(text) if self.cleans_up else text

    def _id(self, token: tokenizers.AddedToken | None) -> int | None:
        return None if token is None else self.backend.token_to_id(token.content)


def clean_up(text: str) -> str:
    """Return `text` without the spaces that a word vocabulary leaves before punctuation and English
    contractions."""
    for spaced, clean in CLEAN_UP:
        text = text.replace(spaced, clean)
    return text
