"""Names of special tokens that a user writes, as plain text.

A tokenizer makes a special token of its name wherever it stands, as transformers does. A chat whose
users are not trusted wants otherwise: the template's own special tokens, and none by a message.
"""

import re
import secrets
from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate
from typing import Final

import tokenizers

MARKS: Final = 0xF_0000
"""The first of the characters (of a private-use area) that number names in a masked chat."""


class LiteralSpecials:
    """An encoder for which the names of special tokens are text.

    It has a copy of the tokenizer, which takes as long to make as the file takes to load.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special: Mapping[str, int]) -> None:
        """Take a tokenizer, and the ids of its special tokens by their names."""
        self._backend = backend
        self._special = special
        self._literal = tokenizers.Tokenizer.from_str(backend.to_str())
        self._literal.encode_special_tokens = True
        # of characters that no text has by accident, and nobody can guess
        self._nonce = "".join(chr(0xE000 + secrets.randbelow(0x1000)) for _ in range(16))
        self._mark = re.compile(f"{re.escape(self._nonce)}(.)")
        self._literal.add_tokens([tokenizers.AddedToken(self._nonce, special=False, normalized=False)])
        self._barrier = self._literal.token_to_id(self._nonce)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, with the special tokens that the tokenizer adds to any."""
        return self._ids(text, add_special_tokens=True)

    def masked(self, content: str, marks: dict[str, str]) -> str:
        """Return a text that a template is given with a mark in the place of each special token's
        name; `marks`, the mark of each name, grows."""
        (encoding,) = self._backend.encode_batch([content], add_special_tokens=False)
        special = frozenset(self._special.values())
        parts, done = [], 0
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token in special and start >= done:
                name = content[start:end].strip()
                start = content.index(name, start)
                mark = marks.setdefault(name, f"{self._nonce}{chr(MARKS + len(marks))}")
                parts += [content[done:start], mark]
                done = start + len(name)
        return "".join([*parts, content[done:]])

    def encode_masked(self, text: str, marks: Mapping[str, str]) -> list[int]:
        """Return the ids of a text with marks: the names that they stand for are text, and other
        names of special tokens are those tokens."""
        names = {mark[-1]: name for name, mark in marks.items()}
        pieces = self._mark.split(text)  # text, the last character of a mark, text, …
        text = "".join(pieces)
        ends = list(accumulate(map(len, pieces)))[1::2]
        (encoding,) = self._backend.encode_batch([text], add_special_tokens=False)
        ids: list[int] = []
        done = 0

        def part(end: int) -> list[int]:
            """Return the ids of the text from `done` on, as it stands in the whole: a vocabulary
            may write the beginning of a text in another way."""
            literal, start = [self._nonce] if done else [], done
            for place in ends[bisect_right(ends, done) : bisect_right(ends, end)]:
                literal += [text[start : place - 1], names.get(text[place - 1], "")]
                start = place
            return self._ids("".join([*literal, text[start:end]])) if done < end else []

        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if self._special.get(text[start:end].strip()) == token:
                ids += [*part(start), token]
                done = end
        return ids + part(len(text))

    def _ids(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of a text without special tokens. A vocabulary may hold their names as
        words; such a word is taken apart after its first character."""
        (encoding,) = self._literal.encode_batch([text], add_special_tokens=add_special_tokens)
        words = zip(encoding.ids, encoding.offsets, strict=True)
        if any(self._special.get(text[start:end].strip()) == token for token, (start, end) in words):
            for name in self._special:
                text = text.replace(name, f"{name[0]}{self._nonce}{name[1:]}")
            (encoding,) = self._literal.encode_batch([text], add_special_tokens=add_special_tokens)
        return [token for token in encoding.ids if token != self._barrier]
