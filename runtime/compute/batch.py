"""A ragged batch: steps of several sessions, their rows one after the other."""

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Step:
    """The forward of tokens `[seq_pos, seq_pos + n)` of one session. On the last stage `logits` asks for those of its last token."""

    key: Hashable
    seq_pos: int
    n: int
    logits: bool = True
