"""A session's history, text and states; and what a replay sends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.sampling import Sampling
from zrt.runtime.sessions import MOVES, Session, Span, State, replay_spans
from zrt.runtime.stops import StopMatcher


class Letters:
    """A detokeniser whose token n is the n-th letter, given out one token late."""

    def __init__(self) -> None:
        self.late = ""

    def push(self, token: int) -> str:
        text, self.late = self.late, chr(ord("a") + token)
        return text

    def finish(self) -> str:
        text, self.late = self.late, ""
        return text


def session(*, max_length: int = 100, stop: tuple[str, ...] = (), eos: frozenset[int] = frozenset({25})) -> Session:
    made = Session(1, [1, 2, 3], max_length, eos, Sampling(), Letters(), StopMatcher(stop))
    made.move(State.PREFILL)
    made.move(State.DECODING)
    return made


def run(made: Session, tokens: list[int]) -> tuple[str, list[int], str | None]:
    text, ids, reason = "", [], None
    for token in tokens:
        piece = made.push(len(made.tokens), token)
        if piece is None:
            continue
        assert piece.index == len(ids)
        text += piece.text
        ids += piece.token_ids
        reason = piece.finish
    return text, ids, reason


def test_an_end_token_ends_it_and_is_counted_but_not_shown() -> None:
    made = session()
    assert run(made, [0, 1, 25]) == ("ab", [0, 1, 25], "stop")
    assert made.completion_tokens == 3


def test_max_length_ends_it() -> None:
    assert run(session(max_length=5), [0, 1]) == ("ab", [0, 1], "length")


def test_a_stop_string_ends_it_and_is_not_shown() -> None:
    made = session(stop=("cd",))
    assert run(made, [0, 1, 2, 3, 4]) == ("ab", [0, 1, 2, 3, 4], "stop")
    assert made.state is State.FINISHED


def test_a_stop_string_that_only_the_end_completes_is_a_stop() -> None:
    assert run(session(max_length=6, stop=("bc",)), [0, 1, 2]) == ("a", [0, 1, 2], "stop")


def test_a_repeated_token_is_ignored_and_a_missing_one_is_a_gap() -> None:
    made = session()
    made.push(3, 0)
    assert made.push(3, 7) is None
    assert made.tokens == [1, 2, 3, 0]
    with pytest.raises(ZrtError, match="token 9 came, 4 was awaited") as caught:
        made.push(9, 0)
    assert caught.value.kind == "kv_gap"


def test_cancel_shows_what_was_held_back() -> None:
    made = session()
    made.push(3, 0)
    piece = made.finish("cancelled")
    assert (piece.text, piece.token_ids, piece.finish) == ("a", [0], "cancelled")
    assert made.push(4, 1) is None


@pytest.mark.parametrize("source", list(State))
@pytest.mark.parametrize("target", list(State))
def test_only_the_moves_of_the_table_are_possible(source: State, target: State) -> None:
    made = session()
    made.state = source
    if target in MOVES[source]:
        made.move(target)
        assert made.state is target
    else:
        with pytest.raises(ZrtError):
            made.move(target)


@pytest.mark.parametrize(
    ("have", "length", "spans"),
    [
        ([0], 1, [Span(0, 1, -1)]),
        ([0, 0], 9, [Span(0, 9, -1)]),
        ([8, 8], 9, [Span(8, 9, -1)]),
        ([9, 9], 9, [Span(8, 9, -1)]),
        ([9, 0, 9], 9, [Span(0, 8, 1), Span(8, 9, -1)]),
        ([0, 9, 9], 9, [Span(0, 8, 0), Span(8, 9, -1)]),
        ([9, 9, 0], 9, [Span(0, 9, -1)]),
        ([9, 4, 6, 9], 9, [Span(4, 8, 2), Span(8, 9, -1)]),
    ],
)
def test_a_replay_runs_what_is_lacking(have: list[int], length: int, spans: list[Span]) -> None:
    assert replay_spans(have, length) == spans


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(1, 30))
def test_after_a_replay_every_stage_holds_the_history(have: list[int], length: int) -> None:
    """By the step rule: a stage goes back to a step's start, and never runs one beyond what it holds."""
    held = [min(n, length) for n in have]
    for span in replay_spans(held, length):
        until = span.until if span.until >= 0 else len(held) - 1
        for stage in range(until + 1):
            assert span.start <= held[stage]
            held[stage] = span.stop
    assert held == [length] * len(held)
