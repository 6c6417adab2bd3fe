"""The parts of a tokenizer as its file describes them, and the alphabet of GPT-2's byte-level
vocabularies: a printable character for each byte."""

import json
from typing import Any, Final


def steps(part: Any) -> list[dict[str, Any]]:
    """Return the settings of the steps of a normalizer, pre-tokenizer or decoder, sequences laid
    out flat; none for None."""
    return [] if part is None else _flat(json.loads(part.__getstate__()))


def _flat(step: dict[str, Any]) -> list[dict[str, Any]]:
    inner = next((step[name] for name in ("normalizers", "pretokenizers", "decoders") if name in step), None)
    return [step] if inner is None else [each for one in inner for each in _flat(one)]


def _byte_of() -> dict[str, int]:
    """Return the byte of each character: printable Latin-1 stands for itself, U+0100 and on for the
    other bytes in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(rest)}


BYTE_OF: Final = _byte_of()
