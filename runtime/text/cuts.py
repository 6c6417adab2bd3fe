"""Long texts in pieces whose ids, one after the other, are those of the whole text.

A cut stands between an ASCII letter and a single space that another ASCII letter follows. The
byte-level tokenizers of GPT-2's kind split a text into words by a pattern that is matched from left
to right, and no word of theirs goes on over such a space; so what stands before the cut is split as
if the text ended there, and what follows as if it began. Where a tokenizer is of another kind, or
a text has no such place, the text stays whole.
"""

import re
from collections.abc import Iterator
from typing import Any, Final

import tokenizers
from tokenizers import models

from zrt.runtime.text.tokenizer_parts import steps

PIECE: Final = 1 << 16
"""Characters after which a piece ends at the next place where it may."""

CUT: Final = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])")

PROBE: Final = "One two THREE four-five six seven eight NINE Ten eleven x y z"
"""A text that a pattern with longer words would not split at every cut."""


class Cuts:
    """The places where one tokenizer's texts may be cut, if there are any. `around` is what the
    tokenizer adds before and after the ids of a whole text, where it is told to."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self.around = _around(backend)
        self._cuttable = _cuttable(backend)

    def pieces(self, text: str) -> Iterator[str]:
        """Yield `text` in pieces of about PIECE characters, or more where it cannot be cut."""
        start = 0
        while self._cuttable and len(text) - start > PIECE:
            cut = CUT.search(text, start + PIECE)
            if cut is None:
                break
            yield text[start : cut.start()]
            start = cut.start()
        yield text[start:] if start else text


def _cuttable(backend: tokenizers.Tokenizer) -> bool:
    model = backend.model
    if not isinstance(model, models.BPE) or model.dropout:
        return False
    if any(step["type"] != "NFC" for step in steps(backend.normalizer)):
        return False
    splits = steps(backend.pre_tokenizer)
    if not splits or not all(_splits(step) for step in splits) or splits[-1]["type"] != "ByteLevel":
        return False
    if any(_spans_cut(token.content) for token in backend.get_added_tokens_decoder().values()):
        return False
    # the pattern itself may be any: see that it does split at each cut, whatever stands around
    ends = {end for _, (_, end) in backend.pre_tokenizer.pre_tokenize_str(PROBE)}
    return all(match.start() in ends for match in CUT.finditer(PROBE))


def _around(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    bare, whole = (backend.encode(PROBE, add_special_tokens=special).ids for special in (False, True))
    start = next(n for n in range(len(whole) - len(bare) + 1) if whole[n : n + len(bare)] == bare)
    return whole[:start], whole[start + len(bare) :]


def _splits(step: dict[str, Any]) -> bool:
    """Return whether a pre-tokenizer splits by a pattern, keeps everything and adds nothing."""
    if step["type"] == "Split":
        return step["behavior"] != "Removed" and "Regex" in step["pattern"]
    return step["type"] == "Digits" or (step["type"] == "ByteLevel" and not step["add_prefix_space"])


def _spans_cut(token: str) -> bool:
    """Return whether an added token may lie over a cut, or take the space after it: those whose
    first or last character is a letter or a blank, and those with a cut inside."""
    return CUT.search(token) is not None or any(
        not end or end.isspace() or end.isalpha() for end in (token[:1], token[-1:])
    )
