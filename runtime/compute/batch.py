"""A ragged batch: steps of several sessions, their rows one after the other."""

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Step:
    """The forward of tokens `[seq_pos, seq_pos + n)` of one session. On the last stage `logits` asks for those of its last token.

    `rope_length` is the session's `ModelSpec.rope_length`; 0 fits a session that began with no more tokens than its model's rope was made for.
    """

    key: Hashable
    seq_pos: int
    n: int
    logits: bool = True
    rope_length: int = 0


def session_name(key: Hashable) -> str:
    """A session as people are shown it: those that a coordinator counts in 16 hexadecimal digits, those of bare peers as they are kept."""
    return f"{key:016x}" if isinstance(key, int) else repr(key)
