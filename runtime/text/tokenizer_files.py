"""The files that make a tokenizer: tokenizer.json, and beside it names of special tokens, further
tokens, the chat template."""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import tokenizers
from msgspec import Struct

from zrt.runtime.model_files import find_model_file

TOKENIZER: Final = "tokenizer.json"
BESIDE: Final = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


class TokenizerFiles(Struct, frozen=True):
    """The files of one tokenizer as they were when they were read, by name, as far as they
    exist."""

    folder: str
    """The model's folder, for messages."""
    contents: dict[str, bytes]

    @classmethod
    def read(cls, folder: Path) -> "TokenizerFiles | None":
        """Read the files in `folder`; return None if there is no tokenizer.json. ZrtError
        bad_model: a file cannot be read."""
        found = {name: find_model_file(folder / name) for name in (TOKENIZER, *BESIDE)}
        contents = {name: data for name, data in found.items() if data is not None}
        return cls(str(folder), contents) if TOKENIZER in contents else None


@dataclass(frozen=True)
class TokenizerSettings:
    """The settings in tokenizer_config.json, special_tokens_map.json (older models) and
    chat_template.jinja, as far as these files exist."""

    named: dict[str, tokenizers.AddedToken]
    """Special tokens by the names that chat templates use, such as bos_token."""
    others: list[tokenizers.AddedToken]
    """Special tokens without a name for chat templates."""
    listed: list[tokenizers.AddedToken]
    """Added tokens, special or not, in the order of their ids."""
    template: str | None
    """The default chat template, in Jinja."""
    cleans_up: bool
    """Whether decoding ends with transformers' clean_up_tokenization."""

    @classmethod
    def of(cls, files: Mapping[str, bytes]) -> "TokenizerSettings":
        """Take the settings from files, by name. Raises what files of other forms raise:
        ValueError, TypeError, LookupError."""
        said = _object(files.get("tokenizer_config.json"))
        tokens = _object(files.get("special_tokens_map.json")) | said
        named = {name: value for name, value in tokens.items() if name.endswith("_token")}
        others: list[Any] = []
        for more in (tokens.get("additional_special_tokens"), tokens.get("extra_special_tokens")):
            if isinstance(more, dict):
                named |= more
            else:
                others += more or []
        listed = sorted((said.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0]))
        return cls(
            named={name: _token(value) for name, value in named.items() if isinstance(value, str | dict)},
            others=[_token(value) for value in others],
            listed=[_token(value, special=bool(value.get("special"))) for _, value in listed],
            template=_template(files.get("chat_template.jinja"), said.get("chat_template")),
            cleans_up=bool(said.get("clean_up_tokenization_spaces")),
        )

    def add_to(self, backend: tokenizers.Tokenizer) -> None:
        """Add to `backend` the tokens that tokenizer.json lacks or describes otherwise, with the
        outcome that transformers has.

        A token listed by its id is matched as listed, and special if listed so. A token with a name
        is special. Any other special token is added if it is not there at all.
        """
        present = {token.content: token for token in backend.get_added_tokens_decoder().values()}
        wanted = present | {token.content: token for token in self.listed}
        for name in self.named.values():
            token = copy(wanted.get(name.content, name))
            token.special = True
            wanted[name.content] = token
        for token in self.others:
            wanted.setdefault(token.content, token)
        # the library takes time for each call, and some models have thousands of added tokens that
        # it knows already
        backend.add_tokens([token for text, token in wanted.items() if repr(token) != repr(present.get(text))])


def _object(data: bytes | None) -> dict[str, Any]:
    return {} if data is None else msgspec.json.decode(data, type=dict[str, Any])


def _token(value: str | dict[str, Any], special: bool = True) -> tokenizers.AddedToken:
    """Return a token from the form it has in the files: its text, or a table of what AddedToken
    takes."""
    if isinstance(value, str):
        return tokenizers.AddedToken(value, special=special, normalized=False)
    flags = {name: bool(value.get(name)) for name in ("single_word", "lstrip", "rstrip", "normalized")}
    return tokenizers.AddedToken(value["content"], special=special, **flags)


def _template(data: bytes | None, said: Any) -> str | None:
    """Return the template that is a file of its own, else the one in the settings, where there may
    be several by name."""
    if data is not None:
        return data.decode()
    if isinstance(said, list):
        said = {each["name"]: each["template"] for each in said}.get("default")
    return None if said is None else str(said)
