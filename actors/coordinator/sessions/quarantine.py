"""Sessions that may be why stages are lost: each was in a turn that its stage did not survive, and
no token came of it since. Pure.

Whoever shared that turn is as suspect as the one that was too much for it. So those to whom it
happened again are tried one at a time: a token clears one; the one that loses its stage once too
often is named, and the others go on.
"""

from typing import Final

LOSSES: Final = 3
"""Stages lost in a row, after which a session is not replayed again."""
TRIED: Final = 2
"""Stages lost in a row, after which a session is tried alone."""


class Quarantine:
    """Sessions by id."""

    def __init__(self) -> None:
        self._losses: dict[int, int] = {}
        self._on_trial: int | None = None

    def __bool__(self) -> bool:
        return bool(self._losses)

    def lost(self, session: int) -> bool:
        """Its stage was lost in a turn that it was in. Whether that was once too often; then it
        ends, and is to be cleared."""
        self._losses[session] = self._losses.get(session, 0) + 1
        return self._losses[session] >= LOSSES

    def may_run(self, session: int) -> bool:
        """Whether it may take a route now: if it is to be tried, then only while no other is."""
        if self._losses.get(session, 0) < TRIED:
            return True
        if self._on_trial is None:
            self._on_trial = session
        return self._on_trial == session

    def leave(self, session: int) -> bool:
        """It does not run, for whatever reason. Whether others that wait may be tried now."""
        if self._on_trial != session:
            return False
        self._on_trial = None
        return True

    def clear(self, session: int) -> bool:
        """A token came of it, or it has ended. Whether others that wait may be tried now."""
        self._losses.pop(session, None)
        return self.leave(session)
