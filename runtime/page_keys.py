"""Keys of KV pages by the tokens they hold: equal keys mean equal tokens from the start of the
history. Pure.

A page's key is a hash of the model, the key of the page before it, and its own token ids, so one
key stands for the whole prefix.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from itertools import pairwise

from zrt.runtime.errors import ZrtError


def check_keys(keys: Sequence[int], most: int) -> None:
    """Raise ZrtError bad_request unless `keys` can be those of one history: all different, and at
    most `most`."""
    if len(keys) > most:
        raise ZrtError("bad_request", f"page_keys: {len(keys)} of a history that has at most {most} full pages")
    if len(set(keys)) != len(keys):
        raise ZrtError("bad_request", "page_keys: a key is there twice")


class PageKeys:
    """The keys of one growing history. `model` names everything that KV depends on besides the
    tokens."""

    def __init__(self, model: str, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._last = blake2b(model.encode(), digest_size=8).digest()
        self._keys: list[int] = []

    def of(self, tokens: "array[int]") -> list[int]:
        """Return the keys (64 bits) of the full pages of `tokens` (uint32), which begin with the
        tokens of the calls before."""
        ends = range(len(self._keys) * self._page_tokens, len(tokens) + 1, self._page_tokens)
        for start, stop in pairwise(ends):
            self._last = blake2b(self._last + tokens[start:stop].tobytes(), digest_size=8).digest()
            self._keys.append(int.from_bytes(self._last, "little"))
        return self._keys[: len(tokens) // self._page_tokens]
