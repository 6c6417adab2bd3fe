"""A session's history, text and states; and what a replay sends."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zrt.actors.coordinator.sessions.session import MOVES, ReplaySpan, Session, SessionState, replay_spans
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.sampling import Sampling, TokenLogprobs
from zrt.runtime.text.detokenizer import Detokenizer
from zrt.runtime.text.stop_strings import StopMatcher
from zrt.runtime.text.tokenizer import Tokenizer


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


def session(
    *,
    max_length: int = 100,
    stop: tuple[str, ...] = (),
    eos: frozenset[int] = frozenset({25}),
    min_tokens: int = 0,
    logprobs: int | None = None,
) -> Session:
    sampling = Sampling(min_tokens=min_tokens, logprobs=logprobs)
    made = Session(1, eos, sampling, StopMatcher(stop))
    made.begin([1, 2, 3], max_length, Letters())
    made.move(SessionState.PREFILL)
    made.move(SessionState.DECODING)
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
    assert made.state is SessionState.FINISHED


def test_a_stop_string_that_only_the_end_completes_is_a_stop() -> None:
    assert run(session(max_length=6, stop=("bc",)), [0, 1, 2]) == ("a", [0, 1, 2], "stop")


@pytest.mark.parametrize(
    ("min_tokens", "shown", "reason"),
    [(0, "a", "stop"), (2, "a", "stop"), (3, "abca", "stop"), (5, "abca", "stop"), (6, "abcabca", "stop"), (9, "abcabcabc", "length")],
)  # fmt: skip
def test_no_stop_is_looked_for_in_the_text_of_the_minimum(min_tokens: int, shown: str, reason: str) -> None:
    """The text of a token comes with the next one here: the first `bc` with tokens 3 and 4, the
    last one with the end."""
    made = session(stop=("bc",), max_length=12, min_tokens=min_tokens)
    text, _, ended = run(made, [0, 1, 2] * 3)
    assert (text, ended) == (shown, reason)


@pytest.mark.parametrize("kind", ["byte-level", "gemma"])
@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("ab 👩‍👩‍👧‍👦 ok", "👩‍👩‍👧‍👦", "ab "),
        ("ab 👩‍👩‍👧‍👦 ok", "‍👧", "ab 👩‍👩"),
        ("one 🇫🇷🇩🇪 two", "🇷🇩", "one 🇫"),
        ("漢字かな交じり文", "かな交", "漢字"),
        ("cafe\u0301 noir", "e\u0301 n", "caf"),
        ("cafe\u0301 noir", "\u0301", "cafe"),
        ("a long answer. Then more", "er. Th", "a long answ"),
    ],
)
def test_a_stop_string_may_span_many_tokens(
    tokenizer_folder: Callable[..., Path], kind: str, text: str, stop: str, shown: str
) -> None:
    tokenizer = Tokenizer.open(tokenizer_folder(kind))
    assert tokenizer is not None
    ids = tokenizer.encode_raw(text)
    detokeniser, stops = Detokenizer(tokenizer), StopMatcher([stop])
    made = Session(1, frozenset({999}), Sampling(), stops)
    made.begin([1, 2, 3], 200, detokeniser)
    made.move(SessionState.PREFILL)
    made.move(SessionState.DECODING)
    said, taken, reason = run(made, [*ids, 999])
    assert (said, reason, stops.matched) == (shown, "stop", stop)
    if kind == "byte-level":
        assert stop not in tokenizer.decode(taken[:-1])  # it ended as soon as the stop string was there


def test_a_minimum_that_is_the_maximum_looks_for_no_stop_at_all() -> None:
    made = session(stop=("bc",), max_length=6, min_tokens=3)
    assert run(made, [0, 1, 2]) == ("abc", [0, 1, 2], "length")


def test_logprobs_wait_with_their_tokens_while_text_is_held_back() -> None:
    made = session(stop=("bcx",), logprobs=0)
    ids, said = [], []
    for token in [0, 1, 2, 3, 25]:
        piece = made.push(len(made.tokens), token, TokenLogprobs(token, -1.0 - token))
        if piece is not None:
            assert piece.logprobs is not None
            assert [entry.token for entry in piece.logprobs] == piece.token_ids
            ids += piece.token_ids
            said += piece.logprobs
    assert ids == [0, 1, 2, 3, 25]
    assert [entry.logprob for entry in said] == [-1.0, -2.0, -3.0, -4.0, -26.0]


def test_a_repeated_token_does_not_repeat_its_logprobs() -> None:
    made = session(logprobs=0)
    made.push(3, 0, TokenLogprobs(0, -1.0))
    made.push(3, 0, TokenLogprobs(0, -1.0))
    piece = made.finish("cancelled")
    assert piece.logprobs == [TokenLogprobs(0, -1.0)]


def test_pieces_have_no_logprobs_unless_asked_for() -> None:
    made = session()
    made.push(3, 0)
    assert made.finish("cancelled").logprobs is None


def test_a_repeated_token_is_ignored_and_a_missing_one_is_a_gap() -> None:
    made = session()
    made.push(3, 0)
    assert made.push(3, 7) is None
    assert made.tokens.tolist() == [1, 2, 3, 0]
    with pytest.raises(ZrtError, match="token 9 came, 4 was awaited") as caught:
        made.push(9, 0)
    assert caught.value.kind == "kv_gap"


def test_cancel_shows_what_was_held_back() -> None:
    made = session()
    made.push(3, 0)
    piece = made.finish("cancelled")
    assert (piece.text, piece.token_ids, piece.finish) == ("a", [0], "cancelled")
    assert made.push(4, 1) is None


@pytest.mark.parametrize("source", list(SessionState))
@pytest.mark.parametrize("target", list(SessionState))
def test_only_the_moves_of_the_table_are_possible(source: SessionState, target: SessionState) -> None:
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
        ([0], 1, [ReplaySpan(0, 1, -1)]),
        ([0, 0], 9, [ReplaySpan(0, 9, -1)]),
        ([8, 8], 9, [ReplaySpan(8, 9, -1)]),
        ([9, 9], 9, [ReplaySpan(8, 9, -1)]),
        ([9, 0, 9], 9, [ReplaySpan(0, 8, 1), ReplaySpan(8, 9, -1)]),
        ([0, 9, 9], 9, [ReplaySpan(0, 8, 0), ReplaySpan(8, 9, -1)]),
        ([9, 9, 0], 9, [ReplaySpan(0, 9, -1)]),
        ([9, 4, 6, 9], 9, [ReplaySpan(4, 8, 2), ReplaySpan(8, 9, -1)]),
    ],
)
def test_a_replay_runs_what_is_lacking(have: list[int], length: int, spans: list[ReplaySpan]) -> None:
    assert replay_spans(have, length) == spans


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(1, 30))
def test_after_a_replay_every_stage_holds_the_history(have: list[int], length: int) -> None:
    """By the step rule: a stage goes back to a step's start, and never runs one beyond what it
    holds."""
    held = [min(n, length) for n in have]
    for span in replay_spans(held, length):
        until = span.until if span.until >= 0 else len(held) - 1
        for stage in range(until + 1):
            assert span.start <= held[stage]
            held[stage] = span.stop
    assert held == [length] * len(held)
