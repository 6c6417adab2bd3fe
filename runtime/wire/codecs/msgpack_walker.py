"""A MessagePack reader that goes value by value, for what a typed decode hides: repeated keys, int
keys, ext, strings that are not UTF-8.

It never recurses, allocates nothing on the word of a length, and gives up after `MAX_VALUES`.
"""

from typing import Final, Literal

import msgspec

from zrt.runtime.wire.codecs import Undecodable

Family = Literal["nil", "bool", "unsigned", "signed", "float", "str", "bin", "array", "map", "ext"]

MAX_DEPTH: Final = 1022
"""The most containers inside one another in a value that is skipped: rmp-serde's limit of 1024 less
the message and the value's own level."""
MAX_VALUES: Final = 1_000_000
"""The most values read one by one in one message, so that a hostile frame cannot hold the caller
for long. Runs of octets do not count."""

_HEADS: Final[dict[int, tuple[Family, int]]] = {
    0xC0: ("nil", 0),
    0xC2: ("bool", 0),
    0xC3: ("bool", 0),
    0xC4: ("bin", 1),
    0xC5: ("bin", 2),
    0xC6: ("bin", 4),
    0xC7: ("ext", 1),
    0xC8: ("ext", 2),
    0xC9: ("ext", 4),
    0xCA: ("float", 4),
    0xCB: ("float", 8),
    0xCC: ("unsigned", 1),
    0xCD: ("unsigned", 2),
    0xCE: ("unsigned", 4),
    0xCF: ("unsigned", 8),
    0xD0: ("signed", 1),
    0xD1: ("signed", 2),
    0xD2: ("signed", 4),
    0xD3: ("signed", 8),
    0xD9: ("str", 1),
    0xDA: ("str", 2),
    0xDB: ("str", 4),
    0xDC: ("array", 2),
    0xDD: ("array", 4),
    0xDE: ("map", 2),
    0xDF: ("map", 4),
}
"""The families of values by marker, and the bytes of the number, length or count that follows."""

_RUN: Final = 4096
_integers: Final = msgspec.msgpack.Decoder(list[int])


class Walker:
    """A reader of one frame from front to back. Every method raises Undecodable where the bytes end
    or are something else."""

    __slots__ = ("_values", "data", "pos")

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.pos = 0
        self._values = 0

    def take(self, count: int) -> memoryview:
        """Return the next `count` bytes, not copied."""
        end = self.pos + count
        if end > len(self.data):
            raise Undecodable(f"{count} bytes announced, {len(self.data) - self.pos} left")
        self.pos, start = end, self.pos
        return self.data[start:end]

    def head(self) -> tuple[Family, int]:
        """Return the next value's family with its number, length in bytes, or count of items; what
        follows is left to the caller."""
        self._values += 1
        if self._values > MAX_VALUES:
            raise Undecodable(f"more than {MAX_VALUES} values")
        marker = self.take(1)[0]
        if marker < 0x80:
            return "unsigned", marker
        if marker < 0x90:
            return self._counted("map", marker & 0x0F)
        if marker < 0xA0:
            return self._counted("array", marker & 0x0F)
        if marker < 0xC0:
            return "str", marker & 0x1F
        if marker >= 0xE0:
            return "signed", marker - 0x100
        if 0xD4 <= marker <= 0xD8:
            return "ext", 1 << (marker - 0xD4)
        if marker not in _HEADS:
            raise Undecodable("byte c1, which starts no value")
        family, width = _HEADS[marker]
        number = int.from_bytes(self.take(width), "big", signed=family == "signed")
        if family == "bool":
            return family, marker & 1
        return self._counted(family, number)

    def _counted(self, family: Family, number: int) -> tuple[Family, int]:
        least = {"array": 1, "map": 2}.get(family, 0) * number
        if least > len(self.data) - self.pos:
            raise Undecodable(f"{family} of {number} announced, {len(self.data) - self.pos} bytes left")
        return family, number

    def skip(self) -> None:
        """Pass over one value of any kind."""
        open_: list[int] = []
        while True:
            family, size = self.head()
            if family in ("array", "map", "ext") and len(open_) >= MAX_DEPTH:
                raise Undecodable(f"nested deeper than {MAX_DEPTH}")
            if family in ("str", "bin"):
                self.take(size)
            elif family == "ext":
                self.take(1 + size)
            elif family == "array":
                open_.append(size)
            elif family == "map":
                open_.append(2 * size)
            while open_ and open_[-1] == 0:
                open_.pop()
            if not open_:
                return
            open_[-1] -= 1

    def unsigned(self, limit: int) -> int:
        """Return an integer in 0..limit, in any width, signed forms included."""
        family, number = self.head()
        if family not in ("unsigned", "signed"):
            raise Undecodable(f"expected an integer, got {family}")
        if not 0 <= number <= limit:
            raise Undecodable(f"expected an integer in 0..{limit}, got {number}")
        return number

    def octets(self, count: int) -> memoryview:
        """Return `count` integers in 0..255, the items of an array whose head was read, as bytes.

        Runs in the shortest form are decoded together: n bytes hold n items less one for each
        marker cc, and of a pair of cc the second is an operand. The decoder checks the guess; what
        it refuses is read one item at a time.
        """
        out = bytearray()
        while len(out) < count:
            run = bytes(self.data[self.pos : self.pos + min(_RUN, count - len(out))])
            wide = run.replace(b"\xcc\xcc", b"\xcc\x00")
            items = len(run) - wide.count(b"\xcc")
            if wide.endswith(b"\xcc"):
                run = run[:-1]
            try:
                out += bytes(_integers.decode(b"\xdd" + items.to_bytes(4, "big") + run))
                self.pos += len(run)
                single = 0 if items else 1
            except ValueError:
                single = min(_RUN, count - len(out))
            for _ in range(single):
                out.append(self.unsigned(255))
        return memoryview(bytes(out))

    def end(self) -> None:
        """Raise Undecodable if anything follows."""
        if self.pos != len(self.data):
            raise Undecodable(f"{len(self.data) - self.pos} bytes after its end")
