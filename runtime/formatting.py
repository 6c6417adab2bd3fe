"""Amounts and ranges in words, and text from elsewhere fit to be shown."""

import unicodedata
from typing import Final

_JOINERS: Final = "\u200c\u200d"
"""Characters that scripts and emoji need, but whose width in a table is another for each
terminal."""


def escaped(text: str, *, breaks: bool = False) -> str:
    """Return text from elsewhere (names, paths, messages) as one line fit for a table or a
    terminal: characters that control something are written as escapes, such as "\\n" and
    "\\x1b". With `breaks` it is running text: line breaks stay, and a tab becomes blanks."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else _escape(one, breaks) for one in text)


def _escape(one: str, breaks: bool) -> str:
    if unicodedata.category(one) == "Zs" or (breaks and one in _JOINERS):
        return one
    if breaks and one in "\n\t":
        return one.replace("\t", "    ")
    return one.encode("unicode_escape").decode()


def counted(number: int, noun: str) -> str:
    """Return the number and its noun, whose plural ends in "s": "1 session", "3 sessions"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def block_range(first: int, last: int) -> str:
    """Return blocks first..last, both included, as people write them: "0-14"."""
    return f"{first}-{last}"


def byte_size(count: int) -> str:
    """Return a number of bytes for people: "310.6 MiB"."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
