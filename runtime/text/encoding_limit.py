"""The limit of a prompt that is being tokenised: a context, and whoever is told how far it is."""

from collections.abc import Callable
from typing import Final

from zrt.runtime.errors import ZrtError
from zrt.runtime.formatting import byte_size, counted


def too_long(tokens: str, context: int) -> ZrtError:
    """Return the error for a prompt of so many `tokens` (in words) that the context cannot hold."""
    text = f"the prompt has {tokens}, the context holds {context}: shorten it or raise [model] context"
    return ZrtError("context_exceeded", text)


class EncodingLimit:
    """The most tokens a prompt may come to: fewer than `context` (None: any number). `told(done,
    total)` is called with the characters tokenised so far, piece by piece of a long text."""

    def __init__(self, context: int | None = None, told: Callable[[int, int], None] | None = None) -> None:
        self._context = context
        self._told = told

    def begin(self, text: str, least: int, bytes_per_token: int | None) -> None:
        """Take a text of at least `least` tokens, before any is made. ZrtError context_exceeded: so
        many cannot fit."""
        if self._context is not None and least >= self._context:
            size = byte_size(len(text.encode(errors="replace")))
            why = f"at least {counted(least, 'token')} (it has {size}, and no token stands for more than {bytes_per_token} bytes)"
            raise too_long(why, self._context)

    def reached(self, tokens: int, done: int, total: int) -> None:
        """Note that `done` of `total` characters came to so many tokens. ZrtError context_exceeded:
        these are too many already, whatever follows."""
        if self._context is not None and tokens >= self._context:
            raise too_long(
                counted(tokens, "token") if done == total else f"more than {counted(tokens, 'token')}", self._context
            )
        if self._told is not None:
            self._told(done, total)


UNLIMITED: Final = EncodingLimit()
