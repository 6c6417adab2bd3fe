"""Token ids to text, one by one: what `Tokenizer.decode` would return for all of them, in pieces
that are never taken back.

There are two ways, chosen by the tokenizer's decoder. Byte-level vocabularies (GPT-2's and most
since) map each token to bytes, so an incremental UTF-8 decoder returns the same as decoding all at
once. For all others a window of the last tokens is decoded with and without the new one, and the
difference is the piece; there, a run of byte-fallback tokens such as `<0xE4>` is held back until
another token ends it, since the tokenizers library judges a run as a whole: one wrong byte turns
all its characters into U+FFFD.
"""

import codecs
import json
import re
from collections.abc import Sequence, Set
from typing import Any, Final, Protocol

from zrt.runtime.text.byte_alphabet import BYTE_OF
from zrt.runtime.text.tokenizer import Tokenizer, clean_up

WINDOW: Final = 8
"""The number of visible tokens that give a new one its context. One would do for the known
decoders, whose rules look at the first token (leading space) or at the one before; more keep that
first-token rule away from tokens that are empty or blank."""

UNFINISHED: Final = 3
"""The most tokens of an unfinished character: one less than the bytes of the longest character."""

BYTE_TOKEN: Final = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Detokenizer:
    """The text of one session's tokens. Special tokens, `hidden` ones, and ids outside of the
    vocabulary have no text.

    A prompt may end inside a character (given as token ids): if the first tokens complete it, their
    text begins with that character.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), hidden: Set[int] = frozenset()) -> None:
        backend = tokenizer.backend
        decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
        self._backend = backend
        self._silent = tokenizer.special_ids | hidden
        self._pieces: _Pieces = _Bytes() if decoder.get("type") == "ByteLevel" else _Window(backend, decoder)
        self._clean = CleanUp() if tokenizer.cleans_up else None
        spoken = [token for token in prompt[-UNFINISHED:] if token not in self._silent]
        self._pieces.begin([(token, name) for token in spoken if (name := backend.id_to_token(token)) is not None])

    def push(self, token: int) -> str:
        """Add one id and return the text that it settles, often empty."""
        if token in self._silent or (name := self._backend.id_to_token(token)) is None:
            return ""
        piece = self._pieces.push(token, name)
        return piece if self._clean is None else self._clean.push(piece)

    def finish(self) -> str:
        """Return the text held back, an unfinished character as U+FFFD. Call it once, after the
        last token."""
        piece = self._pieces.finish()
        return piece if self._clean is None else self._clean.push(piece) + self._clean.finish()


class _Pieces(Protocol):
    def begin(self, prompt: Sequence[tuple[int, str]]) -> None:
        """Start after the tokens of a prompt, of whose text only an unfinished character
        matters."""

    def push(self, token: int, name: str) -> str: ...
    def finish(self) -> str: ...


class _Bytes:
    """The text of byte-level tokens. A token with a character that stands for no byte (added tokens
    have such) is text as it is."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def begin(self, prompt: Sequence[tuple[int, str]]) -> None:
        for token, name in prompt:
            self.push(token, name)

    def push(self, token: int, name: str) -> str:
        try:
            data = bytes(map(BYTE_OF.__getitem__, name))
        except KeyError:
            data = name.encode()
        return self._utf8.decode(data)

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _Window:
    """The text of tokens under any other decoder: the difference that a token makes to the decoded
    window."""

    def __init__(self, backend: Any, decoder: dict[str, Any]) -> None:
        self._backend = backend
        steps = decoder.get("decoders", [decoder])
        self._byte_fallback = any(step.get("type") == "ByteFallback" for step in steps)
        self._context: list[int] = []
        self._held: list[int] = []

    def begin(self, prompt: Sequence[tuple[int, str]]) -> None:
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        for _, name in prompt if self._byte_fallback else ():
            utf8.decode(bytes([int(name[3:5], 16)]) if BYTE_TOKEN.fullmatch(name) else b" ")
        unfinished = len(utf8.getstate()[0])
        self._held = [token for token, _ in prompt[len(prompt) - unfinished :]]

    def push(self, token: int, name: str) -> str:
        self._held.append(token)
        if self._byte_fallback and BYTE_TOKEN.fullmatch(name):
            return ""
        return self.finish()

    def finish(self) -> str:
        """Return what the held tokens add; the last of them, or the end, closes a run of bytes."""
        window = self._context + self._held
        before, whole = self._backend.decode(self._context), self._backend.decode(window)
        self._context, self._held = window[-WINDOW:], []
        return str(whole[len(before) :])


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
