"""Amounts and ranges in words."""


def counted(number: int, noun: str) -> str:
    """Return the number and its noun, whose plural ends in "s": "1 session", "3 sessions"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def block_range(first: int, last: int) -> str:
    """Return blocks first..last, both included, as people write them: "0-14"."""
    return f"{first}-{last}"


def byte_size(count: int) -> str:
    """Return a number of bytes for people: "310.6 MiB"."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
