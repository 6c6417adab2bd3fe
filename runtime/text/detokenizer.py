"""Token ids to text, one by one: what `Tokenizer.decode` would return for all of them, in pieces
that are never taken back."""

import re
from collections.abc import Callable, Sequence, Set
from typing import Final

from zrt.runtime.text.token_decoders import TokenDecoder
from zrt.runtime.text.tokenizer import Tokenizer, clean_up

UNFINISHED: Final = 3
"""The most tokens of an unfinished character: one less than the bytes of the longest character."""


class NamedTokens:
    """The text of tokens given as their names in the vocabulary, in pieces that are never taken
    back."""

    def __init__(self, tokenizer: Tokenizer, change: Callable[[str], str] = str) -> None:
        """Take a tokenizer; `change` is made to what its decoder writes, before it is cleaned
        up."""
        self._decoder = TokenDecoder(tokenizer.decoder_steps)
        self._change = change
        self._clean = CleanUp() if tokenizer.cleans_up else None

    def begin(self, names: Sequence[str]) -> None:
        """Start after the last tokens of a prompt, of whose text only an unfinished character
        matters."""
        self._decoder.begin(names)

    def push(self, name: str) -> str:
        """Add a token, and return the text that it settles."""
        piece = self._change(self._decoder.push(name))
        return piece if self._clean is None else self._clean.push(piece)

    def finish(self) -> str:
        """Return the text held back. Call it once, after the last token."""
        piece = self._change(self._decoder.finish())
        return piece if self._clean is None else self._clean.push(piece) + self._clean.finish()


class Detokenizer:
    """The text of one session's tokens. Special tokens, `hidden` ones, and ids outside of the
    vocabulary have no text.

    A prompt may end inside a character (given as token ids): if the first tokens complete it, their
    text begins with that character.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), hidden: Set[int] = frozenset()) -> None:
        self._backend = tokenizer.backend
        self._silent = tokenizer.special_ids | hidden
        self._text = NamedTokens(tokenizer)
        spoken = [token for token in prompt[-UNFINISHED:] if token not in self._silent]
        self._text.begin([name for token in spoken if (name := self._backend.id_to_token(token)) is not None])

    def push(self, token: int) -> str:
        """Add one id and return the text that it settles, often empty."""
        if token in self._silent or (name := self._backend.id_to_token(token)) is None:
            return ""
        return self._text.push(name)

    def finish(self) -> str:
        """Return the text held back, an unfinished character as U+FFFD. Call it once, after the
        last token."""
        return self._text.finish()


class CleanUp:
    """The clean_up_tokenization of transformers over a stream of text.

    The clean-up removes spaces only, in patterns that begin with a space and have four characters
    at most, so no pattern spans a cut after four characters that are no spaces. A cut right before
    a space is spanned in two ways: after ` '`, where that space may be the rest of ` ' `; and where
    ` ' ` may take that space away, so that what follows is the `'` of ` n't` or ` 'm`. Of several
    spaces, the last two alone can be in a pattern.
    """

    CUT: Final = re.compile(r"(?<=[^ ]{4})|(?<! ')(?:(?= [^ '])|(?<! n)(?:(?<! )(?= )|(?=  )))")

    def __init__(self) -> None:
        self._held = ""

    def push(self, piece: str) -> str:
        self._held += piece
        cut = max((match.start() for match in self.CUT.finditer(self._held)), default=0)
        settled, self._held = self._held[:cut], self._held[cut:]
        return clean_up(settled)

    def finish(self) -> str:
        settled, self._held = self._held, ""
        return clean_up(settled)
