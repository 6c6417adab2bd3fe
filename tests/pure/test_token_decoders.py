"""Every decoder that the tokenizers library has, alone and in sequences, says the same token by
token as the library does of all tokens at once."""

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, decoders, models
from tokenizers import Tokenizer as Backend

from zrt.runtime.text.detokenizer import Detokenizer
from zrt.runtime.text.token_decoders import TokenDecoder, decoder_steps
from zrt.runtime.text.tokenizer import Tokenizer
from zrt.runtime.text.tokenizer_files import TokenizerSettings

STEPS: dict[str, Callable[[], Any]] = {
    "ByteLevel": decoders.ByteLevel,
    "ByteFallback": decoders.ByteFallback,
    "Fuse": decoders.Fuse,
    "Strip": lambda: decoders.Strip(" ", 1, 0),
    "Strip-end": lambda: decoders.Strip(".", 1, 2),
    "Replace": lambda: decoders.Replace("▁", " "),
    "Replace-long": lambda: decoders.Replace("aab", "ab"),
    "Replace-bytes": lambda: decoders.Replace("he", "<0xC3>"),
    "Replace-regex": lambda: decoders.Replace(Regex("h+"), "é"),
    "Metaspace": decoders.Metaspace,
    "Metaspace-never": lambda: decoders.Metaspace(prepend_scheme="never"),
    "WordPiece": decoders.WordPiece,
    "WordPiece-plain": lambda: decoders.WordPiece(cleanup=False),
    "CTC": decoders.CTC,
    "BPEDecoder": decoders.BPEDecoder,
}
KNOWN = [
    ("Replace", "ByteFallback", "Fuse", "Strip"),
    ("Replace", "ByteFallback", "Fuse"),
    ("ByteLevel", "Strip", "Strip-end", "Replace-long"),
    ("ByteFallback", "Metaspace"),
    ("Replace-regex", "Fuse", "ByteLevel"),
    ("ByteFallback", "ByteLevel", "Fuse", "Replace"),
    ("WordPiece", "Fuse", "Strip"),
]
SHAPES: list[tuple[str, ...]] = [(), *((name,) for name in STEPS), *itertools.product(STEPS, repeat=2), *KNOWN]

NAMES = list(dict.fromkeys([
    *["h", "he", "hh", "▁he", "▁", "▁▁", "a", " a", "a ", "aab", "aa", "b", "é", "e\u0301", "日", "字", "👍", " ", "  ", ""],
    *["a</w>", "</w>", "b</w>c", "##a", "##", "<pad>", "|", "a|", "n't", " .", ".", ".."],
    *["Ã", "©", "ä½", "ł", "ðŁ", "ĳ", "į", "Ġ", "Ġhe"],
    *["<0xE4>", "<0xBD>", "<0xA0>", "<0xC3>", "<0xA9>", "<0xF0>", "<0x9F>", "<0x91>", "<0x8D>", "<0x+A>", "<0xZZ>"],
]))  # fmt: skip
"""Parts of emoji, ideographs and combined characters as every kind of vocabulary writes them."""


def backend_of(shape: Sequence[str]) -> Backend:
    backend = Backend(models.WordLevel({name: n for n, name in enumerate(NAMES)}, unk_token="a"))
    backend.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    if shape:
        steps = [STEPS[name]() for name in shape]
        backend.decoder = decoders.Sequence(steps) if len(steps) > 1 else steps[0]
    return backend


def tokenizer_of(shape: Sequence[str]) -> Tokenizer:
    return Tokenizer(backend_of(shape), TokenizerSettings({}, [], [], None, False), "test")


def whole(backend: Backend, ids: list[int]) -> str | None:
    """What the library says; None where it fails: its Strip does, on tokens shorter than what it
    strips."""
    try:
        return str(backend.decode(ids, skip_special_tokens=True))
    except BaseException as error:
        assert type(error).__name__ == "PanicException", error
        return None


def test_every_decoder_of_the_library_is_here() -> None:
    theirs = {name for name in dir(decoders) if name[0].isupper()} - {"Decoder", "DecodeStream", "Sequence"}
    assert {name.partition("-")[0] for name in STEPS} == theirs


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "+".join(shape) or "none")
def test_pieces_add_up_to_the_decoded_whole(shape: tuple[str, ...]) -> None:
    tokenizer, picks = tokenizer_of(shape), random.Random("+".join(shape))
    size, compared = len(NAMES) + 3, 0
    for turn in range(24):
        ids = [picks.randrange(size) for _ in range(picks.randint(1, 14))]
        expected = whole(tokenizer.backend, ids)
        if expected is None:
            continue
        prompt = [NAMES.index("a")] * (turn % 3)
        detokeniser = Detokenizer(tokenizer, prompt)
        assert "".join([*map(detokeniser.push, ids), detokeniser.finish()]) == expected
        compared += 1
    assert compared > 5


def held(step: object) -> int:
    """How many characters, bytes and tokens a step keeps."""
    return sum(
        len(value) + sum(map(len, value)) if isinstance(value, list) else len(value)
        for value in vars(step).values()
        if isinstance(value, str | list | bytearray)
    )


STREAMING = [(), *((name,) for name in STEPS), *KNOWN[:4], ("ByteLevel", "Replace", "Metaspace", "Strip")]


@pytest.mark.parametrize("shape", STREAMING, ids=lambda shape: "+".join(shape) or "none")
def test_what_is_kept_does_not_grow_with_the_answer_and_text_comes_early(shape: tuple[str, ...]) -> None:
    backend, picks = backend_of(shape), random.Random(0)
    decoder = TokenDecoder(decoder_steps(backend))
    names = [name for name in NAMES if not name.startswith("<0x") and name not in ("", "<pad>")]
    silent, before = 0, None
    for _ in range(2000):
        name = picks.choice([one for one in names if one != before])
        before = name
        silent = 0 if decoder.push(name) else silent + 1
        assert silent < 12, name
        assert sum(map(held, decoder._steps)) < 60


def test_a_step_that_is_not_known_is_told_at_once() -> None:
    with pytest.raises(ValueError, match="the decoder Reversed is not known"):
        TokenDecoder([{"type": "Reversed"}])
