"""Amounts in words."""


def counted(number: int, noun: str) -> str:
    """Return the number and its noun, whose plural ends in "s": "1 session", "3 sessions"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
