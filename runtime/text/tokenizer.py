"""Text to token ids and back, by a model's own tokenizer.

Built on tokenizers and jinja2 alone: transformers takes half a second to import, and some of its
versions bring torch.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import tokenizers

from zrt.runtime.errors import ZrtError
from zrt.runtime.model_files import find_model_file
from zrt.runtime.text.chat_template import ChatTemplate
from zrt.runtime.text.tokenizer_files import TokenizerSettings

CLEAN_UP: Final = (
    *((f" {mark}", mark) for mark in ".?!,"),
    (" ' ", "'"),
    *((f" {ending}", ending) for ending in ("n't", "'m", "'s", "'ve", "'re")),
)
"""The replacements that transformers' clean_up_tokenization makes in a decoded text, in order."""


class Tokenizer:
    """A model's own tokenizer: vocabulary, special tokens, chat template.

    Encoding takes time in proportion to the text; a long prompt belongs in a thread. Other threads
    run meanwhile: of the tokenizers library, `encode_batch`, which is used here, releases the GIL,
    `encode` does not (0.23: 0.5 s for 1 MB).
    """

    def __init__(self, backend: tokenizers.Tokenizer, settings: TokenizerSettings, name: str) -> None:
        """Take a loaded tokenizer and its settings; `name` is the model's name in messages."""
        self.backend = backend
        self._name = name
        # a file may carry the settings of its training, which would cut prompts silently
        backend.no_truncation()
        backend.no_padding()
        settings.add_to(backend)
        self.special_ids = frozenset(n for n, token in backend.get_added_tokens_decoder().items() if token.special)
        self.bos_id = self._id(settings.named.get("bos_token"))
        self.eos_id = self._id(settings.named.get("eos_token"))
        self._wants_bos = self.bos_id is not None and backend.encode("a").ids[:1] == [self.bos_id]
        names = {name: token.content for name, token in settings.named.items()}
        self._template = None if settings.template is None else ChatTemplate(settings.template, names)
        self.cleans_up = settings.cleans_up and type(backend.model).__name__ != "BPE"
        """Whether decoding ends with `clean_up`. As in transformers, never for byte-pair
        vocabularies."""

    @classmethod
    def open(cls, folder: Path) -> "Tokenizer | None":
        """Load tokenizer.json, tokenizer_config.json and chat_template.jinja of `folder`.

        Return None if there is no tokenizer.json: such a model takes token ids only. ZrtError
        bad_model.
        """
        said = find_model_file(folder / "tokenizer.json")
        if said is None:
            return None
        try:
            return cls(tokenizers.Tokenizer.from_buffer(said), TokenizerSettings.read(folder), folder.name)
        except ZrtError:
            raise
        except Exception as error:  # the files come from outside, and tokenizers raises bare Exceptions
            raise ZrtError("bad_model", f"the tokenizer of {folder} does not load: {error}") from error

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the ids of a chat of {role, content}, ready for the assistant's turn, by the
        model's own template.

        BOS stands first exactly once where the model wants it, whether or not its template writes
        it. ZrtError bad_request: the last message is empty, there is no template, or the template
        raises.
        """
        if not messages or not messages[-1].get("content"):
            raise ZrtError("bad_request", "the prompt is empty")
        if self._template is None:
            raise ZrtError("bad_request", f"{self._name} has no chat template: use --raw to send the text as it is")
        try:
            text = self._template.render(messages)
        except Exception as error:  # a template is a program that came with the model: it may raise anything
            raise ZrtError("bad_request", f"the chat template of {self._name} refuses this chat: {error}") from error
        ids = self._encode(text, special=False)
        if self.bos_id is not None and self._wants_bos and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def encode_raw(self, text: str) -> list[int]:
        """Return the ids of `text` as it is, with the special tokens that the tokenizer adds. BOS
        is not doubled when the text begins with it. ZrtError bad_request: the text is empty."""
        if not text:
            raise ZrtError("bad_request", "the prompt is empty")
        ids = self._encode(text, special=True)
        if self._wants_bos and ids[:2] == [self.bos_id, self.bos_id]:
            return ids[1:]
        return ids

    def _encode(self, text: str, *, special: bool) -> list[int]:
        (encoding,) = self.backend.encode_batch([text], add_special_tokens=special)
        ids: list[int] = encoding.ids
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
