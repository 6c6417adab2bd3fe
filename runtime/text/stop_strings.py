"""Stop strings over a stream of text."""

import re
import secrets
from collections.abc import Sequence, Set
from typing import Final

from zrt.runtime.errors import ZrtError
from zrt.runtime.text.detokenizer import NamedTokens
from zrt.runtime.text.tokenizer import Tokenizer

MARKS: Final = range(0xD800, 0xE000)
"""The code points that stand for tokens without text: halves of UTF-16 pairs, which no text has."""
PLACES: Final = 0xF_0000
"""The first of the characters (of a private-use area) that number such tokens in a decoder."""


class StopMatcher:
    """A filter that lets text through up to the first stop string, and holds back what could be the
    beginning of one.

    The first stop to be complete ends the text, as the answer ends there; of two complete at the
    same character, the longer. So the outcome depends on the text alone, not on the pieces it comes
    in.

    Special tokens have no text that is shown, but a stop string may name them: they count by their
    names for the stop strings that do, and are not there for the others.
    """

    def __init__(
        self, stops: Sequence[str], tokenizer: Tokenizer | None = None, hidden: Set[int] = frozenset()
    ) -> None:
        """Take the stop strings; special tokens, and `hidden` ones, have no text. ZrtError
        bad_request: one is empty, and would be found everywhere; or they name too many tokens."""
        if not all(stops):
            raise ZrtError("bad_request", "a stop string is empty")
        self._plain = _Search(stops)
        self._spelled: _Spelled | None = None
        if stops and tokenizer is not None:
            named = _named(stops, tokenizer, hidden)
            if any(name != stop for stop, names in named.items() for name in names):
                self._spelled = _Spelled(named, tokenizer, hidden)
        self._held = ""
        self._shown = 0
        self.matched: str | None = None
        """The stop string that ended the text."""

    def push(self, piece: str, token: int | None = None, *, look: bool = True) -> str:
        """Add text, with the token it came with (None: the end), and return what surely stands
        before any stop string; after a match, always an empty text. Without `look` no stop string
        is looked for in this piece."""
        if self.matched is not None:
            return ""
        if not look:
            if self._spelled is not None:
                self._spelled.text_of(token)
            return piece
        self._held += piece
        searches = [self._plain.push(piece)]
        if self._spelled is not None:
            searches.append(self._spelled.push(token, piece))
        matches = [search for search in searches if search[1] is not None]
        end, self.matched = min(matches or searches, key=lambda search: search[0])
        cut = max(0, end - self._shown)
        shown = self._held[:cut]
        self._held = self._held[cut:] if self.matched is None else ""
        self._shown += len(shown)
        return shown

    def finish(self) -> str:
        """Return the text held back, now that no more comes."""
        held, self._held = self._held, ""
        return held


def stop_tokens(stops: Sequence[str], tokenizer: Tokenizer, hidden: Set[int]) -> frozenset[int]:
    """Return the tokens without text, special or `hidden`, that are stop strings by themselves."""
    found = {tokenizer.backend.token_to_id(stop) for stop in stops}
    return frozenset(token for token in found if token is not None and token in tokenizer.special_ids | hidden)


def _named(stops: Sequence[str], tokenizer: Tokenizer, hidden: Set[int]) -> dict[str, list[str]]:
    """Return for each stop string the tokens without text that it names, the longest names first:
    one may be a part of another."""
    names = {name for token in tokenizer.special_ids | hidden if (name := tokenizer.backend.id_to_token(token))}
    return {stop: sorted((name for name in names if name in stop), key=len, reverse=True) for stop in stops}


class _Search:
    """The search for stop strings in a growing text."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self._safe = 0

    def push(self, piece: str) -> tuple[int, str | None]:
        """Add text, and return how many characters of all text surely stand before any stop string,
        and the stop string that follows them. Not to be called after that."""
        text, matched = self._held + piece, None
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            _, end, matched = min(found)
        else:
            end = self._beginning(text)
        self._held = text[end:]
        self._safe += end
        return self._safe, matched

    def _beginning(self, text: str) -> int:
        """Return where the longest end of `text` starts that is the beginning of a stop string; the
        length of `text` if there is none."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stops):
                return start
        return len(text)


class _Spelled:
    """The search for stop strings that name tokens without text, in a text where a mark, one
    character each, stands for every such token."""

    def __init__(self, named: dict[str, list[str]], tokenizer: Tokenizer, hidden: Set[int]) -> None:
        self._backend = tokenizer.backend
        self._silent = tokenizer.special_ids | hidden
        every = sorted({name for names in named.values() for name in names})
        if len(every) >= len(MARKS):
            raise ZrtError("bad_request", f"the stop strings name {len(every)} special tokens: {len(MARKS) - 1} may be")
        self._places = {name: place for place, name in enumerate(every, start=1)}
        # a decoder takes no code points that are no characters, so it is given a token that it
        # leaves as it is, and that nobody can guess
        self._nonce = "".join(chr(0xE000 + secrets.randbelow(0x1000)) for _ in range(16))
        numbered = re.compile(f"{self._nonce}(.)")
        self._text = NamedTokens(tokenizer, lambda text: numbered.sub(_mark, text))
        self._stops: dict[str, str] = {}
        for stop, names in named.items():
            marked = stop
            for name in names:
                marked = marked.replace(name, chr(MARKS[self._places[name]]))
            if marked != stop:
                self._stops[marked] = stop
        self._search = _Search(list(self._stops))
        self._visible: list[bool] = []
        self._taken = 0
        self._safe = 0

    def text_of(self, token: int | None) -> str:
        """Take the next token (None: the end), and return the text with marks that it settles."""
        if token is None:
            return self._text.finish()
        name = self._backend.id_to_token(token)
        if name is None:
            return ""
        if token in self._silent:
            name = self._nonce + chr(PLACES + self._places.get(name, 0))
        return self._text.push(name)

    def push(self, token: int | None, shown: str) -> tuple[int, str | None]:
        """Take the next token, with the text that is shown for it, and return the same as _Search,
        in characters of the text that is shown."""
        piece = self.text_of(token)
        visible = [ord(character) not in MARKS for character in piece]
        if piece[:1] == " " and (piece == f" {shown}" or visible[1:] == [False]):
            visible[0] = False  # it is between two tokens one of which is not shown
        self._visible += visible
        safe, matched = self._search.push(piece)
        settled = safe - self._taken
        self._safe += sum(self._visible[:settled])
        del self._visible[:settled]
        self._taken = safe
        return self._safe, None if matched is None else self._stops[matched]


def _mark(numbered: re.Match[str]) -> str:
    return chr(MARKS[ord(numbered[1]) - PLACES])
