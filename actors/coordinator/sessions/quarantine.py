"""The quarantine of sessions that may be why stages are lost: each was in a turn that its stage did
not survive, and no token came of it since. Pure.

All sessions of that turn are as suspect as the one that was too much for the stage. So the sessions
to which it happened again are tried one at a time: a token clears a session; the one that loses its
stage once too often is named, and the others go on.
"""

from typing import Final

LOSSES: Final = 3
"""How many stages are lost in a row until a session is not replayed again."""
TRIED: Final = 2
"""How many stages are lost in a row until a session is tried alone."""


class Quarantine:
    """The sessions under suspicion, by id."""

    def __init__(self) -> None:
        self._losses: dict[int, int] = {}
        self._on_trial: int | None = None

    def __bool__(self) -> bool:
        return bool(self._losses)

    def lost(self, session: int) -> bool:
        """Note that a session's stage was lost in a turn that the session was in; return whether
        that was once too often. Then the session ends, and is to be cleared."""
        self._losses[session] = self._losses.get(session, 0) + 1
        return self._losses[session] >= LOSSES

    def may_run(self, session: int) -> bool:
        """Return whether a session may take a route now; one that is to be tried may, and is on
        trial from then on, if no other is."""
        if self._losses.get(session, 0) < TRIED:
            return True
        if self._on_trial is None:
            self._on_trial = session
        return self._on_trial == session

    def leave(self, session: int) -> bool:
        """Note that a session does not run, for whatever reason; return whether others that wait
        may be tried now."""
        if self._on_trial != session:
            return False
        self._on_trial = None
        return True

    def clear(self, session: int) -> bool:
        """Note that a token came of a session, or that it has ended; return whether others that
        wait may be tried now."""
        self._losses.pop(session, None)
        return self.leave(session)
