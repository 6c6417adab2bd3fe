"""Text to token ids and what a model folder says about tokens. transformers is imported late and never brings torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from zrt.runtime.errors import ZrtError

TOKENIZER_FILE: Final = "tokenizer.json"


class Tokenizer:
    """A model's own tokenizer: vocabulary, special tokens, chat template.

    Encoding releases the GIL but takes time in proportion to the text; a long prompt belongs in a thread.
    """

    def __init__(self, loaded: Any, name: str) -> None:
        """`loaded` is a transformers PreTrainedTokenizerFast, `name` what messages call the model."""
        self._loaded = loaded
        self._name = name
        self._backend = loaded.backend_tokenizer
        # a file may carry the settings of its training, which would cut prompts silently
        self._backend.no_truncation()
        self._backend.no_padding()
        self.bos_id: int | None = loaded.bos_token_id
        self.eos_id: int | None = loaded.eos_token_id
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(number for number, token in added.items() if token.special)
        self._wants_bos = self.bos_id is not None and self._backend.encode("a").ids[:1] == [self.bos_id]

    @classmethod
    def open(cls, folder: Path) -> "Tokenizer | None":
        """Load tokenizer.json, tokenizer_config.json and chat_template.jinja of `folder`.

        None if it has no tokenizer.json: such a model takes token ids only. Errors: bad_model.
        """
        if not (folder / TOKENIZER_FILE).is_file():
            return None
        from transformers import PreTrainedTokenizerFast

        try:
            loaded = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # the files come from outside and the library has no error type of its own
            raise ZrtError("bad_model", f"the tokenizer of {folder} does not load: {error}") from error
        return cls(loaded, folder.name)

    @property
    def backend(self) -> Any:
        """The `tokenizers.Tokenizer` underneath."""
        return self._backend

    @property
    def cleans_up(self) -> bool:
        """Whether decoding ends with transformers' clean_up_tokenization. It leaves byte-pair vocabularies alone."""
        loaded = self._loaded
        forced = getattr(loaded, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
        return bool(loaded.clean_up_tokenization_spaces) and (type(self._backend.model).__name__ != "BPE" or forced)

    def clean_up(self, text: str) -> str:
        """transformers' clean_up_tokenization: no space before punctuation and English contractions."""
        return str(self._loaded.clean_up_tokenization(text))

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The ids of a chat of {role, content}, ready for the assistant's turn, by the model's own template.

        BOS stands first exactly once where the model wants it, whether or not its template writes it.
        Errors: bad_request, when there is nothing to say, no template, or the template raises.
        """
        if not messages or not messages[-1].get("content"):
            raise ZrtError("bad_request", "the prompt is empty")
        if not self._loaded.chat_template:
            raise ZrtError("bad_request", f"{self._name} has no chat template: use --raw to send the text as it is")
        try:
            text = self._loaded.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # a template is a program that came with the model: it may raise anything
            raise ZrtError("bad_request", f"the chat template of {self._name} refuses this chat: {error}") from error
        ids = self._backend.encode(text, add_special_tokens=False).ids
        if self._wants_bos and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return list(ids)

    def encode_raw(self, text: str) -> list[int]:
        """The ids of `text` as it is, with the special tokens that the tokenizer adds. BOS is not doubled when the
        text begins with it. Errors: bad_request on an empty text."""
        if not text:
            raise ZrtError("bad_request", "the prompt is empty")
        ids = list(self._backend.encode(text).ids)
        if self._wants_bos and ids[:2] == [self.bos_id, self.bos_id]:
            return ids[1:]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` without special tokens. Ids outside of the vocabulary have no text."""
        text = str(self._backend.decode(list(ids), skip_special_tokens=True))
        return self.clean_up(text) if self.cleans_up else text


class GenerationDefaults(msgspec.Struct, frozen=True):
    """How a model's makers want it sampled. Temperature 0 is greedy; top_k 0 and top_p 1 are off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


class _Tokens(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


class _Generation(_Tokens):
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None


def eos_ids(folder: Path, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Every id that ends an answer: the union of config.json, generation_config.json and the tokenizer.

    They differ in practice: the tokenizer may name the end of a text and generation_config the end of a turn.
    Errors: bad_model.
    """
    ids: set[int] = set()
    for said in (_read(folder / "config.json", _Tokens), _read(folder / "generation_config.json", _Generation)):
        match said.eos_token_id:
            case None:
                pass
            case int(one):
                ids.add(one)
            case several:
                ids.update(several)
    if tokenizer is not None and tokenizer.eos_id is not None:
        ids.add(tokenizer.eos_id)
    return frozenset(ids)


def generation_defaults(folder: Path) -> GenerationDefaults:
    """What generation_config.json asks for. As in transformers, a model that does not say `do_sample` is greedy.
    Errors: bad_model."""
    said = _read(folder / "generation_config.json", _Generation)
    if not said.do_sample:
        return GenerationDefaults()
    return GenerationDefaults(
        temperature=1.0 if said.temperature is None else said.temperature,
        top_k=said.top_k or 0,
        top_p=1.0 if said.top_p is None else said.top_p,
    )


_Said = TypeVar("_Said", bound=_Tokens)


def _read(file: Path, kind: type[_Said]) -> _Said:
    """`file` as `kind`, other keys left alone; an empty one if the folder has no such file."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except FileNotFoundError:
        return kind()
    except (OSError, msgspec.DecodeError) as error:
        raise ZrtError("bad_model", f"{file} cannot be read: {error}") from error
