"""zrt's runtime. Scripts need `Client` and `ZrtError`."""

from typing import TYPE_CHECKING

from zrt.runtime.errors import ZrtError

if TYPE_CHECKING:
    from zrt.runtime.client.client import Client

__all__ = ["Client", "ZrtError"]


def __getattr__(name: str) -> object:
    """The client is imported by those who ask for it: a child that has yet to hold its lifeline
    should not wait for it."""
    if name == "Client":
        from zrt.runtime.client.client import Client

        return Client
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
