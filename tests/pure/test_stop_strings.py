"""Stop strings end a text before they begin, and no part of one is ever shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zrt.runtime.errors import ZrtError
from zrt.runtime.text.stop_strings import StopMatcher


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
