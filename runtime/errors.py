"""zrt's errors: one exception that carries `(kind, message, where)`, the three fields every error
message has on the wire."""

from typing import Final, Literal, Self, cast, get_args

from zrt.runtime.formatting import escaped

Kind = Literal[
    "bad_request",
    "bad_config",
    "bad_model",
    "unknown_op",
    "unknown_model",
    "unknown_session",
    "model_not_loaded",
    "kv_gap",
    "kv_full",
    "context_exceeded",
    "warming_up",
    "draining",
    "overloaded",
    "deadline",
    "cancelled",
    "stage_lost",
    "rank_failed",
    "worker_failed",
    "coordinator_lost",
    "resume_expired",
    "nccl_init_failed",
    "nccl_not_initialised",
    "insufficient_memory",
    "insufficient_vram",
    "unsupported",
    "too_large",
    "unauthorized",
    "internal",
]
KINDS: Final[frozenset[str]] = frozenset(get_args(Kind))
MEMORY: Final[frozenset[Kind]] = frozenset({"insufficient_memory", "insufficient_vram"})


class ZrtError(Exception):
    """A failure with a kind. Code branches on `kind`; `message` tells people what failed and what
    to do.

    `where` is the actor or file that failed, empty when the message already says it.
    """

    def __init__(self, kind: Kind, message: str, where: str = "") -> None:
        super().__init__(message)
        self.kind: Kind = kind
        self.message = message
        self.where = where

    @classmethod
    def of(cls, kind: str, message: str, where: str = "") -> Self:
        """Return an error that came over the wire; a kind that is not known here becomes
        `internal`."""
        return cls(cast(Kind, kind if kind in KINDS else "internal"), message, where)

    def anew(self) -> "ZrtError":
        """Return a copy of this error that was never raised. An error that is kept, or told to
        several, is raised as a copy: a traceback grows with every raise, and keeps everything in
        its frames alive."""
        return ZrtError(self.kind, self.message, self.where)

    def __str__(self) -> str:
        where = escaped(self.where)
        if where and "\n" in self.message:
            return f"{self.kind}: {where}:\n{self.message}"
        place = f" ({where})" if where else ""
        return f"{self.kind}: {self.message}{place}"
