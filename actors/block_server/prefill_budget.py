"""The budget of prompt tokens that a turn may carry: the whole chunk while one prompt is alone,
fewer while others wait for the turn to end, and while sessions decode so few that these keep their
pace. Pure."""

from typing import Final

STRETCH: Final = 2.5
"""How many times as long a turn may take with a prompt chunk as without. The cost of a token grows
along a prompt, faster than it is learnt: the longest turns take 3 to 4 times as long."""
LEAST: Final = 16
"""How many prompt tokens a turn on a CPU may always carry: a prompt must get on, and fewer rows
cost hardly less."""
LEAST_ON_GPU: Final = 512
"""How many prompt tokens a turn on a GPU may always carry: there a forward of 16 rows takes half
the time of one of 512."""
SHARED: Final = 64
"""How many prompt tokens a turn on a CPU carries while several prompts wait: a short one that comes
waits for a turn to end. Fewer would read all weights for too few rows."""
MEMORY: Final = 0.2
"""Weight of the newest measurement."""
QUIET_S: Final = 1.0
"""Seconds without a decode after which no session is taken to wait for one."""


class PrefillBudget:
    """The prefill budget, learnt from what a decode turn and a prompt token cost; `most` and
    `least` are its bounds in tokens, `shared` bounds it too while several prompts wait. Times are
    in seconds."""

    def __init__(self, most: int, least: int = LEAST, shared: int = SHARED) -> None:
        self._most = most
        self._least = min(least, most)
        self._shared = max(self._least, min(shared, most))
        self._decode_s = 0.0
        self._token_s = 0.0
        self._decoded = float("-inf")

    def observe(self, now: float, decodes: int, prompt_tokens: int, seconds: float) -> None:
        """Learn from a turn that ended at `now`, having run so many decodes and prompt tokens in
        `seconds`."""
        if decodes:
            self._decoded = now
        if decodes and not prompt_tokens:
            self._decode_s = _blend(self._decode_s, seconds)
        elif prompt_tokens:
            spent = max(0.0, seconds - (self._decode_s if decodes else 0.0))
            self._token_s = _blend(self._token_s, spent / prompt_tokens)

    def budget(self, now: float, *, several: bool = False) -> int:
        """Return how many prompt tokens the next turn may carry; `several` prompts wait for it, or
        one."""
        if now - self._decoded > QUIET_S:
            return self._shared if several else self._most
        if not self._decode_s or not self._token_s:
            return self._least
        return max(self._least, int(min(self._most, (STRETCH - 1) * self._decode_s / self._token_s)))


class Crowd:
    """The slots that are at work: with more than one, the pipeline's other stages compute at the
    same time as this one."""

    def __init__(self) -> None:
        self._seen: dict[int, float] = {}

    def observe(self, now: float, slot: int) -> int:
        """Note a turn of this slot that begins at `now` (seconds); return how many slots have had
        one lately, this one included."""
        self._seen = {other: seen for other, seen in self._seen.items() if now - seen <= QUIET_S}
        self._seen[slot] = now
        return len(self._seen)


def _blend(old: float, new: float) -> float:
    return new if not old else (1 - MEMORY) * old + MEMORY * new
