"""The alphabet of GPT-2's byte-level vocabularies: a printable character for each byte."""

from typing import Final


def _byte_of() -> dict[str, int]:
    """Return the byte of each character: printable Latin-1 stands for itself, U+0100 and on for the
    other bytes in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(rest)}


BYTE_OF: Final = _byte_of()
