"""Pieces of text add up to what the tokenizer says of all ids at once, and come as early as they
can."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel

from zrt.runtime.text.detokenizer import CleanUp, Detokenizer
from zrt.runtime.text.token_decoders import BYTE_TOKEN
from zrt.runtime.text.tokenizer import Tokenizer, clean_up

Folder = Callable[..., Path]
KINDS: list[tuple[str, dict[str, object]]] = [
    ("byte-level", {}),
    ("byte-level", {"clean_up_tokenization_spaces": True}),
    ("llama", {}),
    ("gemma", {}),
    ("metaspace", {}),
    ("metaspace", {"clean_up_tokenization_spaces": True}),
    ("words", {}),
    ("words", {"clean_up_tokenization_spaces": True}),
]


@functools.cache
def opened(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.open(folder)
    assert tokenizer is not None
    return tokenizer


def pieces_of(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    detokeniser = Detokenizer(tokenizer)
    return [*map(detokeniser.push, ids), detokeniser.finish()]


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind[0] + ("-clean" if kind[1] else ""))
def reference(request: pytest.FixtureRequest, tokenizer_folder: Folder) -> tuple[Tokenizer, Any]:
    from transformers import PreTrainedTokenizerFast

    kind, extra = request.param
    folder = tokenizer_folder(kind, **extra)
    return opened(folder), PreTrainedTokenizerFast.from_pretrained(str(folder))


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_pieces_add_up_to_the_decoded_whole(reference: tuple[Tokenizer, Any], data: st.DataObject) -> None:
    tokenizer, transformers = reference
    size = len(transformers)
    common = st.integers(max(0, size - 40), size + 2)  # pieces of text and ids outside of the vocabulary
    ids = data.draw(st.lists(common | st.integers(0, size), max_size=30))
    whole = transformers.decode(ids, skip_special_tokens=True)
    assert "".join(pieces_of(tokenizer, ids)) == whole == tokenizer.decode(ids)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from([*" .?!,'ntmsverx", " '", "'s", "  "]), max_size=24).map("".join), st.integers(1, 5))
def test_cleaning_up_a_stream_is_cleaning_up_the_whole(text: str, step: int) -> None:
    stream = CleanUp()
    pieces = [stream.push(text[n : n + step]) for n in range(0, len(text), step)]
    assert "".join([*pieces, stream.finish()]) == clean_up(text)


TEXTS = [
    "He said: hello, he.",
    " leading and trailing ",
    "naïve cafè — voilà",
    "漢字かな交じり文, 日本",
    "🏳️‍🌈👩‍👩‍👧‍👦🇫🇷🇩🇪 ok",
    "ẹ̀kọ́ नमस्ते ไทย",
    "line\n\n\tindented  twice",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["byte-level", "gemma"])
def test_no_piece_holds_half_a_character(tokenizer_folder: Folder, kind: str, text: str) -> None:
    tokenizer = opened(tokenizer_folder(kind))
    pieces = pieces_of(tokenizer, tokenizer.encode_raw(text))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_comes_with_its_last_byte(tokenizer_folder: Folder) -> None:
    tokenizer = opened(tokenizer_folder("byte-level"))
    backend = tokenizer.backend
    ids = [backend.token_to_id(token) for token in ("h", "ä½", "ł", "e")]  # 你 = E4 BD A0
    assert pieces_of(tokenizer, ids) == ["h", "", "你", "e", ""]


def test_an_unfinished_character_comes_at_the_end(tokenizer_folder: Folder) -> None:
    tokenizer = opened(tokenizer_folder("byte-level"))
    assert pieces_of(tokenizer, [tokenizer.backend.token_to_id("ä½")]) == ["", "\ufffd"]


def test_special_tokens_inside_a_character_do_not_break_it(tokenizer_folder: Folder) -> None:
    tokenizer = opened(tokenizer_folder("byte-level"))
    backend = tokenizer.backend
    assert pieces_of(tokenizer, [backend.token_to_id(token) for token in ("ä½", "</s>", "ł")]) == ["", "", "你", ""]


def test_a_run_of_byte_tokens_comes_when_it_ends(tokenizer_folder: Folder) -> None:
    tokenizer = opened(tokenizer_folder("gemma"))
    names = ("a", "<0xE4>", "<0xBD>", "<0xA0>", "b", "<0xC3>", "<0xA9>")
    ids = [tokenizer.backend.token_to_id(name) for name in names]
    assert pieces_of(tokenizer, ids) == ["a", "", "", "", "你b", "", "", "é"]


def test_the_first_token_loses_its_space_and_no_other(tokenizer_folder: Folder) -> None:
    tokenizer = opened(tokenizer_folder("llama"))
    ids = [tokenizer.backend.token_to_id(name) for name in ("<s>", "▁he", "</s>", "▁he", "▁", "▁he")]
    assert pieces_of(tokenizer, ids) == ["", "he", "", " he", " ", " he", ""]


def bytes_of(tokenizer: Tokenizer, token: int) -> int:
    """How many bytes of UTF-8 a token stands for."""
    name = tokenizer.backend.id_to_token(token)
    if token in tokenizer.special_ids:
        return 0
    if BYTE_TOKEN.fullmatch(name):
        return 1
    return len(name) if set(name) <= set(ByteLevel.alphabet()) else len(name.replace("▁", " ").encode())


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["byte-level", "gemma"])
def test_a_prompt_may_end_inside_a_character(tokenizer_folder: Folder, kind: str, text: str) -> None:
    """Wherever it is cut, the answer begins with the character that the prompt left unfinished."""
    tokenizer = opened(tokenizer_folder(kind))
    ids = tokenizer.encode_raw(text)
    for cut in range(len(ids)):
        sent = sum(bytes_of(tokenizer, token) for token in ids[:cut])
        whole = text.encode()[:sent].decode(errors="ignore")
        detokeniser = Detokenizer(tokenizer, ids[:cut])
        assert "".join([*map(detokeniser.push, ids[cut:]), detokeniser.finish()]) == text[len(whole) :]


def test_a_prompt_that_ends_with_a_character_changes_nothing(tokenizer_folder: Folder) -> None:
    for kind in ("byte-level", "gemma", "llama", "metaspace", "words"):
        tokenizer = opened(tokenizer_folder(kind))
        ids = tokenizer.encode_raw("one a b")
        detokeniser = Detokenizer(tokenizer, tokenizer.encode_raw("two 日本"))
        assert "".join([*map(detokeniser.push, ids), detokeniser.finish()]) == tokenizer.decode(ids)


def test_an_unfinished_character_that_nothing_completes_is_not_lost_on_the_way(tokenizer_folder: Folder) -> None:
    tokenizer = opened(tokenizer_folder("byte-level"))
    prompt, ids = [tokenizer.backend.token_to_id("ä½")], tokenizer.encode_raw("he")
    detokeniser = Detokenizer(tokenizer, prompt)
    assert "".join([*map(detokeniser.push, ids), detokeniser.finish()]) == "\ufffdhe"


def test_hidden_tokens_have_no_text(tokenizer_folder: Folder) -> None:
    """An end token need not be a special one."""
    tokenizer = opened(tokenizer_folder("byte-level"))
    hidden = tokenizer.backend.token_to_id("<think>")
    detokeniser = Detokenizer(tokenizer, hidden={hidden})
    assert [detokeniser.push(token) for token in (hidden, *tokenizer.encode_raw("he"), hidden)] == ["", "he", ""]


@pytest.mark.demo
@pytest.mark.parametrize("text", TEXTS)
def test_the_demo_model_speaks_every_language(demo_model: Path, text: str) -> None:
    tokenizer = opened(demo_model)
    pieces = pieces_of(tokenizer, tokenizer.encode_raw(text))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.demo
@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 49155), max_size=60))
def test_random_ids_of_the_demo_model(demo_model: Path, ids: list[int]) -> None:
    tokenizer = opened(demo_model)
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)
