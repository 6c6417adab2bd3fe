"""Tokens to text as the decoder of a tokenizer.json says, one token at a time.

A decoder is a chain of steps, each of which turns tokens into tokens; at the end all are joined. A
step here takes the same tokens in fragments, and hands on what no later token can change, so that
the fragments joined are what the tokenizers library makes of all tokens at once. Its own
DecodeStream (0.23) is not that: it has no end, so that an unfinished character is lost there, and
it decodes anew, and longer each time, while the text ends with a U+FFFD that the model itself
wrote.

After a step that joins all tokens (Fuse, ByteLevel), whose one token ends with the answer, the
steps that need a whole token (WordPiece, CTC, BPEDecoder, a Replace of a regular expression) give
their text at the end.
"""

import codecs
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Final

import tokenizers
from tokenizers import decoders

from zrt.runtime.text.tokenizer_parts import BYTE_OF, steps

Fragment = tuple[str, bool]
"""A part of a token, and whether the token ends with it."""

BYTE_TOKEN: Final = re.compile(r"<0x[+0-9A-Fa-f][0-9A-Fa-f]>")
"""A token that byte fallback takes for a byte: the library reads the digits as Rust does, with a
sign."""


class TokenDecoder:
    """The text of one answer's tokens, given as their names in the vocabulary, in pieces that are
    never taken back."""

    def __init__(self, described: Sequence[dict[str, Any]]) -> None:
        """Take what `decoder_steps` returned. ValueError: a step is of no known type."""
        self._described = described
        self._steps = [_made(each) for each in described]

    def begin(self, names: Iterable[str]) -> None:
        """Start after the last tokens of a prompt, of whose text only an unfinished character
        matters."""
        for place, step in enumerate(self._steps):
            if isinstance(step, _ByteLevelStep | _ByteFallbackStep):
                before = [_made(each) for each in self._described[:place]]
                given = _through(before, [(name, True) for name in names])
                step.begin([text for text, ends in given if ends])
                return

    def push(self, name: str) -> str:
        """Add a token, and return the text that it settles."""
        return "".join(text for text, _ in _through(self._steps, [(name, True)]))

    def finish(self) -> str:
        """Return the text held back. Call it once, after the last token."""
        fragments: list[Fragment] = []
        for step in self._steps:
            fragments = [*_through([step], fragments), *step.finish()]
        return "".join(text for text, _ in fragments)


def decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """Return the steps of a tokenizer's decoder as its file describes them. Tokens of a tokenizer
    without a decoder are joined by spaces."""
    return steps(backend.decoder) if backend.decoder is not None else [{"type": "Spaces"}]


def _through(chain: Sequence["_DecoderStep"], fragments: list[Fragment]) -> list[Fragment]:
    for step in chain:
        fragments = [made for text, ends in fragments for made in step.push(text, ends)]
    return fragments


class _DecoderStep(ABC):
    """Base of the steps: takes tokens, in order and each in one or more fragments."""

    @abstractmethod
    def push(self, text: str, ends: bool) -> list[Fragment]:
        """Take a fragment, and return the fragments that nothing to come can change."""

    def finish(self) -> list[Fragment]:
        """Return the fragments held back, after the last token."""
        return []


class _WholeTokens(_DecoderStep):
    """Base of the steps that see a token only when it has ended."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    def push(self, text: str, ends: bool) -> list[Fragment]:
        self._parts.append(text)
        if not ends:
            return []
        token = "".join(self._parts)
        self._parts.clear()
        return self.take(token)

    @abstractmethod
    def take(self, token: str) -> list[Fragment]:
        """Take a whole token, as `push` does a fragment."""


class _Spaces(_DecoderStep):
    """No decoder: a space between two tokens."""

    def __init__(self) -> None:
        self._between = ""

    def push(self, text: str, ends: bool) -> list[Fragment]:
        between, self._between = self._between, " " if ends else ""
        return [(between + text, ends)]


class _FuseStep(_DecoderStep):
    """All tokens as one."""

    def push(self, text: str, ends: bool) -> list[Fragment]:
        return [(text, False)]

    def finish(self) -> list[Fragment]:
        return [("", True)]


class _ByteLevelStep(_WholeTokens):
    """All tokens as one, their characters read as the bytes they stand for. A token with a
    character that stands for no byte (added tokens have such) is text as it is."""

    def __init__(self) -> None:
        super().__init__()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def begin(self, tokens: Iterable[str]) -> None:
        for token in tokens:
            self.take(token)

    def take(self, token: str) -> list[Fragment]:
        try:
            data = bytes(map(BYTE_OF.__getitem__, token))
        except KeyError:
            data = token.encode()
        text = self._utf8.decode(data)
        return [(text, False)] if text else []

    def finish(self) -> list[Fragment]:
        return [(self._utf8.decode(b"", final=True), True)]


class _ByteFallbackStep(_DecoderStep):
    """Runs of byte tokens such as `<0xE4>` as the characters that they spell. A run is judged as a
    whole, as the library does: one wrong byte turns each of its bytes into U+FFFD; so its text
    comes when another token, or the end, closes it."""

    LENGTH: Final = 6
    """The characters of a byte token."""

    def __init__(self) -> None:
        self._run = bytearray()
        self._held = ""
        self._longer = False

    def begin(self, tokens: Sequence[str]) -> None:
        spelled = b"".join(bytes([_byte(token)]) if BYTE_TOKEN.fullmatch(token) else b" " for token in tokens)
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        utf8.decode(spelled)
        self._run += utf8.getstate()[0]

    def push(self, text: str, ends: bool) -> list[Fragment]:
        if self._longer:
            self._longer = not ends
            return [(text, ends)]
        token = self._held + text
        self._held = ""
        if ends and BYTE_TOKEN.fullmatch(token):
            self._run.append(_byte(token))
            return []
        if not ends and len(token) <= self.LENGTH:
            self._held = token
            return []
        self._longer = not ends
        return [*self.finish(), (token, ends)]

    def finish(self) -> list[Fragment]:
        run = bytes(self._run)
        self._run.clear()
        try:
            return [(run.decode(), True)] if run else []
        except UnicodeDecodeError:
            return [("\ufffd", True)] * len(run)


def _byte(token: str) -> int:
    return int(token[3:5], 16)


class _StripStep(_DecoderStep):
    """Tokens without up to `start` times `content` at their beginning, `stop` times at their
    end."""

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content = content
        self._start = start
        self._stop = stop
        self._left = start
        self._held = ""

    def push(self, text: str, ends: bool) -> list[Fragment]:
        while self._left and text:
            stripped = text.removeprefix(self._content)
            self._left = self._left - 1 if stripped != text else 0
            text = stripped
        text = self._held + text
        kept = text
        for _ in range(self._stop):
            kept = kept.removesuffix(self._content)
        self._held = "" if ends else text[len(kept) :]
        if ends:
            self._left = self._start
        return [(kept, ends)]


class _ReplaceStep(_DecoderStep):
    """Tokens in which one text takes another's place."""

    def __init__(self, old: str, new: str) -> None:
        self._old = old
        self._new = new
        self._held = ""

    def push(self, text: str, ends: bool) -> list[Fragment]:
        *settled, last = (self._held + text).split(self._old)
        cut = len(last)
        if not ends:
            starts = range(max(0, len(last) - len(self._old) + 1), len(last))
            cut = next((start for start in starts if self._old.startswith(last[start:])), len(last))
        self._held = last[cut:]
        return [(self._new.join([*settled, last[:cut]]), ends)]


class _MetaspaceStep(_DecoderStep):
    """Tokens with a space for each mark; the first one loses its marks, unless no space is ever
    prepended to a text."""

    def __init__(self, mark: str, prepended: bool) -> None:
        self._mark = mark
        self._space = "" if prepended else " "

    def push(self, text: str, ends: bool) -> list[Fragment]:
        text = text.replace(self._mark, self._space)
        if ends:
            self._space = " "
        return [(text, ends)]


class _RegexStep(_WholeTokens):
    """Tokens in which a text takes the place of what a regular expression matches."""

    def __init__(self, pattern: str, new: str) -> None:
        super().__init__()
        self._library = decoders.Replace(tokenizers.Regex(pattern), new)

    def take(self, token: str) -> list[Fragment]:
        return [(self._library.decode([token]), True)]


class _WordPieceStep(_WholeTokens):
    """Words, with a space before each but the first, and none before a piece that continues a
    word."""

    def __init__(self, prefix: str, cleanup: bool) -> None:
        super().__init__()
        self._library = decoders.WordPiece(prefix, cleanup)
        self._before: list[str] = []

    def take(self, token: str) -> list[Fragment]:
        text = self._library.decode([*self._before, token])
        self._before = [""]
        return [(text, True)]


class _CtcStep(_WholeTokens):
    """Tokens of which repeats and padding are dropped."""

    def __init__(self, pad: str, delimiter: str, cleanup: bool) -> None:
        super().__init__()
        self._library = decoders.CTC(pad, delimiter, cleanup)
        self._last: str | None = None

    def take(self, token: str) -> list[Fragment]:
        again, self._last = token == self._last, token
        text = "" if again else self._library.decode([token])
        return [(text, True)] if text else []


class _SuffixStep(_WholeTokens):
    """Tokens with a space for the suffix that ends a word; in the last one the suffix has no
    text, so a token with it waits for the next."""

    def __init__(self, suffix: str) -> None:
        super().__init__()
        self._suffix = suffix
        self._held: str | None = None

    def take(self, token: str) -> list[Fragment]:
        settled = self._settled(" ")
        if self._suffix in token:
            self._held = token
            return settled
        return [*settled, (token, True)]

    def finish(self) -> list[Fragment]:
        return self._settled("")

    def _settled(self, end: str) -> list[Fragment]:
        held, self._held = self._held, None
        return [] if held is None else [(held.replace(self._suffix, end), True)]


def _made(described: dict[str, Any]) -> _DecoderStep:
    match described:
        case {"type": "Spaces"}:
            return _Spaces()
        case {"type": "Fuse"}:
            return _FuseStep()
        case {"type": "ByteLevel"}:
            return _ByteLevelStep()
        case {"type": "ByteFallback"}:
            return _ByteFallbackStep()
        case {"type": "Strip", "content": content, "start": start, "stop": stop}:
            return _StripStep(content, start, stop)
        case {"type": "Replace", "pattern": {"String": old}, "content": new} if old:
            return _ReplaceStep(old, new)
        case {"type": "Replace", "pattern": pattern, "content": new}:
            return _RegexStep(pattern.get("Regex", ""), new)
        case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme}:
            return _MetaspaceStep(mark, scheme != "never")
        case {"type": "WordPiece", "prefix": prefix, "cleanup": cleanup}:
            return _WordPieceStep(prefix, cleanup)
        case {"type": "CTC", "pad_token": pad, "word_delimiter_token": delimiter, "cleanup": cleanup}:
            return _CtcStep(pad, delimiter, cleanup)
        case {"type": "BPEDecoder", "suffix": suffix}:
            return _SuffixStep(suffix)
        case _:
            raise ValueError(f"the decoder {described.get('type')} is not known")
