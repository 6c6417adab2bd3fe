"""The least number of tokens that a text can have, from its length alone: a hopeless one is refused
without being tokenised.

No token stands for more bytes than the longest in the vocabulary, so a text has at least its bytes
over that many. This holds where a tokenizer keeps every byte and joins no unknown ones; for any
other, nothing can be said.
"""

import re
from typing import Any, Final

import tokenizers
from tokenizers import models

from zrt.runtime.text.tokenizer_parts import BYTE_OF, steps

SHRINKS: Final = {"NFC": 3, "NFD": 4, "NFKC": 4, "NFKD": 4, "Lowercase": 3, "Prepend": 1, "ByteLevel": 1}
"""The most bytes of a text (UTF-8) that each normalizer makes one byte of: Hangul and full-width
forms, the Kelvin sign, mathematical letters."""

KEEPS: Final = frozenset({"ByteLevel", "Metaspace", "Digits", "Split", "Punctuation"})
"""The pre-tokenizers that drop nothing, unless they are told to remove what they find."""

NEVER: Final = frozenset({0xC0, 0xC1, *range(0xF5, 0x100)})
"""The bytes that no UTF-8 text has."""

SPACES: Final = re.compile(r"\s+")


class LeastTokens:
    """The bound for one tokenizer. `bytes_per_token` is how many bytes of a text one token stands
    for at most; None where there is no such number."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        changes, cuts = steps(backend.normalizer), steps(backend.pre_tokenizer)
        added = backend.get_added_tokens_decoder().values()
        vocabulary = backend.get_vocab()
        bytelevel = any(step["type"] == "ByteLevel" for step in [*changes, *cuts])
        lost = _lost_bytes(backend.model, vocabulary, bytelevel=bytelevel)
        shrinks = _shrinks(changes)
        keeps = all(step["type"] in KEEPS and step.get("behavior") != "Removed" for step in cuts)
        self._strips = any(token.lstrip or token.rstrip for token in added)
        self._lost = lost or b""
        self.bytes_per_token: int | None = None
        if lost is not None and keeps and shrinks is not None and (not lost or not changes):
            # a byte-level token has a character a byte; any other, and an added one, is its text
            own = (len(token) if bytelevel else len(token.encode()) for token in vocabulary)
            self.bytes_per_token = shrinks * max(*own, *(len(token.content.encode()) for token in added), 1)

    def of(self, text: str) -> int:
        """Return how many tokens `text` has at least; 0 where nothing is known."""
        if self.bytes_per_token is None:
            return 0
        if self._strips:  # such a token takes all the blanks beside it
            text = SPACES.sub("", text)
        data = text.encode(errors="replace")
        return -(-len(data.translate(None, self._lost)) // self.bytes_per_token)


def _shrinks(changes: list[dict[str, Any]]) -> int | None:
    """Return how many bytes these normalizers make one of at most; None if they may drop any
    number."""
    shrinks = 1
    for step in changes:
        factor = SHRINKS.get(step["type"])
        if step["type"] == "Replace":
            old, new = step["pattern"].get("String"), step["content"]
            factor = -(-len(old.encode()) // len(new.encode())) if old and new else None
        if factor is None:
            return None
        shrinks *= factor
    return shrinks


def _lost_bytes(model: Any, vocabulary: dict[str, int], *, bytelevel: bool) -> bytes | None:
    """Return the bytes of texts that a model drops since its vocabulary lacks them; None if it may
    join unknown characters to one token, or drop others."""
    if bytelevel:
        if not isinstance(model, models.BPE) or model.unk_token is not None:
            return None
        return bytes(byte for char, byte in BYTE_OF.items() if char not in vocabulary and byte not in NEVER)
    if not getattr(model, "byte_fallback", False):
        return None
    return b"" if all(f"<0x{byte:02X}>" in vocabulary for byte in range(256) if byte not in NEVER) else None
