"""Counted nouns."""

from zrt.runtime.formatting import counted


def test_one_is_singular_and_all_else_plural() -> None:
    assert [counted(number, "session") for number in (0, 1, 2)] == ["0 sessions", "1 session", "2 sessions"]
