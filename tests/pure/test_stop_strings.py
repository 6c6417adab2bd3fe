"""Stop strings end a text before they begin, and no part of one is ever shown."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zrt.runtime.errors import ZrtError
from zrt.runtime.text.detokenizer import Detokenizer
from zrt.runtime.text.stop_strings import MARKS, StopMatcher, stop_tokens
from zrt.runtime.text.tokenizer import Tokenizer
from zrt.runtime.text.tokenizer_files import TokenizerSettings


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops)
    shown = [matcher.push(piece) for piece in pieces]
    return [*shown, matcher.finish()], matcher.matched


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "matched"),
    [
        ([], ["ab", "c"], ["ab", "c", ""], None),
        (["END"], ["one END two"], ["one ", ""], "END"),
        (["END"], ["one E", "N", "D two"], ["one ", "", "", ""], "END"),
        (["END"], ["one EN", "T"], ["one ", "ENT", ""], None),
        (["END"], ["one EN"], ["one ", "EN"], None),
        (["aab"], ["a", "a", "a", "b"], ["", "", "a", "", ""], "aab"),
        (["abab"], ["aba", "cabab"], ["", "abac", ""], "abab"),
        (["b", "abc"], ["abc"], ["a", ""], "b"),
        (["bc", "abc"], ["xabc"], ["x", ""], "abc"),
        (["\n\n", "User:"], ["Hi\n", "Us", "er: x"], ["Hi", "\n", "", ""], "User:"),
        (["END"], ["END", "more"], ["", "", ""], "END"),
        (["🛑"], ["a🛑b"], ["a", ""], "🛑"),
    ],
)
def test_what_is_shown_and_when(stops: list[str], pieces: list[str], shown: list[str], matched: str | None) -> None:
    assert run(stops, pieces) == (shown, matched)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ZrtError) as raised:
        StopMatcher(["a", ""])
    assert raised.value.kind == "bad_request"


def first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The rule, by brute force: the first prefix of `text` that ends with a stop, and the longest
    one it ends with."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


letters = st.text("ab", min_size=1, max_size=5)


@given(st.lists(letters, max_size=4), st.lists(st.text("abc", max_size=4), max_size=12))
def test_pieces_make_no_difference(stops: list[str], pieces: list[str]) -> None:
    shown, matched = run(stops, pieces)
    assert ("".join(shown), matched) == first_stop("".join(pieces), stops)


@given(st.lists(letters, min_size=1, max_size=4), st.lists(st.text("abc", max_size=4), max_size=12))
def test_at_any_moment_only_text_that_no_stop_can_take_back_is_shown(stops: list[str], pieces: list[str]) -> None:
    matcher, shown = StopMatcher(stops), ""
    for n, piece in enumerate(pieces):
        shown += matcher.push(piece)
        so_far = "".join(pieces[: n + 1])
        for stop in stops:
            for length in range(1, len(stop)):
                if matcher.matched is None and so_far.endswith(stop[:length]):
                    assert len(shown) <= len(so_far) - length


@given(st.lists(letters, min_size=1, max_size=4), st.lists(st.text("abc", max_size=4), max_size=12))
def test_no_more_is_held_back_than_the_beginning_of_a_stop(stops: list[str], pieces: list[str]) -> None:
    matcher, shown = StopMatcher(stops), ""
    for n, piece in enumerate(pieces):
        shown += matcher.push(piece)
        if matcher.matched is None:
            held = "".join(pieces[: n + 1])[len(shown) :]
            assert held == "" or any(stop.startswith(held) for stop in stops)


# ---- tokens without text -------------------------------------------------------------------------


def opened(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.open(folder)
    assert tokenizer is not None
    return tokenizer


def shown_of(tokenizer: Tokenizer, ids: Sequence[int], stops: list[str], hidden: frozenset[int]) -> tuple[str, int]:
    """What is shown of these tokens, and after how many of them a stop string was there."""
    detokeniser, matcher = Detokenizer(tokenizer, hidden=hidden), StopMatcher(stops, tokenizer, hidden)
    shown = ""
    for count, token in enumerate(ids, start=1):
        shown += matcher.push(detokeniser.push(token), token)
        if matcher.matched is not None:
            return shown, count
    shown += matcher.push(detokeniser.finish())
    return shown + matcher.finish(), len(ids) + 1


def by_the_whole(tokenizer: Tokenizer, ids: Sequence[int], stop: str, name: str) -> tuple[str, int]:
    """The same by the library's decoding of ever more tokens, with special tokens and without."""
    backend = tokenizer.backend
    for count in range(1, len(ids) + 1):
        start = backend.decode(ids[:count], skip_special_tokens=False).find(stop)
        if start >= 0:
            before = backend.decode(ids[:count], skip_special_tokens=False)[:start]
            return before.replace(name, "").replace("</s>", ""), count
    return tokenizer.decode(ids), len(ids) + 1


KINDS = ["byte-level", "gemma", "metaspace"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("said", "stop"),
    [
        (["a", "b", "<s>", "a"], "b<s>a"),
        (["a", "b", "<s>", "a", "e"], "<s>a"),
        (["a", "b", "<s>", "a"], "b<s>"),
        (["a", "b", "<s>", "<s>", "a"], "<s><s>"),
        (["a", "<s>", "b", "<s>", "a"], "<s>a"),
        (["a", "</s>", "b", "<s>", "d", "e"], "b<s>d"),
        (["a", "b", "<s>", "d"], "b<s>a"),
        (["a", "<s>", "b"], "<s>bb"),
        (["a", "b", "</s>", "a"], "b<s>a"),
    ],
)
def test_a_special_token_inside_a_stop_string_counts_by_its_name(
    tokenizer_folder: Callable[..., Path], kind: str, said: list[str], stop: str
) -> None:
    tokenizer = opened(tokenizer_folder(kind))
    ids = [tokenizer.backend.token_to_id(name) for name in said]
    expected = by_the_whole(tokenizer, ids, stop, "<s>")
    assert shown_of(tokenizer, ids, ["zzz", stop], frozenset()) == expected


@pytest.mark.parametrize("kind", [*KINDS, "llama", "words"])
def test_any_tokens_with_stop_strings_of_their_own(tokenizer_folder: Callable[..., Path], kind: str) -> None:
    """A part of the text of random tokens, special ones spelled out, is the stop string."""
    tokenizer, picks = opened(tokenizer_folder(kind)), random.Random(0)
    backend = tokenizer.backend
    names = ["one", "two", "."] if kind == "words" else ["a", "b", "d", "e"]
    plain = [backend.token_to_id(name) for name in names]
    special = [backend.token_to_id("<s>"), backend.token_to_id("</s>")]
    named = 0
    for _ in range(200):
        ids = [picks.choice(special if picks.random() < 0.3 else plain) for _ in range(9)]
        text = backend.decode(ids, skip_special_tokens=False)
        start, length = picks.randrange(len(text)), picks.randint(5, 12)
        stop = text[start : start + length]
        inner = stop.replace("<s>", "").replace("</s>", "")
        if inner == stop or set("<>/s") & set(inner) or not inner:
            continue  # it names no special token, or a part of one
        named += 1
        shown, count = shown_of(tokenizer, ids, [stop], frozenset())
        expected, at = by_the_whole(tokenizer, ids, stop, "<s>")
        assert (shown.split(), count) == (expected.split(), at), (ids, stop)
    assert named > 20


def test_a_special_token_is_not_there_for_stop_strings_that_do_not_name_it(
    tokenizer_folder: Callable[..., Path],
) -> None:
    tokenizer = opened(tokenizer_folder("byte-level"))
    ids = [tokenizer.backend.token_to_id(name) for name in ("e", "a", "<s>", "b", "e")]
    assert shown_of(tokenizer, ids, ["ab"], frozenset()) == ("e", 4)
    assert shown_of(tokenizer, ids, ["ab", "</s>x"], frozenset()) == ("e", 4)


def test_the_name_of_a_special_token_spelled_by_other_tokens_is_text(tokenizer_folder: Callable[..., Path]) -> None:
    tokenizer = opened(tokenizer_folder("byte-level"))
    ids = [tokenizer.backend.token_to_id(name) for name in "a<s>be"]
    assert shown_of(tokenizer, ids, ["<s>b"], frozenset()) == ("a", 5)
    assert shown_of(tokenizer, ids, ["<s>"], frozenset()) == ("a", 4)


@pytest.mark.parametrize("first", [0xD7FF, 0xE000, 0xF_0000, 0xF_0001, 0x10_0000, 0x10_0001, 0x10_FFFF], ids=hex)
@pytest.mark.parametrize("kind", ["gemma", "llama"])  # these have a token for every byte
def test_no_character_of_a_text_is_taken_for_a_special_token(
    tokenizer_folder: Callable[..., Path], kind: str, first: int
) -> None:
    tokenizer = opened(tokenizer_folder(kind))
    text = f"a{chr(first)}b<s>"
    data = [tokenizer.backend.token_to_id(f"<0x{byte:02X}>") for byte in text[1].encode()]
    ids = [*map(tokenizer.backend.token_to_id, "a"), *data, tokenizer.backend.token_to_id("b")]
    assert None not in ids
    assert tokenizer.decode(ids) == text[:3]
    assert shown_of(tokenizer, ids, ["<s>b"], frozenset()) == (text[:3], len(ids) + 1)
    assert shown_of(tokenizer, [*ids, tokenizer.bos_id], [f"{text[1]}b<s>"], frozenset()) == ("a", len(ids) + 1)


def test_stop_strings_may_name_many_special_tokens_and_not_any_number(tokenizer_folder: Callable[..., Path]) -> None:
    tokenizer = opened(tokenizer_folder("byte-level"))
    most = len(MARKS) - 1
    names = [f"<|{n}|>" for n in range(most + 1)]
    tokenizer.backend.add_special_tokens(names)
    tokenizer = Tokenizer(tokenizer.backend, TokenizerSettings({}, [], [], None, False), "many")
    ids = [tokenizer.backend.token_to_id(name) for name in ("a", names[most - 1], "b")]
    stops = [f"{name}b" for name in names]
    assert shown_of(tokenizer, ids, stops[:most], frozenset()) == ("a", 3)
    with pytest.raises(ZrtError, match=f"{most} may be"):
        StopMatcher(stops, tokenizer)


def test_hidden_tokens_are_named_like_special_ones(tokenizer_folder: Callable[..., Path]) -> None:
    tokenizer = opened(tokenizer_folder("byte-level"))
    ids = [tokenizer.backend.token_to_id(name) for name in ("a", "<think>", "b")]
    hidden = frozenset({ids[1]})
    assert shown_of(tokenizer, ids, ["<think>b"], hidden) == ("a", 3)
    assert stop_tokens(["<think>", "<s>", "a"], tokenizer, hidden) == {ids[1], tokenizer.bos_id}


def test_tokens_before_the_search_begins_are_context_of_those_after(tokenizer_folder: Callable[..., Path]) -> None:
    """The space of a token is text where it is not the first of the answer."""
    tokenizer = opened(tokenizer_folder("llama"))
    ids = [tokenizer.backend.token_to_id(name) for name in ("▁he", "▁he", "</s>", "a")]
    detokeniser, matcher = Detokenizer(tokenizer), StopMatcher([" he</s>a"], tokenizer)
    shown = [matcher.push(detokeniser.push(token), token, look=count > 0) for count, token in enumerate(ids)]
    assert (shown, matcher.matched) == (["he", "", "", ""], " he</s>a")
