"""Stop strings over a stream of text."""

from collections.abc import Sequence

from zrt.runtime.errors import ZrtError


class StopMatcher:
    """A filter that lets text through up to the first stop string, and holds back what could be the
    beginning of one.

    The first stop to be complete ends the text, as the answer ends there; of two complete at the
    same character, the longer. So the outcome depends on the text alone, not on the pieces it comes
    in.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Take the stop strings. ZrtError bad_request: one is empty, and would be found
        everywhere."""
        if not all(stops):
            raise ZrtError("bad_request", "a stop string is empty")
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def push(self, piece: str) -> str:
        """Add text, and return what surely stands before any stop string; after a match, always an
        empty text."""
        if self.matched is not None:
            return ""
        text = self._held + piece
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            _, end, self.matched = min(found)
            self._held = ""
        else:
            end = self._beginning(text)
            self._held = text[end:]
        return text[:end]

    def finish(self) -> str:
        """Return the text held back, now that no more comes."""
        held, self._held = self._held, ""
        return held

    def _beginning(self, text: str) -> int:
        """Return where the longest end of `text` starts that is the beginning of a stop string; the
        length of `text` if there is none."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stops):
                return start
        return len(text)
